"""A pool of real processes on loopback: for each worker an engine and an agent, each of which can be killed alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from sidecar.core.placement import Worker, place
from sidecar.edges.sample_adapter import write_adapter
from sidecar.model import Adapter, Distribution, Source
from tests.ports import free_ports

BASE = "base-model"
PATIENCE = 60.0
GONE = (aiohttp.ClientError, ConnectionError, TimeoutError)


class Process:
    """One child process, its output in a file. `python -m <module> <arguments>`."""

    def __init__(self, log: Path, module: str, environment: Mapping[str, str]) -> None:
        self._log, self._module = log, module
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "LORA_SIDECAR_"))}
        self._environment |= environment
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, *arguments: str) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, *arguments), stdout=log, stderr=log, env=self._environment
            )

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        if self._process is None:
            return 0
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self._process.wait()

    async def code(self) -> int:
        """Wait until it has ended by itself."""
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), PATIENCE)

    @property
    def log(self) -> str:
        return self._log.read_text()


class Engine:
    """A stub engine process at a port of its own."""

    def __init__(self, place_: Path, name: str, port: int, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.flags: list[str] = []
        self._port, self._session = port, session
        self._process = Process(place_ / "engine.log", "sidecar.edges.stub_engine", {})

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        await self._process.start("--port", str(self._port), "--model", BASE, "--max-loras", "200", *self.flags)
        await until(self.answers, "the stub engine to answer")

    async def kill(self) -> None:
        """As the kernel does when memory runs out."""
        await self._process.end()

    async def answers(self) -> bool:
        return self._process.running and await self.loaded() is not None

    async def loaded(self) -> dict[str, str] | None:
        """Name -> root of what it serves beyond the base model; None while it is down."""
        try:
            async with self._session.get(f"{self.url}/v1/models", headers=self._headers) as response:
                if response.status != 200:
                    return None
                data = (await response.json())["data"]
        except GONE:
            return None
        return {card["id"]: card["root"] for card in data if card["parent"] is not None}

    async def calls(self, kind: str) -> list[str]:
        """Names of the loads (or unloads) that were answered with 200, in order."""
        async with self._session.get(f"{self.url}/stub/calls") as response:
            return [c["name"] for c in await response.json() if c["kind"] == kind and c["status"] == 200]

    async def misbehave(self, **faults: Any) -> None:
        """See stub_faults.Faults."""
        async with self._session.post(f"{self.url}/stub/faults", json=faults) as response:
            response.raise_for_status()

    async def behave(self) -> None:
        async with self._session.delete(f"{self.url}/stub/faults") as response:
            response.raise_for_status()

    async def answer(self, name: str) -> str | None:
        """What a model says; None if it isn't served here now."""
        body = {"model": name, "prompt": "tell me", "max_tokens": 4, "temperature": 0}
        try:
            async with self._session.post(f"{self.url}/v1/completions", json=body, headers=self._headers) as response:
                return str((await response.json())["choices"][0]["text"]) if response.status == 200 else None
        except GONE:
            return None

    @property
    def _headers(self) -> dict[str, str]:
        key = self.flags[self.flags.index("--api-key") + 1] if "--api-key" in self.flags else ""
        return {"Authorization": f"Bearer {key}"} if key else {}


class PoolWorker:
    """An engine and its agent."""

    def __init__(self, pool: ProcessPool, name: str, port: int, engine_port: int) -> None:
        self.pool, self.name = pool, name
        self.address = f"127.0.0.1:{port}"
        self.directory = pool.root / name
        self.directory.mkdir()
        self.engine = Engine(self.directory, name, engine_port, pool.session)
        self.flags: dict[str, str] = {}
        self.agent = Process(self.directory / "agent.log", "sidecar", pool.environment)

    @property
    def adapters_dir(self) -> Path:
        return self.directory / "adapters"

    async def start(self) -> None:
        """Start the agent on what its directory holds."""
        seeds = ",".join(w.address for w in self.pool.workers if w is not self)
        flags = {
            "backend": "standalone",
            "manifests": str(self.pool.manifests),
            "seeds": seeds,
            "name": self.name,
            "listen": self.address,
            "engine-url": self.engine.url,
            "adapters-dir": str(self.adapters_dir),
            "capacity": str(self.pool.capacity),
            **self.pool.flags,
            **self.flags,
        }
        await self.agent.start("run", *(part for k, v in flags.items() if v for part in (f"--{k}", v)))

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of the agent's answer. Raises one of GONE."""
        async with self.pool.session.get(f"http://{self.address}{path}") as response:
            return response.status, await response.json()

    async def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of /v1/adapters by resource name; empty while the agent doesn't answer."""
        try:
            _, found = await self.get("/v1/adapters")
        except GONE:
            return {}
        return {row["name"]: row for row in found["adapters"]}

    async def metric(self, line: str) -> float:
        """The value of one line of /metrics."""
        async with self.pool.session.get(f"http://{self.address}/metrics") as response:
            text = await response.text()
        return next(float(each.rpartition(" ")[2]) for each in text.splitlines() if each.startswith(line))


