"""The pretended world: engines, disks, an origin, a network, and the list of wanted adapters.

Everything is deterministic for one `random.Random`. Times are virtual seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sidecar.core.metrics_vllm import Traffic
from sidecar.model import Adapter, BaseModel, EngineView, Listing, Member, Record, RemoteFile, Steering
from sidecar.ports import (
    AdapterRejected,
    BackendView,
    DiskFull,
    EngineDisconnected,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    Fetched,
    Observed,
    OriginChanged,
    OriginError,
    PeerUnreachable,
    Progress,
    Report,
)

BASE = "base"
DIRECTORY = "/adapters/revisions"


def revision(content: str) -> str:
    """The revision that `content` has."""
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


class Disk:
    """One worker's adapters directory; it outlives the agent's process."""

    def __init__(self) -> None:
        self.published: dict[str, str] = {}
        self.state: dict[str, bytes] = {}
        self.paths: set[str] = set()
        self.full = False

    @property
    def revisions_dir(self) -> str:
        return DIRECTORY

    def revisions(self) -> Mapping[str, str]:
        return self.published

    def publish(self, name: str) -> str:
        path = f"{DIRECTORY}/{name.removeprefix('sha256:')}"
        self.published[name] = path
        self.paths.add(path)
        return path

    def evict(self, keep: frozenset[str]) -> tuple[str, ...]:
        gone = tuple(r for r in self.published if r not in keep)
        for name in gone:
            self.paths.discard(self.published.pop(name))
        return gone

    def touch(self, revision: str) -> None:
        pass

    def save(self, name: str, data: bytes) -> None:
        if self.full:
            raise DiskFull(f"no room for {name}")
        self.state[name] = data

    def read(self, name: str) -> bytes | None:
        return self.state.get(name)


class SimEngine:
    """A vLLM: forgets everything at a restart, may refuse or die of some revisions, answers after a while."""

    def __init__(self, name: str, rng: random.Random, version: str, clock: Callable[[], float]) -> None:
        self.name, self.version, self._rng, self._clock = name, version, rng, clock
        self.starts = 1
        self.up = True
        self.hung = False
        self.base_models: tuple[BaseModel, ...] = (BaseModel(id=BASE, root="/models/base"),)
        self.adapters: dict[str, str] = {}
        # A load takes so many seconds, at least and at most.
        self.pace = (0.01, 0.8)
        self.refuses: set[str] = set()
        self.dies_of: set[str] = set()
        self.on_change: Callable[[str, str], None] = lambda what, name: None

    def kill(self) -> None:
        self.up = False
        self.adapters = {}

    def start(self) -> None:
        self.starts += 1
        self.up = True

    async def _answer(self, low: float = 0.001, high: float = 0.05) -> int:
        if not self.up:
            raise EngineUnavailable(f"{self.name}: connection refused")
        before = self.starts
        await asyncio.sleep(self._rng.uniform(low, high))
        if not self.up or self.starts != before:
            raise EngineDisconnected(f"{self.name}: connection reset")
        return before

    async def look(self) -> EngineView:
        await self._answer()
        return EngineView(
            process=f"{self.name}-{self.starts}",
            version=self.version,
            base_models=self.base_models,
            adapters=dict(self.adapters),
            at=self._clock(),
        )

    async def load(self, name: str, path: str) -> None:
        process = await self._answer(*self.pace)
        if path in self.dies_of:
            self.kill()
            self.on_change("died", path)
            raise EngineDisconnected(f"{self.name}: connection reset")
        if path in self.refuses:
            raise EngineRefused(f"{self.name} refuses {path}")
        if self.hung:
            await asyncio.sleep(20.0)
            if not self.up or self.starts != process:
                raise EngineDisconnected(f"{self.name}: connection reset")
            self.adapters.setdefault(name, path)
            raise EngineTimeout(f"{self.name}: no answer in time")
        if name in self.adapters:
            raise EngineRefused("has already been loaded", "AlreadyLoaded")
        self.adapters[name] = path
        self.on_change("load", name)

    async def unload(self, name: str) -> None:
        await self._answer()
        if name in self.adapters:
            self.on_change("unload", name)
            del self.adapters[name]

    async def reset_prefix_cache(self) -> bool:
        await self._answer()
        return False

    async def limits(self) -> None:
        return None

    async def in_flight(self) -> frozenset[str] | None:
        return frozenset() if self.up else None

    async def traffic(self, name: str) -> Traffic:
        return Traffic.NONE if self.up else Traffic.UNKNOWN


@dataclass
class Origin:
    """URI -> content now; may be out."""

    contents: dict[str, str] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    out: bool = False
    # A download takes so many seconds, at least and at most.
    pace: tuple[float, float] = (0.05, 3.0)
    # How often it was asked for anything.
    reads: int = 0


class SimFetcher:
    """Downloads from the origin onto one disk."""

    def __init__(self, origin: Origin, disk: Disk, rng: random.Random) -> None:
        self._origin, self._disk, self._rng = origin, disk, rng

    async def _content(self, adapter: Adapter) -> str:
        await asyncio.sleep(self._rng.uniform(0.01, 0.3))
        self._origin.reads += 1
        if self._origin.out:
            raise OriginError("the origin is out")
        return self._origin.contents[adapter.source.uri]

    async def listing(self, adapter: Adapter) -> Listing:
        content = await self._content(adapter)
        size = 32 * 2**20 if "big" in adapter.source.uri else 1000
        return Listing(files=(RemoteFile(path="adapter_model.safetensors", size=size, etag=content),))

    async def fetch(self, adapter: Adapter, listing: Listing, revision: str | None, progress: Progress) -> Fetched:
        wanted = listing.files[0].etag
        await asyncio.sleep(self._rng.uniform(*self._origin.pace))
        if revision is not None and revision in self._disk.published:
            return Fetched(revision=revision, path=self._disk.published[revision], listing=listing)
        if await self._content(adapter) != wanted:
            raise OriginChanged("the origin moved on")
        if wanted in self._origin.bad:
            raise AdapterRejected(f"{wanted} is no adapter")
        if self._disk.full:
            raise DiskFull(f"no room for {wanted}")
        name = globals()["revision"](wanted)
        return Fetched(revision=name, path=self._disk.publish(name), listing=listing)


class Network:
    """Who can ask whom, and what each says at the moment."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.cut: set[tuple[str, str]] = set()

    def ask(self, asker: str, asked: str) -> Record:
        if (asker, asked) in self.cut or asked not in self.records:
            raise PeerUnreachable(f"{asked} does not answer {asker}")
        return self.records[asked]


