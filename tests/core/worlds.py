"""Worlds for the planner's tests: a pool of workers around `worker-0` (ME), written down in a few words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sidecar.core.catalog import Catalog, select
from sidecar.core.memory import Memory, Retry
from sidecar.core.placement import Assignment
from sidecar.core.plan import plan
from sidecar.core.world import Fetch, Load, Peer, Plan, Rules, Swap, Unload, World
from sidecar.model import (
    Adapter,
    BaseModel,
    Decision,
    Distribution,
    EngineView,
    Entry,
    Head,
    RemoteFile,
    Source,
    State,
)

BASE = "base"
ME = "worker-0"
NOW = 1_000_000.0
DIRECTORY = "/adapters/revisions"


def revision(content: str) -> str:
    """The revision that `content` has."""
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


# What is said of a failure that is tried again 30 seconds after NOW.
SAID = "it broke; tried again at 13:47:10 UTC"

R1, R2, R3 = revision("1"), revision("2"), revision("3")


def adapter(
    name: str = "a", *, uri: str = "", digest: str | None = None, refresh: float = 0.0, **fields: Any
) -> Adapter:
    """An adapter for all workers, unless `fields` say otherwise."""
    source = Source(uri=uri or f"s3://bucket/{name}", digest=digest, refresh_seconds=refresh)
    made = Adapter(namespace="default", name=name, base_model=BASE, served_name=name, source=source)
    return msgspec.structs.replace(made, **fields)


def fixed(replicas: int) -> Distribution:
    return Distribution(strategy="fixed", replicas=replicas)


def decision(of: Adapter, rev: str, *, refresh: int = 0, listed: bool = True, size: int = 100) -> Decision:
    """The pool wants `rev` for this adapter."""
    files = (RemoteFile(path="adapter_model.safetensors", size=size, etag=rev[:20]),) if listed else ()
    return Decision(source_id=of.source_id, refresh=refresh, revision=rev, listing=files)


def entry(of: Adapter, state: State = State.LOADED, rev: str = R1, **fields: Any) -> Entry:
    return Entry(adapter=of.key, state=state, revision=rev, served_name=of.served_name, **fields)


def peer(name: str, *entries: Entry, heard: float = NOW, alive: bool = True, up: bool = True, **head: Any) -> Peer:
    """A peer that is well and was just heard."""
    fields: dict[str, Any] = {"uid": f"uid-{name}", "base_models": (BASE,), "engine_up": up, "engine_seen": True} | head
    return Peer(
        head=Head(name=name, **fields),
        entries={e.adapter: e for e in entries},
        heard=heard,
        alive=alive,
    )


def engine(process: str | None = "p1", version: str = "0.32.0", **adapters: str) -> EngineView:
    roots = {name: f"{DIRECTORY}/{rev.removeprefix('sha256:')}" for name, rev in adapters.items()}
    return EngineView(
        process=process, version=version, base_models=(BaseModel(id=BASE, root="/base"),), adapters=roots, at=NOW
    )


def world(
    *adapters: Adapter,
    targets: Mapping[str, Iterable[str]] | None = None,
    waiting: Mapping[str, Iterable[str]] | None = None,
    owned: Mapping[str, str] | None = None,
    wants: Mapping[str, str] | None = None,
    disk: Iterable[str] = (),
    peers: Iterable[Peer] = (),
    memory: Memory | None = None,
    up: bool = True,
    **fields: Any,
) -> World:
    """A world in which all is known and settled, with what is given; names are resource names of namespace default.

    `targets` and `waiting`: adapter -> workers (an adapter not named there has ME as its only target); `owned`: served
    name -> revision; `wants`: adapter -> the pool's revision.
    """
    catalog = select(adapters, frozenset({BASE}))
    placed = {}
    for each in catalog.active:
        names = tuple((targets or {}).get(each.name, (ME,)))
        short = tuple((waiting or {}).get(each.name, ()))
        placed[each.key] = Assignment(
            adapter=each.key, members=3, wanted=len(names) + len(short), targets=names, waiting=short, short=len(short)
        )
    by_name = {a.name: a for a in adapters}
    held = dict(owned or {}) if up else {}
    values: dict[str, Any] = {
        "now": NOW,
        "me": ME,
        "catalog": catalog,
        "adapters_fresh": True,
        "members_fresh": True,
        "isolated": False,
        "settled": True,
        "terminating": False,
        "assignments": placed,
        "mine": frozenset(k for k, a in placed.items() if ME in a.targets),
        "peers": {p.head.name: p for p in peers},
        "prefetch": {},
        "unmatched": frozenset(),
        "engine": engine(**held) if up else None,
        "engine_message": "" if up else "the engine does not answer",
        "stale_cache": False,
        "owned": held,
        "foreign": frozenset(),
        "disk": frozenset(disk),
        "decisions": {by_name[n].key: decision(by_name[n], r) for n, r in (wants or {}).items()},
        "quarantined": frozenset(),
        "withdrawn": {},
        "busy_names": frozenset(),
        "going": frozenset(),
        "busy_fetches": {},
        "memory": memory or Memory(),
        "rules": Rules(),
    }
    return World(**(values | fields))


def drained(name: str = "a", *, since: float = NOW - 60.0, memory: Memory | None = None) -> dict[str, Any]:
    """Fields of a world in which `name` has been out of routing since then, as all know."""
    memory = memory or Memory()
    memory.drains[name] = since
    return {"memory": memory, "withdrawn": {name: since}}


def retry(rev: str = "", *, until: float = NOW + 30.0, rejected: bool = False, failures: int = 1) -> Memory:
    """Adapter a couldn't be fetched, or (`rev`) not be loaded, and is tried again at `until`."""
    of = adapter("a")
    input_ = f"{of.source_id}@{rev}" if rev else of.source_id
    return Memory(
        retries={
            of.key: Retry(input=input_, failures=failures, not_before=until, message="it broke", rejected=rejected)
        }
    )


def fetches(made: Plan) -> list[Fetch]:
    return [a for a in made.actions if isinstance(a, Fetch)]


def loads(made: Plan) -> list[Load]:
    return [a for a in made.actions if isinstance(a, Load)]


def unloads(made: Plan) -> list[Unload]:
    return [a for a in made.actions if isinstance(a, Unload)]


def swaps(made: Plan) -> list[Swap]:
    return [a for a in made.actions if isinstance(a, Swap)]


def state(made: Plan, of: Adapter) -> State | None:
    status = made.statuses.get(of.key)
    return status.state if status else None


def plan_of(*adapters: Adapter, **fields: Any) -> Plan:
    return plan(world(*adapters, **fields))


def without_adapters(seen: World) -> World:
    """The same world after all adapters were deleted."""
    return msgspec.structs.replace(seen, catalog=Catalog(), assignments={}, mine=frozenset())
