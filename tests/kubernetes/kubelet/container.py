"""One container: started, probed, restarted with back-off, stopped with its hook and its grace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from tests.kubernetes.kubelet.machine import PATH, REPOSITORY, command_of, marker, script_of
from tests.kubernetes.kubelet.network import PodNetwork
from tests.kubernetes.kubelet.volumes import NotYet, Volumes
from tests.kubernetes.netns import die_with_parent

Json = dict[str, Any]
# A real kubelet begins with 10 s, after one restart at once; tests have less time.
BACKOFF_SECONDS = 1.0
BACKOFF_LIMIT = 60.0
MINIMUM_GRACE = 2.0


def now() -> str:
    """The time as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Container:
    """A container of one pod. `changed` is called after every change that the status shows."""

    def __init__(
        self,
        pod: Json,
        spec: Json,
        restart: str,
        volumes: Volumes,
        network: PodNetwork,
        directory: Path,
        variables: dict[str, str],
        changed: Callable[[], None],
    ) -> None:
        self.pod, self.spec, self.restart = pod, spec, restart
        self.name: str = spec["name"]
        self.volumes, self.network, self.directory, self.changed = volumes, network, directory, changed
        self.variables = variables
        self.process: asyncio.subprocess.Process | None = None
        self.state: Json = {"waiting": {"reason": "PodInitializing"}}
        self.last: Json = {}
        self.restarts = 0
        self.ready = False
        self.started = asyncio.Event()
        self.done = asyncio.Event()
        self.exit_code: int | None = None
        self.stopping = False
        directory.mkdir(parents=True, exist_ok=True)

    async def run(self) -> None:
        """Run it, again and again as its restart policy says, until it is done or stopped."""
        failures = 0
        while not self.stopping:
            try:
                await self._launch()
            except (NotYet, ValueError, aiohttp.ClientError, TimeoutError, OSError) as error:
                self._show({"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}})
                await asyncio.sleep(1)
                continue
            began = time.monotonic()
            await self._until_exit()
            again = self.restart == "Always" or (self.restart == "OnFailure" and self.exit_code != 0)
            if self.stopping or not again:
                break
            failures = 0 if time.monotonic() - began > 60 else failures + 1
            self.last = self.state
            if failures > 1:
                self._show(
                    {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}}
                )
                await asyncio.sleep(min(BACKOFF_LIMIT, BACKOFF_SECONDS * 2 ** (failures - 2)))
            self.restarts += 1
        self.done.set()
        self.changed()

    async def _launch(self) -> None:
        address = self.network.address
        variables = self.variables | await self.volumes.environment(self.spec, address, "10.244.0.1")
        command = command_of(self.spec, variables)
        scratch = self.directory / "fs"
        script = script_of(self.pod, self.spec, self.volumes, scratch, command)
        base = {"PATH": PATH, "HOME": "/", "HOSTNAME": self.pod["metadata"]["name"], "PYTHONPATH": str(REPOSITORY)}
        (self.volumes.directory / marker(self.spec)).unlink(missing_ok=True)
        with (self.directory / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *("nsenter", f"--net={self.network.namespace.path}"),
                *("unshare", "-m", "--propagation", "private", "sh", "-c", script),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=base | variables,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        await self._mounted()
        (self.directory / "pid").write_text(str(self.process.pid))
        self.exit_code = None
        if "startupProbe" not in self.spec:
            self.started.set()
        if "readinessProbe" not in self.spec:
            self.ready = self.started.is_set()
        self._show({"running": {"startedAt": now()}})

    async def _mounted(self) -> None:
        """Wait for the container's own root: before that a hook or a probe inside would see this machine's."""
        assert self.process is not None
        ready = self.volumes.directory / marker(self.spec)
        while not ready.exists() and self.process.returncode is None:  # noqa: ASYNC110 -- a file has no event
            await asyncio.sleep(0.01)

    async def _until_exit(self) -> None:
        assert self.process is not None
        began = now()
        probes = asyncio.create_task(self._probe_all())
        try:
            code = await self.process.wait()
        finally:
            probes.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probes
        # What it left behind goes with it, as with a container's first process.
        self.signal(signal.SIGKILL)
        self.process = None
        (self.directory / "pid").unlink(missing_ok=True)
        self.ready = False
        self.started.clear()
        self.exit_code = code if code >= 0 else 128 - code
        reason = "Completed" if code == 0 else "Error"
        ended = {"exitCode": self.exit_code, "reason": reason, "startedAt": began, "finishedAt": now()}
        self._show({"terminated": ended})

    def _show(self, state: Json) -> None:
        if state != self.state:
            self.state = state
            self.changed()

    def signal(self, number: signal.Signals) -> None:
        """Signal the container's processes, if there are any."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    async def stop(self, deadline: float) -> None:
        """Hook, SIGTERM, and SIGKILL when time (of the loop) is up."""
        self.stopping = True
        if self.process is not None:
            hook = self.spec.get("lifecycle", {}).get("preStop")
            if hook is not None:
                await self._hook(hook, deadline)
            await self._terminate(max(deadline, asyncio.get_running_loop().time() + MINIMUM_GRACE))

    async def _hook(self, hook: Json, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                if "sleep" in hook:
                    await asyncio.sleep(hook["sleep"]["seconds"])
                elif "exec" in hook:
                    await self._execute(hook["exec"]["command"])
                else:
                    await self._get(hook["httpGet"], None)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            print(f"preStop hook of {self.pod['metadata']['name']}/{self.name} failed: {error!r}", file=sys.stderr)

    async def _terminate(self, deadline: float) -> None:
        process = self.process
        if process is None:
            return
        # To the first process alone, as a kubelet does; what it leaves behind is killed.
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout_at(deadline):
                await process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await process.wait()

    # Probes

    async def _probe_all(self) -> None:
        if "startupProbe" in self.spec:
            if not await self._startup(self.spec["startupProbe"]):
                return
            self.started.set()
            if "readinessProbe" not in self.spec:
                self.ready = True
            self.changed()
        async with asyncio.TaskGroup() as group:
            if "livenessProbe" in self.spec:
                group.create_task(self._liveness(self.spec["livenessProbe"]))
            if "readinessProbe" in self.spec:
                group.create_task(self._readiness(self.spec["readinessProbe"]))

    async def _startup(self, probe: Json) -> bool:
        for _ in range(probe.get("failureThreshold", 3)):
            if await self._passes(probe):
                return True
            # A failed start is looked at again sooner than a real kubelet would: it saves tests a second each.
            await asyncio.sleep(min(0.1, probe.get("periodSeconds", 10)))
        await self._unhealthy()
        return False

    async def _liveness(self, probe: Json) -> None:
        failures = 0
        while True:
            await asyncio.sleep(probe.get("periodSeconds", 10))
            failures = 0 if await self._passes(probe) else failures + 1
            if failures >= probe.get("failureThreshold", 3):
                await self._unhealthy()
                return

    async def _unhealthy(self) -> None:
        grace = self.pod["spec"].get("terminationGracePeriodSeconds", 30)
        await self._terminate(asyncio.get_running_loop().time() + grace)

    async def _readiness(self, probe: Json) -> None:
        failures = 0
        while True:
            if await self._passes(probe):
                failures = 0
                if not self.ready:
                    self.ready = True
                    self.changed()
            else:
                failures += 1
                if self.ready and failures >= probe.get("failureThreshold", 3):
                    self.ready = False
                    self.changed()
            # As a real kubelet: more often until it is ready for the first time.
            await asyncio.sleep(
                probe.get("periodSeconds", 10) if self.ready else min(0.2, probe.get("periodSeconds", 10))
            )

    async def _passes(self, probe: Json) -> bool:
        try:
            async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
                if "exec" in probe:
                    return await self._execute(probe["exec"]["command"]) == 0
                if "tcpSocket" in probe:
                    _, writer = await asyncio.open_connection(
                        self.network.address, self._port(probe["tcpSocket"]["port"])
                    )
                    writer.close()
                    return True
                return await self._get(probe["httpGet"], probe.get("timeoutSeconds", 1)) < 400
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def _get(self, action: Json, timeout: float | None) -> int:
        url = f"http://{self.network.address}:{self._port(action['port'])}{action.get('path', '/')}"
        limits = aiohttp.ClientTimeout(total=timeout)
        agent = {"User-Agent": "kube-probe/1.36"}
        async with aiohttp.ClientSession(timeout=limits, headers=agent) as session, session.get(url) as response:
            await response.read()
            return response.status

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        return next(int(p["containerPort"]) for p in self.spec.get("ports", ()) if p.get("name") == port)

    async def _execute(self, command: list[str]) -> int:
        if self.process is None:
            return 1
        enter = ("nsenter", "--target", str(self.process.pid), "--mount", "--net", "--root", "--wd")
        process = await asyncio.create_subprocess_exec(*enter, *command, preexec_fn=die_with_parent)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()

    def status(self) -> Json:
        """The entry in the pod's status."""
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": self.spec["image"],
            "containerID": f"process://{self.pod['metadata']['uid']}/{self.name}/{self.restarts}",
            "ready": self.ready if self.restart != "OnFailure" or not self.done.is_set() else self.exit_code == 0,
            "started": self.started.is_set(),
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last,
        }
