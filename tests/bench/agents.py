"""A pool of real agents on this machine, each beside a stub engine of its own, for benchmarks."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import aiohttp

from sidecar.edges.sample_adapter import write_adapter
from sidecar.edges.stub_engine import StubEngine, StubOptions
from tests.ports import free_ports

BASE = "base-model"
POLL_SECONDS = 0.002
PATIENCE = 60.0


class Agent:
    """One `lora-sidecar run` process and its engine (inside this process)."""

    def __init__(self, name: str, port: int, engine: StubEngine) -> None:
        self.name = name
        self.address = f"127.0.0.1:{port}"
        self.engine = engine
        self.process: asyncio.subprocess.Process | None = None
        # What only this one is started with; a flag without a value is left out.
        self.flags: dict[str, str] = {}

    @property
    def loaded(self) -> frozenset[str]:
        """Names that its engine serves now."""
        return frozenset(self.engine.server.loras)

    def status(self, field: str) -> float:
        """MiB of a field of /proc/<pid>/status."""
        found = re.search(rf"{field}:\s*(\d+) kB", Path(f"/proc/{self._pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0

    @property
    def cpu_seconds(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def _pid(self) -> int:
        if self.process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self.process.pid

    async def kill(self) -> None:
        """SIGKILL to the agent, and its engine's connections cut: the whole worker is gone at once."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()
        await self.engine.stop()


class AgentPool:
    """`async with AgentPool(3) as pool`: agents that know each other, and a directory of manifests."""

    def __init__(
        self,
        size: int,
        *,
        capacity: int = 200,
        flags: Mapping[str, str] | None = None,
        each: Mapping[int, Mapping[str, str]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`flags` are for all agents, `each` for some by number."""
        self.size = size
        self.capacity = capacity
        self.flags = dict(flags or {})
        self.each = {number: dict(more) for number, more in (each or {}).items()}
        self.environment = dict(environment or {})
        self.agents: list[Agent] = []
        self.root = Path()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AgentPool:
        self.root = Path(tempfile.mkdtemp(prefix="lora-sidecar-bench-"))
        (self.root / "manifests").mkdir()
        self._session = aiohttp.ClientSession()
        for i, port in enumerate(free_ports(self.size)):
            engine = StubEngine(StubOptions(model=BASE, max_loras=self.capacity, max_cpu_loras=self.capacity))
            await engine.start()
            self.agents.append(Agent(f"worker-{i}", port, engine))
            self.agents[-1].flags = self.each.get(i, {})
        for agent in self.agents:
            await self.start(agent)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents:
            await agent.kill()
        if self._session is not None:
            await self._session.close()
        if error is None:  # else its logs may tell
            shutil.rmtree(self.root)

    async def start(self, agent: Agent) -> None:
        """Start its process; its log goes to a file beside its adapters."""
        place = self.root / agent.name
        place.mkdir(exist_ok=True)
        flags = {
            "backend": "standalone",
            "manifests": str(self.root / "manifests"),
            "seeds": ",".join(a.address for a in self.agents if a is not agent),
            "name": agent.name,
            "listen": agent.address,
            "engine-url": agent.engine.url,
            "adapters-dir": str(place / "adapters"),
            "capacity": str(self.capacity),
            **self.flags,
            **agent.flags,
        }
        # Bytecode as an installed package has it: compiling at each start costs memory that then stays.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment |= self.environment
        with (place / "log").open("ab") as log:
            agent.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "sidecar", "run"),
                *(part for k, v in flags.items() if v for part in (f"--{k}", v)),
                stdout=log,
                stderr=log,
                env=environment,
            )

    def write_adapter(self, name: str) -> str:
        """Make a small adapter; returns its file:// URI."""
        return write_adapter(self.root / "origin" / name, name, base=BASE).as_uri()

    def apply(self, name: str, uri: str, **spec: object) -> None:
        """Write its manifest, as an editor that renames does."""
        manifest = {
            "apiVersion": "lora-sidecar.io/v1alpha1",
            "kind": "Adapter",
            "metadata": {"name": name},
            "spec": {"baseModel": BASE, "source": {"uri": uri}, **spec},
        }
        path = self.root / "manifests" / f"{name}.yaml"
        hidden = path.with_name(f".{path.name}")
        hidden.write_text(json.dumps(manifest))
        hidden.rename(path)

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until the condition holds. Raises TimeoutError with what was waited for."""
        began = time.perf_counter()
        while not condition():
            if time.perf_counter() - began > PATIENCE:
                raise TimeoutError(f"{what}: not within {PATIENCE:.0f} s; logs are in {self.root}")
            await asyncio.sleep(POLL_SECONDS)
        return time.perf_counter() - began

    async def text(self, agent: Agent, path: str) -> str:
        """What the agent answers."""
        if self._session is None:
            raise RuntimeError("the pool is not started")
        async with self._session.get(f"http://{agent.address}{path}") as response:
            return await response.text()

    async def settle(self) -> None:
        """Wait until every agent has heard of every other one and is past its start."""
        for agent in self.agents:
            began = time.perf_counter()
            while not await self._knows_all(agent):
                if time.perf_counter() - began > PATIENCE:
                    raise TimeoutError(
                        f"{agent.name} does not hear of all {self.size} workers; logs are in {self.root}"
                    )
                await asyncio.sleep(0.05)

    async def _knows_all(self, agent: Agent) -> bool:
        try:
            peers = json.loads(await self.text(agent, "/v1/peers"))
        except aiohttp.ClientError:
            return False
        rows = peers.get("peers", []) if isinstance(peers, dict) else peers
        return isinstance(rows, list) and sum(r.get("state") == "alive" for r in rows) == self.size
