"""A simulated pool: whole agents, each with its own engine, disk, clock and views, and hands to disturb them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from sidecar.core.keyring import Keyring, make_key
from sidecar.core.memory import restore
from sidecar.core.world import Rules
from sidecar.edges.peers_http import PolledPeers
from sidecar.loops.engine_watch import EngineWatch
from sidecar.loops.gossip import GossipPeers
from sidecar.loops.identity import Identity, keep_identity, take_identity
from sidecar.loops.mixed_peers import MixedPeers, Unreached
from sidecar.loops.reconcile import Reconciler
from sidecar.model import Adapter, Distribution, Head, Member, Source, Steering
from sidecar.ports import DiskFull, Peers

from .air import Air, AirAsking, AirDatagrams, AirSync, Host
from .loop import Process, VirtualLoop
from .world import BASE, Disk, Network, Origin, Silent, SimBackend, SimEngine, SimFetcher, SimPeers

EPOCH = 1_000_000.0
FIRST_KEY = Keyring((make_key("the first key of the pool"),))

Kind = Literal["plain", "asked", "gossip", "mixed"]
"""How agents know each other: by a fake that never fails; by asking; by gossip; or some by this, some by that."""


class SimWorker:
    """One worker: its engine and disk outlive its agent. `key` tells apart two workers of one name."""

    def __init__(self, pool: SimPool, key: str, address: str, zone: str, capacity: int, version: str) -> None:
        self.pool, self.key, self.zone, self.capacity = pool, key, zone, capacity
        self.name, self.address = key.partition("~")[0], address
        self.uid = f"uid-{key}"
        self.speaks = pool.kind == "gossip" or (pool.kind == "mixed" and pool.rng.random() < 0.5)
        self.keys = pool.keys
        # Seconds that the machine's clock is ahead, and was when the agent started.
        self.skew = 0.0
        self._skew_then = 0.0
        self.disk = Disk()
        self.engine = SimEngine(key, pool.rng, version, self.clock)
        self.backend = SimBackend(self.name, self.uid)
        self.agent: Reconciler | None = None
        self.peers: Any = None
        self.gossip: GossipPeers | None = None
        self.process = Process()
        self.started = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def clock(self) -> float:
        """The agent's steady clock: the machine's as of its start, and never set afterwards."""
        return self.pool.clock() + self._skew_then

    def wall(self) -> float:
        """The machine's clock."""
        return self.pool.clock() + self.skew

    def start(self) -> bool:
        """A new agent process on what the disk remembers; False if it can't start."""
        pool = self.pool
        self._skew_then = self.skew
        try:
            identity = take_identity(self.disk, self.clock(), self.uid)
        except DiskFull:
            return False
        self.process = Process()
        host = Host(self.address, self.process)
        watch = EngineWatch(self.engine, self.clock, interval=1.0, up_window=3.0)
        peers = self._peers(host, identity)
        self.fetcher = SimFetcher(pool.origin, self.disk, pool.rng)
        agent = Reconciler(
            head=Head(
                uid=self.uid,
                generation=identity.generation,
                name=self.name,
                pool="sim",
                address=self.address,
                zone=self.zone,
                gossip=self.speaks,
            ),
            backend=self.backend,
            peers=peers,
            engine=self.engine,
            watch=watch,
            fetcher=self.fetcher,
            store=self.disk,
            memory=restore(self.disk.read("memory.json"), self.clock()),
            clock=self.clock,
            meter=Silent(),
            rules=Rules(peer_bytes=self.speaks or pool.kind == "plain"),
            capacity=lambda: self.capacity,
            rng=pool.rng,
        )
        agent.on_step = lambda: pool.stepped(self)
        self.agent, self.peers = agent, peers
        peers.announce(agent.record)
        host.record = lambda: agent.record
        pool.air.hosts[self.address] = host
        self.started = asyncio.get_running_loop().time()
        self._tasks = [self.process.spawn(w) for w in (agent.run(), watch.run(agent.wake), peers.run(agent.wake))]
        return True

    def _peers(self, host: Host, identity: Identity) -> Peers:
        pool, members = self.pool, self._members
        if pool.kind == "plain":
            listed = self.backend
            return SimPeers(
                self.name, pool.network, lambda: [m.name for m in listed.members or ()], self.clock, pool.rng
            )
        asking = AirAsking(pool.air, host)
        if not self.speaks:
            self.gossip = None
            return PolledPeers(pool="sim", uid=self.uid, members=members, clock=self.clock, rng=pool.rng, asking=asking)
        self._keys_read = self.keys
        gossip = self.gossip = host.gossip = GossipPeers(
            uid=self.uid,
            generation=identity.generation,
            pool="sim",
            keys=self.keys,
            datagrams=AirDatagrams(pool.air, host),
            client=AirSync(pool.air, host),
            members=members,
            clock=self.clock,
            fresh=lambda: self.backend.fresh,
            new_keys=self._new_keys,
            rise=self._rise,
            store=self.disk,
            wall=self.wall,
            rng=random.Random(pool.rng.random()),
        )
        asked = PolledPeers(
            pool="sim",
            uid=self.uid,
            members=Unreached(gossip, members, self.clock),
            clock=self.clock,
            rng=pool.rng,
            asking=asking,
        )
        return MixedPeers(gossip, asked, members, self.clock)

    def _members(self) -> tuple[Member, ...] | None:
        return self.backend.members

    def _new_keys(self) -> Keyring | None:
        if self.keys is self._keys_read:
            return None
        self._keys_read = self.keys
        return self.keys

    def _rise(self, generation: int) -> None:
        with contextlib.suppress(DiskFull):
            keep_identity(self.disk, Identity(self.uid, generation))

    async def kill_agent(self) -> None:
        """As SIGKILL: nothing more is done, nothing is said."""
        host = self.pool.air.hosts.get(self.address)
        if host is not None and host.process is self.process:
            del self.pool.air.hosts[self.address]
        await self.process.kill()
        self._tasks = []
        self.agent = self.gossip = None
        self.pool.network.records.pop(self.name, None)

    def freeze(self) -> None:
        """As SIGSTOP."""
        self.process.frozen = True

    def thaw(self) -> None:
        """As SIGCONT."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.process.thaw(loop)

    def crashed(self) -> BaseException | None:
        """What ended a loop that must never end."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                return task.exception() or RuntimeError("a loop returned")
        return None


