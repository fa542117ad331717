"""A pool of real agents beside stub engines on the real control plane, and a client that watches from the outside."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from sidecar.edges.sample_adapter import write_adapter
from tests.kubernetes.controlplane import ApiError, ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY, POOL, REPOSITORY
from tests.kubernetes.nodes import Nodes, is_ready

Json = dict[str, Any]
BASE_MODEL = "meta/base"
ADAPTER_LABEL = "adapter.lora-sidecar.io"


class Origin:
    """A directory of adapters that every container can read, whoever it runs as."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="lora-origin-"))
        self.directory.chmod(0o755)

    def uri(self, name: str, seed: int | str = 0) -> str:
        """The file:// URI of an adapter that is there from now on; other content for another seed."""
        write_adapter(self.directory / name, f"{name}-{seed}", base=BASE_MODEL)
        return f"file://{self.directory / name}"

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.directory)


class Pool:
    """One Deployment of workers, put in by `lora-sidecar inject` and `kubectl apply`, and its adapters."""

    def __init__(self, cluster: ControlPlane, nodes: Nodes, namespace: str, origin: Origin, name: str = "chat") -> None:
        self.cluster, self.nodes, self.namespace, self.origin, self.name = cluster, nodes, namespace, origin, name
        self.label = f"{name}-lora"
        # Added to the pods' spec: a person's own wishes, such as an affinity.
        self.pod_spec: Json = {}
        # Added to the agent's variables: the AWS chain's, for example.
        self.agent_env: dict[str, str] = {}

    # Putting it there

    def each_on_its_own(self, nodes: Sequence[str]) -> None:
        """From the next install on each worker has one of these nodes to itself."""
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}
        wanted = {"nodeSelectorTerms": [{"matchExpressions": [here]}]}
        apart = {"labelSelector": {"matchLabels": {"app": self.name}}, "topologyKey": "kubernetes.io/hostname"}
        self.pod_spec["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": wanted},
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]},
        }

    def install(self, replicas: int, capacity: int = 8, **env: str) -> None:
        """deploy/base, then the injected Deployment, as the documentation says; returns when every worker is ready."""
        self.cluster.kubectl("apply", "-n", self.namespace, "-k", str(DEPLOY / "base"))
        self.cluster.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=self.injected(replicas, capacity, **env))
        self.until_ready(replicas)

    def injected(self, replicas: int, capacity: int = 8, **env: str) -> str:
        """What `lora-sidecar inject` makes of a plain vLLM Deployment."""
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", "inject"],
            input=yaml.safe_dump(self.plain(replicas, capacity, **env)),
            capture_output=True,
            text=True,
            check=True,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )
        return self._with_agent_env(done.stdout)

    def _with_agent_env(self, text: str) -> str:
        if not self.agent_env:
            return text
        documents = list(yaml.safe_load_all(text))
        (workload,) = (d for d in documents if d["kind"] == "Deployment")
        (agent,) = (c for c in workload["spec"]["template"]["spec"]["initContainers"] if c["name"] == "lora-sidecar")
        agent.setdefault("env", []).extend({"name": k, "value": v} for k, v in self.agent_env.items())
        return yaml.safe_dump_all(documents)

    def plain(self, replicas: int, capacity: int, **env: str) -> Json:
        """A vLLM Deployment as a person has it; `env` are the engine's variables."""
        engine = {
            "name": "vllm",
            "image": "vllm/vllm-openai:v0.32.0",
            "args": [f"--model={BASE_MODEL}", f"--max-loras={capacity}"],
            "env": [{"name": key, "value": value} for key, value in env.items()],
            "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        }
        labels = {"app": self.name}
        spec = {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [engine], **self.pod_spec}},
        }
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": self.name}, "spec": spec}

    def apply(self, adapter: str, seed: int | str = 0, **spec: Any) -> None:
        """`kubectl apply` an Adapter whose files are at the origin."""
        document = {
            "apiVersion": "lora-sidecar.io/v1alpha1",
            "kind": "Adapter",
            "metadata": {"name": adapter},
            "spec": {"baseModel": BASE_MODEL, "source": {"uri": self.origin.uri(adapter, seed)}, "drainSeconds": 1}
            | spec,
        }
        self.cluster.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=yaml.safe_dump(document))

    def delete(self, adapter: str) -> None:
        """`kubectl delete` an Adapter, which waits until it is gone."""
        self.cluster.kubectl("delete", "-n", self.namespace, f"lora/{adapter}", "--timeout=20s")

    def scale(self, replicas: int) -> None:
        """`kubectl scale`; returns when exactly so many workers are there and ready."""
        self.cluster.kubectl("scale", "-n", self.namespace, f"deployment/{self.name}", f"--replicas={replicas}")
        self.until_ready(replicas, timeout=120)

    def remove(self) -> None:
        """Take the workers away at once: whatever state they are in, the next test has the machine for itself."""
        self.cluster.kubectl("delete", "deployment", "--all", "-n", self.namespace, "--wait=false")
        for pod in self.pods():
            self.end_now(pod["metadata"]["name"])

    def end_now(self, pod: str) -> None:
        """`kubectl delete pod --force`: gone at once, without grace."""
        self.cluster.kubectl(
            "delete",
            "pod",
            pod,
            "-n",
            self.namespace,
            "--force",
            "--grace-period=0",
            "--wait=false",
            "--ignore-not-found",
        )

    # Looking at it

    def ask(self, pod: Json, path: str) -> Json:
        """What the agent of a pod answers on its port. Raises OSError."""
        url = f"http://{pod['status']['podIP']}:8790{path}"
        with urllib.request.urlopen(url, timeout=10) as response:
            found: Json = json.load(response)
        return found

    def pods(self, selector: str = "") -> list[Json]:
        """The pool's pods, terminating ones too."""
        return self.nodes.pods(self.namespace, f"{POOL}={self.label}" + (f",{selector}" if selector else ""))

    def until_ready(self, replicas: int, timeout: float = 60) -> None:
        """Wait until the pool is exactly so many ready workers, and nothing is terminating."""

        def there() -> bool:
            pods = self.pods()
            return len(pods) == replicas and all(is_ready(p) and "deletionTimestamp" not in p["metadata"] for p in pods)

        wait_until(there, f"{replicas} ready workers", timeout)

    def states(self, adapter: str) -> dict[str, str]:
        """Pod -> state of the adapter there, as the pods' annotations tell."""
        found = {}
        for pod in self.pods():
            text = pod["metadata"].get("annotations", {}).get(f"{ADAPTER_LABEL}/{adapter}")
            if text is not None:
                found[pod["metadata"]["name"]] = str(json.loads(text)["state"])
        return found

    def routed(self, adapter: str) -> list[str]:
        """Pods that the label selector of the adapter's Service finds."""
        return sorted(pod["metadata"]["name"] for pod in self.pods(f"{ADAPTER_LABEL}/{adapter}=loaded"))

    def until_loaded(self, adapter: str, workers: int, timeout: float = 30) -> list[str]:
        """Wait until exactly so many workers have it loaded and are routed to; returns their names."""

        def loaded() -> bool:
            names = sorted(name for name, state in self.states(adapter).items() if state == "Loaded")
            return len(names) == workers and self.routed(adapter) == names

        wait_until(loaded, f"{adapter} on {workers} workers; is {self.states(adapter)}", timeout)
        return self.routed(adapter)

    def answers(self, pod: Json, path: str) -> bool:
        """Whether the agent of a pod answers 200."""
        try:
            self.ask(pod, path)
        except OSError:
            return False
        return True

    def served(self, pod: Json, adapter: str) -> bool:
        """Whether the pod's engine answers for the adapter now, whatever anybody says about it."""
        try:
            return complete(pod["status"]["podIP"], adapter) == ""
        except OSError:
            return False

    def adapter(self, adapter: str) -> Json:
        """The resource, as the API server has it now."""
        return self.cluster.get(f"/apis/lora-sidecar.io/v1alpha1/namespaces/{self.namespace}/adapters/{adapter}")

    def ready(self, adapter: str) -> bool:
        """Whether the adapter's status says Ready."""
        conditions = self.adapter(adapter).get("status", {}).get("conditions", ())
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def settle(self, seconds: float = 3.0) -> None:
        """Wait until the agents have asked for nothing, their watches aside, for so long."""

        def quiet() -> bool:
            return all(event["verb"] == "watch" for event in self.requests(time.time() - seconds))

        wait_until(quiet, "the agents are at rest", timeout=60, interval=0.5)

    def placed(self, adapter: str, workers: int) -> list[str]:
        """The workers that have it once all agents are at rest: who starts late may still be preferred to another."""
        self.until_loaded(adapter, workers)
        self.settle(2.0)
        return self.until_loaded(adapter, workers)

    def requests(self, since: float) -> list[Json]:
        """The agents' requests to the API server that ended after `since` (seconds since the epoch), watches too."""
        account = f"system:serviceaccount:{self.namespace}:default"
        return [
            event
            for event in self.cluster.audit(account)
            if event["user"]["username"] == account and _seconds(event["stageTimestamp"]) >= since
        ]

    @staticmethod
    def pod_of(event: Json) -> str:
        """The pod whose token an audit event's request carried."""
        return str(event["user"]["extra"]["authentication.kubernetes.io/pod-name"][0])

    def log(self, pod: str) -> str:
        """What an agent has printed."""
        return self.nodes.log(self.namespace, pod, "lora-sidecar")

    @contextmanager
    def watched(self, *adapters: str, sudden: bool = False) -> Iterator[Outside]:
        """Inside, a client asks for these adapters all the while; at the end what it saw must be good.

        With `sudden` a worker dies inside: that it can't be reached for a while is then nobody's fault.
        """
        outside = Outside(self, adapters)
        try:
            yield outside
        finally:
            outside.stop()
        assert outside.asked, "the client asked nothing"
        faults = outside.faults if sudden else sorted(outside.faults + outside.unreachable)
        assert not faults, "\n".join(faults[:20])


