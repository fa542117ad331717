"""A simulated pool: whole agents, each with its own engine, disk and views, and hands to disturb them."""

from __future__ import annotations

import asyncio
import random

import msgspec

from sidecar.core.memory import restore
from sidecar.core.world import Rules
from sidecar.loops.engine_watch import EngineWatch
from sidecar.loops.reconcile import Reconciler
from sidecar.model import Adapter, Distribution, Head, Member, Source, Steering

from .world import BASE, Disk, Network, Origin, Silent, SimBackend, SimEngine, SimFetcher, SimPeers

EPOCH = 1_000_000.0


class SimWorker:
    """One worker: its engine and disk outlive its agent."""

    def __init__(self, pool: SimPool, name: str, zone: str, capacity: int, version: str) -> None:
        self.pool, self.name, self.zone, self.capacity = pool, name, zone, capacity
        self.uid = f"uid-{name}"
        self.disk = Disk()
        self.engine = SimEngine(name, pool.rng, version, pool.clock)
        self.backend = SimBackend(name, self.uid)
        self.agent: Reconciler | None = None
        self.peers: SimPeers | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """A new agent process on what the disk remembers."""
        pool = self.pool
        watch = EngineWatch(self.engine, pool.clock, interval=1.0, up_window=3.0)
        members = self.backend
        peers = SimPeers(self.name, pool.network, lambda: [m.name for m in members.members or ()], pool.clock, pool.rng)
        self.fetcher = SimFetcher(pool.origin, self.disk, pool.rng)
        agent = Reconciler(
            head=Head(uid=self.uid, name=self.name, pool="sim", zone=self.zone),
            backend=self.backend,
            peers=peers,
            engine=self.engine,
            watch=watch,
            fetcher=self.fetcher,
            store=self.disk,
            memory=restore(self.disk.read("memory.json"), pool.clock()),
            clock=pool.clock,
            meter=Silent(),
            rules=Rules(peer_bytes=True),
            capacity=lambda: self.capacity,
            rng=pool.rng,
        )
        self.agent, self.peers = agent, peers
        peers.announce(agent.record)
        loops = (agent.run(), watch.run(agent.wake), peers.run(agent.wake))
        self._tasks = [asyncio.get_running_loop().create_task(loop) for loop in loops]

    async def kill_agent(self) -> None:
        """As SIGKILL: nothing more is done, nothing is said."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.agent = None
        self.pool.network.records.pop(self.name, None)

    def crashed(self) -> BaseException | None:
        """What ended a loop that must never end."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                return task.exception() or RuntimeError("a loop returned")
        return None


class SimPool:
    """All workers, the origin, the network and the list of adapters."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.origin = Origin()
        self.network = Network()
        self.workers: dict[str, SimWorker] = {}
        self.adapters: dict[str, Adapter] = {}
        self._made = 0

    def clock(self) -> float:
        """Seconds since the epoch, as the agents have it."""
        return EPOCH + asyncio.get_running_loop().time()

    def add_worker(
        self, zone: str = "", capacity: int = 100, version: str = "0.32.0", *, start: bool = True
    ) -> SimWorker:
        """A new worker that everybody's backend lists at once."""
        worker = SimWorker(self, f"worker-{self._made}", zone, capacity, version)
        self._made += 1
        self.workers[worker.name] = worker
        self.publish()
        if start:
            worker.start()
        return worker

    async def remove_worker(self, name: str) -> None:
        """The worker is gone for good, and the backend says so."""
        worker = self.workers.pop(name)
        worker.engine.kill()
        await worker.kill_agent()
        self.publish()

    def publish(self, only: str | None = None) -> None:
        """Give the backends' truth to all agents, or to one."""
        members = tuple(
            Member(name=w.name, address=f"{w.name}:8790", uid=w.uid, zone=w.zone) for w in self.workers.values()
        )
        wanted = tuple(self.adapters.values())
        for worker in self.workers.values():
            if only in (None, worker.name) and worker.backend.fresh:
                worker.backend.adapters, worker.backend.members = wanted, members
                if worker.agent is not None:
                    worker.agent.wake()

    async def publish_late(self, longest: float) -> None:
        """Every agent hears of the change at a time of its own."""
        names = list(self.workers)
        self.rng.shuffle(names)
        for name in names:
            await asyncio.sleep(self.rng.uniform(0, longest / len(names)))
            self.publish(name)

    def adapter(self, name: str, distribution: Distribution | None = None, **fields: object) -> Adapter:
        """Want an adapter (or want it otherwise); its content is what the origin has behind its URI."""
        uri = f"s3://bucket/{name}"
        self.origin.contents.setdefault(uri, f"{name}-1")
        made = Adapter(
            namespace="default",
            name=name,
            base_model=BASE,
            served_name=name,
            source=Source(uri=uri),
            distribution=distribution or Distribution(),
            created=len(self.adapters),
            drain_seconds=2,
        )
        self.adapters[made.key] = msgspec.structs.replace(made, **fields)
        return self.adapters[made.key]

    def update(self, key: str, content: str) -> None:
        """New content behind a new URI: what an edit of spec.source does."""
        old = self.adapters[key]
        uri = f"{old.source.uri.split('@')[0]}@{content}"
        self.origin.contents[uri] = content
        self.adapters[key] = msgspec.structs.replace(old, source=Source(uri=uri), generation=old.generation + 1)

    def cordon(self, name: str, on: bool) -> None:
        """What `kubectl annotate` does."""
        worker = self.workers[name]
        worker.backend.steering = Steering(cordoned=on)
        if worker.agent is not None:
            worker.agent.wake()
