"""Workers without a kubelet: a pod object with an address and a token, and a backend of ours in this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sidecar.core.retry import Backoff
from sidecar.edges.kubernetes.api import Api, PodIdentity, in_cluster
from sidecar.edges.kubernetes.backend import KubernetesBackend, Place, read_own_pod
from sidecar.edges.kubernetes.watch import Pace
from sidecar.ports import BackendView
from tests.kubernetes.controlplane import API_HOST, API_PORT, ControlPlane, Json

REPOSITORY = Path(__file__).parent.parent.parent
ACCOUNT = "lora-sidecar"
POOL = "pool"
QUICK = Pace(retry=Backoff(first=0.1, cap=0.5))
ADAPTERS = "/apis/lora-sidecar.io/v1alpha1/namespaces/{}/adapters"


class MemoryState:
    """state/ in memory; as a Store it has no revisions."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def save(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def read(self, name: str) -> bytes | None:
        return self.files.get(name)


def prepare(plane: ControlPlane, namespace: str, *, role: bool = True) -> None:
    """The namespace as a person prepares it: deploy/base, and the pool's headless Service."""
    if role:
        plane.kubectl("apply", "-n", namespace, "-k", str(REPOSITORY / "deploy/base"))
    else:
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}}
        plane.post(f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"lora-sidecar.io/pool": POOL},
        "ports": [{"name": "lora-sidecar", "port": 8790, "protocol": "TCP"}],
    }
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": POOL}, "spec": spec}
    plane.post(f"/api/v1/namespaces/{namespace}/services", service)


def make_pod(plane: ControlPlane, namespace: str, name: str, ip: str, *, engine: list[str] | None = None) -> Json:
    """A pod that no scheduler touches, with an address."""
    container = {"name": "vllm", "image": "vllm/vllm-openai:v0.12.0", "args": engine or ["--model", "base"]}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"lora-sidecar.io/pool": POOL, "gpu": "a100"}},
        "spec": {"schedulerName": "nobody", "serviceAccountName": ACCOUNT, "containers": [container]},
    }
    path = f"/api/v1/namespaces/{namespace}/pods"
    plane.post(path, body)
    status = {"status": {"podIP": ip, "podIPs": [{"ip": ip}], "phase": "Running"}}
    return plane.patch(f"{path}/{name}/status", status)


def make_adapter(plane: ControlPlane, namespace: str, name: str, **spec: Any) -> Json:
    """An Adapter resource."""
    whole = {"baseModel": "base", "source": {"uri": f"file:///adapters-of-test/{name}"}} | spec
    body = {
        "apiVersion": "lora-sidecar.io/v1alpha1",
        "kind": "Adapter",
        "metadata": {"name": name},
        "spec": whole,
    }
    return plane.post(ADAPTERS.format(namespace), body)


def drop_adapter(plane: ControlPlane, namespace: str, name: str) -> None:
    """Delete an Adapter resource."""
    plane.delete(f"{ADAPTERS.format(namespace)}/{name}")


async def connect(plane: ControlPlane, namespace: str, pod: Json, directory: Path) -> tuple[Api, PodIdentity]:
    """The API as this pod's agent reaches it, by a token of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    token = plane.pod_token(namespace, ACCOUNT, pod["metadata"]["name"], pod["metadata"]["uid"])
    (directory / "token").write_text(token)
    (directory / "ca.crt").write_bytes(plane.ca_file.read_bytes())
    environment = {"KUBERNETES_SERVICE_HOST": API_HOST, "KUBERNETES_SERVICE_PORT": str(API_PORT)}
    return await in_cluster(account=directory, environment=environment)


class Seen:
    """Lets a test wait for a view."""

    def __init__(self, backend: KubernetesBackend) -> None:
        self.backend = backend
        self.changes = 0
        self._event = asyncio.Event()

    def changed(self) -> None:
        self.changes += 1
        self._event.set()

    async def until(self, condition: Callable[[BackendView], Any], what: str, timeout: float = 30.0) -> BackendView:
        """The first view that fits."""
        deadline = time.monotonic() + timeout
        while not condition(view := self.backend.view()):
            left = deadline - time.monotonic()
            assert left > 0, f"not within {timeout:g} s: {what}; last view {view!r}"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), min(left, 0.5))
            self._event.clear()
        return view

    async def never(self, condition: Callable[[BackendView], Any], seconds: float) -> None:
        """No view fits for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert not condition(self.backend.view()), self.backend.view()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), max(0.0, min(0.2, deadline - time.monotonic())))
            self._event.clear()


@contextlib.asynccontextmanager
async def backend_of(
    plane: ControlPlane,
    namespace: str,
    pod: Json,
    directory: Path,
    *,
    state: MemoryState | None = None,
    grace: float = 600.0,
    read_pod: bool = True,
) -> AsyncIterator[Seen]:
    """A running backend of the pod's agent."""
    api, me = await connect(plane, namespace, pod, directory)
    backend = KubernetesBackend(
        api=api,
        me=me,
        place=Place(namespace=namespace, service=POOL, pool=POOL),
        pod=await read_own_pod(api, me) if read_pod else None,
        pod_read_now=read_pod,
        state=state or MemoryState(),  # type: ignore[arg-type]  # the part of a Store that a backend uses
        clock=time.time,
        crd_grace=grace,
        pace=QUICK,
    )
    seen = Seen(backend)
    task = asyncio.create_task(backend.run(seen.changed))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
        await api.close()
        await asyncio.sleep(0.05)  # aiohttp closes TLS connections a turn of the loop later