class Outside(threading.Thread):
    """Resolves each adapter's label selector and asks every engine that it finds, again and again.

    A fault is an answer other than 200, or a moment at which no worker is found. While the API server is away it asks
    the workers that it found last, as routing goes on in a cluster.
    """

    def __init__(self, pool: Pool, adapters: tuple[str, ...]) -> None:
        super().__init__()
        self.pool, self.adapters = pool, adapters
        self.faults: list[str] = []
        self.unreachable: list[str] = []
        self.asked = 0
        self._found: dict[str, list[Json]] = {}
        self._end = threading.Event()
        self._begun = threading.Event()
        self.start()
        assert self._begun.wait(30), "the client could not ask once"

    def stop(self) -> None:
        """Ask no more."""
        self._end.set()
        self.join(timeout=30)

    def run(self) -> None:
        """The client's loop."""
        while not self._end.is_set():
            for adapter in self.adapters:
                self._ask(adapter)
            self._begun.set()

    def _ask(self, adapter: str) -> None:
        try:
            self._found[adapter] = self.pool.pods(f"{ADAPTER_LABEL}/{adapter}=loaded")
        except (OSError, ApiError):
            self._end.wait(0.05)
        pods = self._found.get(adapter, [])
        if not pods:
            self.faults.append(f"{time.time():.3f}: no worker for {adapter}")
        for pod in pods:
            name, address = pod["metadata"]["name"], pod["status"].get("podIP", "")
            try:
                said = complete(address, adapter)
            except OSError as error:
                self.unreachable.append(f"{time.time():.3f}: {adapter} on {name}: {error!r}")
                continue
            self.asked += 1
            if said:
                self.faults.append(f"{time.time():.3f}: {adapter} on {name}: {said}")


def complete(address: str, model: str) -> str:
    """Ask an engine for a completion; "" if it answers 200, else what it said.

    Raises OSError for one that gives no answer, or is in no state to (5xx).
    """
    connection = http.client.HTTPConnection(address, 8000, timeout=10)
    try:
        body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        if response.status >= 500:
            raise ConnectionError(f"{response.status} {text[:200]}")
        return "" if response.status == 200 else f"{response.status} {text[:200]}"
    except http.client.HTTPException as error:
        raise ConnectionError(repr(error)) from error
    finally:
        connection.close()


def _seconds(stamp: str) -> float:
    return time.mktime(time.strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone + float(f"0{stamp[19:-1]}")