class SimPool:
    """All workers, the origin, the network and the list of adapters."""

    def __init__(self, rng: random.Random, kind: Kind = "plain", *, by_uid: bool = True) -> None:
        """`by_uid`: as on Kubernetes the backend lists names and UIDs; else mere addresses, as seeds are."""
        self.rng, self.kind, self.by_uid = rng, kind, by_uid
        self.origin = Origin()
        self.network = Network()
        self.air = Air(rng)
        self.keys = FIRST_KEY
        self.workers: dict[str, SimWorker] = {}
        self.adapters: dict[str, Adapter] = {}
        # Called after each pass of an agent.
        self.stepped: Callable[[SimWorker], None] = lambda worker: None
        self._made = 0
        self._addresses = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def clock(self) -> float:
        """The right time, in seconds since the epoch."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return EPOCH + self._loop.time()

    def add_worker(
        self,
        zone: str = "",
        capacity: int = 100,
        version: str = "0.32.0",
        *,
        key: str = "",
        address: str = "",
        start: bool = True,
    ) -> SimWorker:
        """A new worker that everybody's backend lists at once."""
        if not key:
            key = f"worker-{self._made}"
            self._made += 1
        if not address:
            self._addresses += 1
            address = f"10.0.0.{self._addresses}:8790"
        worker = SimWorker(self, key, address, zone, capacity, version)
        self.workers[key] = worker
        self.publish()
        if start:
            worker.start()
        return worker

    def renew(self, old: SimWorker, address: str) -> SimWorker:
        """A worker of the same name as one that was removed, with a new UID, engine and disk."""
        self._made += 1
        worker = SimWorker(self, old.key, address, old.zone, old.capacity, old.engine.version)
        worker.uid = f"uid-{old.key}-{self._made}"
        self.workers[old.key] = worker
        self.publish()
        worker.start()
        return worker

    async def remove_worker(self, key: str) -> SimWorker:
        """The worker is gone for good, and the backend says so."""
        worker = self.workers.pop(key)
        worker.engine.kill()
        await worker.kill_agent()
        self.publish()
        return worker

    def publish(self, only: str | None = None) -> None:
        """Give the backends' truth to all agents, or to one."""
        wanted = tuple(self.adapters.values())
        everyone = tuple(self._member(w) for w in self.workers.values())
        for key, worker in self.workers.items():
            if only in (None, key) and worker.backend.fresh:
                worker.backend.adapters = wanted
                if worker.backend.members != (members := self._seen_by(worker, everyone)):
                    worker.backend.members = members
                if worker.agent is not None:
                    worker.agent.wake()

    def _member(self, worker: SimWorker) -> Member:
        if self.by_uid:
            return Member(name=worker.name, address=worker.address, uid=worker.uid, zone=worker.zone)
        return Member(name=worker.address, address=worker.address)

    def _seen_by(self, worker: SimWorker, everyone: tuple[Member, ...]) -> tuple[Member, ...]:
        if self.by_uid:
            return everyone
        return tuple(
            Member(name=worker.name, address=m.address, zone=worker.zone) if m.address == worker.address else m
            for m in everyone
        )

    async def publish_late(self, longest: float) -> None:
        """Every agent hears of the change at a time of its own."""
        keys = list(self.workers)
        self.rng.shuffle(keys)
        for key in keys:
            await asyncio.sleep(self.rng.uniform(0, longest / len(keys)))
            self.publish(key)

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

    def cordon(self, key: str, on: bool) -> None:
        """What `kubectl annotate` does."""
        worker = self.workers[key]
        worker.backend.steering = Steering(cordoned=on)
        if worker.agent is not None:
            worker.agent.wake()