class ProcessPool:
    """`async with ProcessPool(tmp_path, 3) as pool`: engines up, agents started, an empty directory of manifests."""

    def __init__(
        self,
        root: Path,
        size: int,
        *,
        capacity: int = 100,
        flags: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        start: bool = True,
    ) -> None:
        self.root, self.size, self.capacity = root, size, capacity
        self.flags, self.environment = dict(flags or {}), dict(environment or {})
        self.manifests = root / "manifests"
        self.manifests.mkdir()
        self.workers: list[PoolWorker] = []
        self.wanted: dict[str, dict[str, Any]] = {}
        self._start = start
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    async def __aenter__(self) -> ProcessPool:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=5), connector=aiohttp.TCPConnector(force_close=True)
        )
        ports = free_ports(2 * self.size)
        for i in range(self.size):
            self.workers.append(PoolWorker(self, f"worker-{i}", ports[2 * i], ports[2 * i + 1]))
        if self._start:
            await asyncio.gather(*(w.engine.start() for w in self.workers))
            await asyncio.gather(*(w.start() for w in self.workers))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(p for w in self.workers for p in (w.agent.end(), w.engine.kill())))
        await self.session.close()
        if error is not None:
            for worker in self.workers:
                print(f"---- {worker.name}\n{worker.agent.log[-4000:]}")

    # -- what is wanted

    def content(self, name: str, seed: str = "") -> str:
        """Make a small adapter; returns its file:// URI."""
        return write_adapter(self.root / "origin" / name, seed or name, base=BASE).as_uri()

    def apply(self, name: str, uri: str = "", **spec: Any) -> None:
        """Write its manifest, as an editor that renames does. `source` in the spec is more than the URI."""
        source = {"uri": uri or self.content(name)}
        self.wanted[name] = {"baseModel": BASE, "source": source} | spec
        manifest = {
            "apiVersion": "lora-sidecar.io/v1alpha1",
            "kind": "Adapter",
            "metadata": {"name": name},
            "spec": self.wanted[name],
        }
        hidden = self.manifests / f".{name}.yaml"
        hidden.write_text(json.dumps(manifest))
        hidden.rename(self.manifests / f"{name}.yaml")

    def edit(self, name: str, **spec: Any) -> None:
        """Change some fields of a manifest."""
        self.apply(name, self.wanted[name]["source"]["uri"], **(self.wanted[name] | spec))

    def delete(self, name: str) -> None:
        del self.wanted[name]
        (self.manifests / f"{name}.yaml").unlink()

    def placement(self, workers: list[str] | None = None) -> dict[str, set[str]]:
        """Resource name -> names of its targets, by the rules alone."""
        names = workers if workers is not None else [w.name for w in self.workers]
        pool = [Worker(name=n, uid=n, base_models=(BASE,), room=self.capacity) for n in names]
        adapters = [
            Adapter(
                namespace="default",
                name=name,
                base_model=BASE,
                served_name=str(spec.get("servedName", name)),
                source=Source(uri=spec["source"]["uri"]),
                distribution=Distribution(**spec.get("distribution", {})),
                priority=int(spec.get("priority", 0)),
            )
            for name, spec in self.wanted.items()
        ]
        return {key.partition("/")[2]: set(a.targets) for key, a in place(adapters, pool).items()}

    async def held(self) -> dict[str, dict[str, str]]:
        """Worker -> served name -> root, of all engines that are up."""
        found = await asyncio.gather(*(w.engine.loaded() for w in self.workers))
        return {w.name: names for w, names in zip(self.workers, found, strict=True) if names is not None}

    async def placed_right(self) -> bool:
        """Whether the engines hold exactly what placement says."""
        held, targets = await self.held(), self.placement()
        served = {n: str(spec.get("servedName", n)) for n, spec in self.wanted.items()}
        want = {w.name: {served[n] for n, at in targets.items() if w.name in at} for w in self.workers}
        return {name: set(names) for name, names in held.items()} == want

    async def settled(self, seconds: float = PATIENCE) -> None:
        """Wait until the engines hold exactly what placement says, and each target what the pool has decided on."""
        await until(self.placed_right, "every engine to hold what placement says", seconds)
        await until(self.up_to_date, "every target to hold what is wanted", seconds)

    async def up_to_date(self) -> bool:
        """Whether each agent says that its targets are loaded as wanted, and all agree on what is wanted."""
        decided: dict[str, set[str]] = {}
        for worker in self.workers:
            rows = await worker.rows()
            if rows.keys() != self.wanted.keys():
                return False
            for name, row in rows.items():
                if row["wantedHere"]:
                    decided.setdefault(name, set()).update((row["revision"], row["wantedRevision"]))
                    if row["state"] != "Loaded":
                        return False
        return all(len(revisions) == 1 for revisions in decided.values())

    async def ready(self) -> None:
        """Wait until each agent has heard of all others."""

        async def knows() -> bool:
            for worker in self.workers:
                try:
                    _, found = await worker.get("/v1/peers")
                except GONE:
                    return False
                if sum(row["state"] == "alive" for row in found["peers"]) != self.size:
                    return False
            return True

        await until(knows, "the agents to hear of each other")


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = PATIENCE) -> float:
    """Seconds until the condition holds. Raises TimeoutError with what was waited for."""
    began = time.monotonic()
    while not await condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


class Watch:
    """Looks at all engines all the time: what was served once, and is wanted, is served somewhere at every look."""

    def __init__(self, pool: ProcessPool) -> None:
        self.pool = pool
        self.faults: list[str] = []
        self.looks = 0
        self._served: set[str] = set()
        self._missed: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if error is None:
            assert self.looks > 10
            assert self.faults == []

    async def _run(self) -> None:
        while True:
            held = await self.pool.held()
            self.looks += 1
            now = {name for names in held.values() for name in names}
            self._served |= now
            targets = self.pool.placement()
            wanted = {str(spec.get("servedName", n)) for n, spec in self.pool.wanted.items() if targets[n]}
            gone = (self._served & wanted) - now
            # An update of who alone serves a name is an unload and a load back to back.
            self._missed = {n: self._missed.get(n, time.monotonic()) for n in gone}
            self.faults += [
                f"{n} is served nowhere" for n, since in self._missed.items() if time.monotonic() - since > 1
            ]
            await asyncio.sleep(0.03)
