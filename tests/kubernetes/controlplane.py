"""A real Kubernetes control plane in a network namespace of its own, for the tests.

etcd, kube-apiserver, kube-controller-manager and kube-scheduler come from $KUBEBUILDER_ASSETS (the variable of
controller-runtime's envtest). The namespace has 10.244.0.1, where the API server listens, and every address of
10.244.0.0/17 can be bound by a test that plays a pod by itself; 10.244.128.0/17 is for pods with a namespace each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.kubernetes.netns import NetworkNamespace, die_with_parent

API_HOST = "10.244.0.1"
API_PORT = 6443
API_URL = f"https://{API_HOST}:{API_PORT}"
LOCAL_PODS = "10.244.0.1/17"
ADMIN = "admin"

_AUDIT_POLICY = """apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""
_MERGE_PATCH = "application/merge-patch+json"
Json = dict[str, Any]


class ApiError(Exception):
    """The API server said no: `code` is the HTTP status, the text its message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 30.0, interval: float = 0.05) -> Any:
    """The first true value of `condition`; AssertionError after `timeout` seconds. For what has no event."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}; last value {value!r}")
        time.sleep(interval)


class ControlPlane:
    """Start, stop and talk to the servers. All methods may be called from outside the namespace."""

    def __init__(self, assets: Path, directory: Path) -> None:
        self.assets = assets
        self.directory = directory
        self.netns = NetworkNamespace()
        self.kubeconfig = directory / "kubeconfig"
        self.audit_log = directory / "audit.log"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._context: ssl.SSLContext | None = None

    @property
    def ca_file(self) -> Path:
        """The API server's certificate, which is its own CA."""
        return self.directory / "certs" / "apiserver.crt"

    def start(self) -> None:
        """Start every server and wait until /readyz and the default service account are there."""
        self.netns.run(["ip", "addr", "add", LOCAL_PODS, "dev", "lo"])
        self._write_files()
        self._start_etcd()
        self.start_api_server()
        self.start_controllers()

    def stop(self) -> None:
        """End every server, the API server by SIGKILL: SIGTERM would drain its watches for half a minute."""
        for name in list(self._processes):
            self._end(name, signal.SIGKILL)
        self.netns.close()

    # The servers

    def start_api_server(self, *extra: str) -> None:
        """Start the API server on the same etcd (again) and wait until it is ready."""
        directory = self.directory
        self._spawn(
            "kube-apiserver",
            *("--etcd-servers", "http://127.0.0.1:2379"),
            *("--bind-address", API_HOST, "--secure-port", str(API_PORT), "--cert-dir", str(directory / "certs")),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--service-account-signing-key-file", str(directory / "sa.key")),
            *("--service-account-key-file", str(directory / "sa.key")),
            *("--authorization-mode", "RBAC", "--token-auth-file", str(directory / "tokens.csv")),
            *("--service-cluster-ip-range", "10.96.0.0/24", "--allow-privileged=true"),
            *("--audit-policy-file", str(directory / "audit.yaml"), "--audit-log-path", str(self.audit_log)),
            *extra,
        )
        self._context = None
        self._wait("kube-apiserver", self._api_ready)

    def stop_api_server(self) -> None:
        """An outage begins: no server answers any more."""
        self._end("kube-apiserver", signal.SIGKILL)

    def start_controllers(self) -> None:
        """Start the controllers and the scheduler (anew after an outage: their own back-off is up to 32 s)."""
        for name in ("kube-controller-manager", "kube-scheduler"):
            if name in self._processes:
                self._end(name, signal.SIGKILL)
        kubeconfig = str(self.kubeconfig)
        # The default of 20 requests a second makes their start take 5 s.
        fast = ("--kube-api-qps", "500", "--kube-api-burst", "1000")
        self._spawn(
            "kube-controller-manager",
            *("--kubeconfig", kubeconfig, "--service-account-private-key-file", str(self.directory / "sa.key")),
            *("--root-ca-file", str(self.ca_file), "--leader-elect=false", "--use-service-account-credentials=true"),
            *("--controllers", "*", "--bind-address", "127.0.0.1", "--secure-port", "0"),
            *fast,
        )
        self._spawn("kube-scheduler", "--kubeconfig", kubeconfig, "--leader-elect=false", "--secure-port", "0", *fast)
        self._wait("kube-controller-manager", lambda: self.exists("/api/v1/namespaces/default/serviceaccounts/default"))

    def _start_etcd(self) -> None:
        self._spawn(
            "etcd",
            *("--data-dir", str(self.directory / "etcd"), "--unsafe-no-fsync", "--log-level", "error"),
            *("--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379"),
            *("--listen-peer-urls", "http://127.0.0.1:2380"),
        )

    def _write_files(self) -> None:
        directory = self.directory
        subprocess.run(
            ["openssl", "genrsa", "-out", str(directory / "sa.key"), "2048"], check=True, capture_output=True
        )
        (directory / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
        (directory / "audit.yaml").write_text(_AUDIT_POLICY)
        cluster = {"server": API_URL, "certificate-authority": str(self.ca_file)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": ADMIN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def _spawn(self, name: str, *arguments: str) -> None:
        with self.netns.entered(), (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(self.assets / name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._processes.pop(name)
        process.send_signal(number)
        process.wait(timeout=30)

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        def look() -> bool:
            if self._processes[name].poll() is not None:
                raise AssertionError(f"{name} ended: {self.log(name)[-2000:]}")
            return ready()

        wait_until(look, f"{name} is ready", timeout=60)

    def _api_ready(self) -> bool:
        try:
            return self.raw("GET", "/readyz") == b"ok"
        except (OSError, ApiError):
            return False

    def log(self, name: str) -> str:
        """What a server has printed."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    # Talking to it

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True, token: str = "") -> str:
        """Run kubectl as the admin, or with `token`; what it prints. With `check` a failure is an AssertionError."""
        done = self.kubectl_process(*arguments, stdin=stdin, token=token)
        if check and done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr}{done.stdout}")
        return done.stdout + ("" if check else done.stderr)

    def kubectl_process(
        self, *arguments: str, stdin: str | None = None, token: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl to its end."""
        config = ["--cache-dir", str(self._cache), *(["--token", token] if token else [])]
        environment = os.environ | {"HOME": str(self.directory), "KUBECONFIG": str(self.kubeconfig)}
        with self.netns.entered():
            return subprocess.run(
                [str(self.assets / "kubectl"), *config, *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=120,
                env=environment,
                check=False,
            )

    def forget_discovery(self) -> None:
        """Make kubectl ask again which resources there are: it keeps the answer for hours."""
        shutil.rmtree(self._cache, ignore_errors=True)

    @property
    def _cache(self) -> Path:
        return self.directory / "kubectl-cache"

    def raw(
        self, method: str, path: str, body: Json | Sequence[Any] | None = None, token: str = ADMIN, media: str = ""
    ) -> bytes:
        """One request; the answer's body. Raises ApiError, OSError."""
        if self._context is None:
            self._context = ssl.create_default_context(cafile=str(self.ca_file))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": media or "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(API_URL + path, data=data, method=method, headers=headers)
        with self.netns.entered():
            try:
                with urllib.request.urlopen(request, timeout=30, context=self._context) as response:
                    return bytes(response.read())
            except urllib.error.HTTPError as error:
                text = error.read().decode(errors="replace")
                raise ApiError(error.code, _message(text)) from None

    def get(self, path: str, token: str = ADMIN) -> Json:
        """GET an object or a list. Raises ApiError."""
        return _object(self.raw("GET", path, token=token))

    def post(self, path: str, body: Json, token: str = ADMIN) -> Json:
        """POST an object. Raises ApiError."""
        return _object(self.raw("POST", path, body, token))

    def patch(self, path: str, body: Json | Sequence[Any], token: str = ADMIN, media: str = _MERGE_PATCH) -> Json:
        """PATCH an object, by a merge patch unless `media` says otherwise. Raises ApiError."""
        return _object(self.raw("PATCH", path, body, token, media))

    def delete(self, path: str, token: str = ADMIN) -> Json:
        """DELETE an object. Raises ApiError."""
        return _object(self.raw("DELETE", path, token=token))

    def exists(self, path: str) -> bool:
        """Whether a GET answers 200."""
        try:
            self.raw("GET", path)
        except ApiError as error:
            if error.code != 404:
                raise
            return False
        return True

    def pod_token(self, namespace: str, account: str, pod: str, uid: str) -> str:
        """A service-account token bound to a pod, as a kubelet asks for it."""
        spec = {"audiences": [], "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = self.post(f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", body)
        return str(answer["status"]["token"])

    def audit(self, text: str = "") -> Iterator[Json]:
        """Every request that the API server has answered so far, as audit events of level Metadata.

        Only those with `text` somewhere, if given: the log of a whole run is long. Those of nobody known (who came
        before the API server could tell) are left out.
        """
        with self.audit_log.open(encoding="utf-8") as lines:
            for line in lines:
                if text in line and line.endswith("\n"):
                    event = json.loads(line)
                    if "username" in event["user"]:
                        yield event


def _object(body: bytes) -> Json:
    value: Json = json.loads(body)
    return value


def _message(text: str) -> str:
    try:
        return str(json.loads(text).get("message", text))
    except ValueError:
        return text
