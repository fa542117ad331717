"""One pod: its containers in order, its status, its end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from pathlib import Path
from typing import Any

import aiohttp

from tests.kubernetes.kubelet.api import RETRY_SECONDS, Api
from tests.kubernetes.kubelet.container import Container, now
from tests.kubernetes.kubelet.network import PodNetwork
from tests.kubernetes.kubelet.volumes import NotYet, Volumes

Json = dict[str, Any]
REFRESH_SECONDS = 2.0


class Pod:
    """A pod bound to one of our nodes, from its first sight to its deletion."""

    def __init__(self, api: Api, pod: Json, directory: Path, variables: dict[str, str]) -> None:
        self.api, self.pod = api, pod
        metadata = pod["metadata"]
        self.directory = directory / f"{metadata['namespace']}_{metadata['name']}"
        self.path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self.node: str = pod["spec"]["nodeName"]
        self.network = PodNetwork()
        volumes = self.directory / "volumes"
        shutil.rmtree(self.directory, ignore_errors=True)
        volumes.mkdir(parents=True)
        self.volumes = Volumes(api, pod, volumes)
        self.variables = variables
        spec = pod["spec"]
        policy = spec.get("restartPolicy", "Always")
        initial = "Never" if policy == "Never" else "OnFailure"
        self.init = [self._container(c, c.get("restartPolicy", initial)) for c in spec.get("initContainers", ())]
        self.main = [self._container(c, policy) for c in spec["containers"]]
        self.initialized = False
        self.begun = now()
        self.since: dict[str, tuple[str, str]] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = asyncio.Event()
        self._gone = False
        self.grace = float(spec.get("terminationGracePeriodSeconds", 30))

    def _container(self, spec: Json, restart: str) -> Container:
        directory = self.directory / spec["name"]
        return Container(
            self.pod, spec, restart, self.volumes, self.network, directory, self.variables, lambda: self._changed.set()
        )

    def update(self, pod: Json) -> None:
        """A newer version from the API server."""
        self.pod["metadata"] = pod["metadata"]
        if pod["metadata"].get("deletionTimestamp"):
            self.grace = float(pod["metadata"].get("deletionGracePeriodSeconds", self.grace))
            self._leaving.set()

    def removed(self) -> None:
        """The API server doesn't have it any more: end it without asking."""
        self._gone = True
        self.grace = min(self.grace, 1.0)
        self._leaving.set()

    async def run(self) -> None:
        """From start to end; afterwards nothing of the pod is left."""
        status = asyncio.create_task(self._report())
        start = asyncio.create_task(self._start())
        refresh = asyncio.create_task(self._refresh())
        try:
            await self._leaving.wait()
            start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await start
            await self._end()
        finally:
            for task in (status, start, refresh, *self._tasks):
                task.cancel()
            self.kill()
        if not self._gone:
            await self._delete()
        self.network.close()

    def kill(self) -> None:
        """Every process at once, without a word to anyone."""
        for container in self.init + self.main:
            container.stopping = True
            container.signal(signal.SIGKILL)

    async def _start(self) -> None:
        while True:
            try:
                await self.volumes.refresh()
                break
            except (NotYet, aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(0.5)
        for container in self.init:
            self._spawn(container)
            if container.restart == "Always":
                await container.started.wait()
            else:
                await container.done.wait()
                if container.exit_code != 0:
                    return
        self.initialized = True
        for container in self.main:
            self._spawn(container)
        self._changed.set()

    def _spawn(self, container: Container) -> None:
        self._tasks.add(asyncio.create_task(container.run()))

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            with contextlib.suppress(NotYet, aiohttp.ClientError, TimeoutError, OSError):
                await self.volumes.refresh()

    async def _end(self) -> None:
        """First the containers, then the sidecars in the reverse of their order, all within the pod's grace."""
        deadline = asyncio.get_running_loop().time() + self.grace
        ended = [c for c in self.init if c.restart != "Always"]
        await asyncio.gather(*(container.stop(deadline) for container in [*ended, *self.main]))
        for container in reversed([c for c in self.init if c.restart == "Always"]):
            await container.stop(deadline)

    async def _delete(self) -> None:
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.pod["metadata"]["uid"]}}
        while not self._gone:
            try:
                await self.api.request("DELETE", self.path, body)
                return
            except aiohttp.ClientResponseError as error:
                if error.status in (404, 409):
                    return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(RETRY_SECONDS)

    # Status

    async def _report(self) -> None:
        sent: Json = {}
        while True:
            status = self._status()
            if status != sent:
                try:
                    await self.api.merge(
                        self.path + "/status", {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": status}
                    )
                    sent = status
                except aiohttp.ClientResponseError as error:
                    if error.status in (404, 409):
                        return
                    await asyncio.sleep(RETRY_SECONDS)
                except (aiohttp.ClientError, TimeoutError, OSError):
                    await asyncio.sleep(RETRY_SECONDS)
            if status == sent:
                await self._changed.wait()
            self._changed.clear()

    def _status(self) -> Json:
        ready = all(c.ready for c in self.main + [c for c in self.init if c.restart == "Always"]) and self.initialized
        values = {"PodScheduled": True, "Initialized": self.initialized, "ContainersReady": ready, "Ready": ready}
        done = self.main and all(c.done.is_set() for c in self.main) and not self._leaving.is_set()
        phase = "Running" if self.initialized else "Pending"
        if done:
            phase = "Succeeded" if all(c.exit_code == 0 for c in self.main) else "Failed"
        return {
            "phase": phase,
            "hostIP": "10.244.0.1",
            "podIP": self.network.address,
            "podIPs": [{"ip": self.network.address}],
            "startTime": self.begun,
            "conditions": [self._condition(kind, value) for kind, value in values.items()],
            "initContainerStatuses": [c.status() for c in self.init],
            "containerStatuses": [c.status() for c in self.main],
        }

    def _condition(self, kind: str, value: bool) -> Json:
        text = str(value)
        if self.since.get(kind, ("",))[0] != text:
            self.since[kind] = (text, now())
        return {"type": kind, "status": text, "lastTransitionTime": self.since[kind][1]}