class SimPeers:
    """Polls the listed workers' records once a second."""

    def __init__(
        self,
        me: str,
        network: Network,
        members: Callable[[], list[str]],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._me, self._network, self._members, self._clock, self._rng = me, network, members, clock, rng
        self._seen: dict[str, tuple[Record, float]] = {}
        self.rival: Record | None = None

    def view(self) -> Mapping[str, Observed]:
        now = self._clock()
        return {
            n: Observed(record=r, heard=t, alive=now - t < 3.0)
            for n, (r, t) in self._seen.items()
            if n in self._members()
        }

    def unheard(self) -> frozenset[str]:
        return frozenset(n for n in self._members() if n != self._me and n not in self._seen)

    def namesake(self) -> Record | None:
        return self.rival

    def announce(self, record: Record) -> None:
        self._network.records[self._me] = record

    async def ask(self, name: str) -> Record:
        await asyncio.sleep(self._rng.uniform(0.001, 0.1))
        if name == self._me and self.rival is not None:
            return self.rival
        record = self._network.ask(self._me, name)
        self._seen[name] = (record, self._clock())
        return record

    async def run(self, changed: Callable[[], None]) -> None:
        alive: dict[str, bool] = {}
        while True:
            for name in self._members():
                if name == self._me:
                    continue
                try:
                    record = self._network.ask(self._me, name)
                except PeerUnreachable:
                    continue
                old = self._seen.get(name)
                self._seen[name] = (record, self._clock())
                if old is None or old[0] is not record:
                    changed()
            now_alive = {n: o.alive for n, o in self.view().items()}
            if now_alive != alive:
                alive = now_alive
                changed()
            await asyncio.sleep(self._rng.uniform(0.8, 1.2))


class SimBackend:
    """The wanted adapters and the members, as one worker sees them: late, or stale in an outage."""

    def __init__(self, name: str, uid: str) -> None:
        self.name, self.uid = name, uid
        self.adapters: tuple[Adapter, ...] | None = None
        self.members: tuple[Member, ...] | None = None
        self.fresh = True
        self.steering = Steering()

    def view(self) -> BackendView:
        return BackendView(
            adapters=self.adapters,
            adapters_fresh=self.fresh and self.adapters is not None,
            members=self.members,
            members_fresh=self.fresh and self.members is not None,
            steering=self.steering,
        )

    async def run(self, changed: Callable[[], None]) -> None:
        raise NotImplementedError("views are set from outside")

    async def publish(self, report: Report) -> bool:
        raise NotImplementedError("the simulated platform reads records")


class Silent:
    """A Meter that counts nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None
