"""Worlds for the planner's laws, drawn from a seed: likely ones, and ones in which everything contradicts everything.

Plain `random` rather than hypothesis's own draws: a world has some hundred of them, and its laws want many worlds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st

from sidecar.core.memory import (
    FOREVER,
    Attempt,
    Avoid,
    Held,
    LoadedOnce,
    Memory,
    Quarantine,
    Refused,
    Retry,
    Trial,
)
from sidecar.core.world import Peer, World
from sidecar.model import Adapter, Distribution, Entry, State, Suspicion

from .worlds import ME, NOW, R1, R2, R3, adapter, decision, peer, world

T = TypeVar("T")

NAMES = ("a", "b", "c")
SERVED = (*NAMES, "shared", "old")
WORKERS = (ME, "worker-1", "worker-2", "worker-3")
REVISIONS = (R1, R2, R3)
MOMENTS = (NOW - 2000.0, NOW - 601.0, NOW - 61.0, NOW - 9.0, NOW - 4.0, NOW - 1.0, NOW)
STRATEGIES: tuple[Literal["all", "fixed", "percentage"], ...] = ("all", "fixed", "percentage")


class Dice:
    """One seed's worlds. `trouble` is how often what is rare happens."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.trouble = self.rng.choice((0.0, 0.05, 0.3))

    def rarely(self) -> bool:
        return self.rng.random() < self.trouble

    def often(self) -> bool:
        return self.rng.random() < 0.8

    def one(self, *choices: T) -> T:
        return self.rng.choice(choices)

    def some(self, choices: Sequence[T], odds: float = 0.5) -> list[T]:
        return [c for c in choices if self.rng.random() < odds]

    def mostly(self, usual: T, *others: T) -> T:
        return self.one(*others) if others and not self.often() else usual


def some_adapter(dice: Dice, name: str) -> Adapter:
    kind = dice.one(*STRATEGIES)
    return adapter(
        name,
        digest=dice.mostly(None, R1),
        refresh=dice.one(0.0, 60.0),
        served_name=dice.mostly(name, "shared"),
        drain_seconds=dice.one(0, 5, 30),
        created=dice.one(0, 1),
        on_stale_prefix_cache="Replace" if dice.rarely() else "Hold",
        distribution=Distribution(
            strategy=kind,
            replicas=dice.one(0, 1, 2, 3) if kind == "fixed" else 0,
            percentage=dice.one(0, 34, 100) if kind == "percentage" else 0,
        ),
    )


def some_peer(dice: Dice, name: str, adapters: Sequence[Adapter], decided: dict[str, str]) -> Peer:
    told = [
        Entry(
            adapter=each.key,
            state=dice.mostly(State.LOADED, *State),
            revision=dice.mostly(decided.get(each.key, R1), *REVISIONS, ""),
            avoid=dice.rarely(),
            refused=R2 if dice.rarely() else "",
            gone=dice.rarely(),
        )
        for each in dice.some(adapters, 0.8)
    ]
    return peer(name, *told, heard=dice.mostly(NOW, *MOMENTS), alive=not dice.rarely(), up=not dice.rarely())


def some_memory(dice: Dice, adapters: Sequence[Adapter]) -> Memory:
    memory = Memory(
        drains={n: dice.one(*MOMENTS) for n in dice.some(SERVED)},
        held={a.key: Held(dice.one(*REVISIONS), dice.one(*MOMENTS)) for a in dice.some(adapters)},
        banned={r: Quarantine(dice.one(NOW - 1.0, NOW + 20.0), 0) for r in REVISIONS if dice.rarely()},
        drain_seconds={n: dice.one(0, 30) for n in dice.some(SERVED)},
        no_reset=dice.one(set(), {"p1"}),
        history=[LoadedOnce(dice.one("p1", ""), n, dice.one(*REVISIONS)) for n in dice.some(SERVED)],
        suspicions=[
            Suspicion(revision=r, kind=dice.one("death", "rejection"), at=dice.one(*MOMENTS))
            for r in REVISIONS
            if dice.rarely()
        ],
        attempts=[Attempt("default/a", dice.one(*REVISIONS), dice.one(*MOMENTS))] if dice.rarely() else [],
        leaving={a.key: dice.one(*MOMENTS) for a in dice.some(adapters)},
        previous={a.key: dice.one(*REVISIONS) for a in dice.some(adapters)},
    )
    for each in adapters:
        _some_trouble(dice, memory, each)
    return memory


def _some_trouble(dice: Dice, memory: Memory, each: Adapter) -> None:
    key, source, until = each.key, each.source_id, dice.one(NOW - 1.0, NOW + 20.0, FOREVER)
    if dice.rarely():
        input_ = dice.one(source, f"{source}@{R1}", f"{source}@{R2}", "other")
        memory.retries[key] = Retry(input_, dice.one(1, 3), until, "it broke", dice.one(True, False))
    if dice.rarely():
        memory.avoid[key] = Avoid(source, dice.one(*REVISIONS, ""), until)
    if dice.rarely():
        memory.refused[key] = Refused(source, dice.one(*REVISIONS))
    if dice.rarely():
        memory.trials[key] = Trial(source, "no adapter", 1, until)
    if dice.rarely():
        memory.gone[key] = 0
    if dice.rarely():
        memory.large[key] = 2**30


def some_world(seed: int) -> World:
    """What the engine holds, what lies on the disk, what peers say and what is wanted are drawn apart."""
    dice = Dice(seed)
    adapters = [some_adapter(dice, n) for n in dice.some(NAMES, 0.7)]
    wanted = {a.key: dice.one(*REVISIONS) for a in dice.some(adapters, 0.8)}
    peers = [some_peer(dice, n, adapters, wanted) for n in dice.some(WORKERS[1:], 0.7)]
    owned = {n: dice.one(*REVISIONS) for n in dice.some(SERVED, 0.6)}
    foreign = frozenset(n for n in SERVED if n not in owned and dice.rarely())
    busy = frozenset(n for n in SERVED if n not in foreign and dice.rarely())
    targets = {a.name: dice.some(WORKERS) for a in adapters}
    waiting = {a.name: [w for w in WORKERS if w not in targets[a.name] and dice.rarely()] for a in adapters}
    fields: dict[str, Any] = {
        "adapters_fresh": not dice.rarely(),
        "members_fresh": not dice.rarely(),
        "isolated": dice.rarely(),
        "settled": not dice.rarely(),
        "terminating": dice.rarely(),
        "stale_cache": dice.one(True, False),
        "unmatched": frozenset(a.key for a in adapters if dice.rarely()),
        "foreign": foreign,
        "busy_names": busy,
        "going": frozenset(dice.some(sorted(busy))),
        "withdrawn": {n: dice.one(*MOMENTS) for n in owned if dice.often()},
        "quarantined": frozenset(r for r in REVISIONS if dice.rarely()),
        "busy_fetches": {a.key: (0, 0) for a in adapters if dice.rarely()},
        "decisions": {a.key: decision(a, wanted[a.key]) for a in adapters if a.key in wanted},
        "disk": dice.some(REVISIONS, 0.7),
        "memory": some_memory(dice, adapters),
    }
    return world(*adapters, targets=targets, waiting=waiting, owned=owned, peers=peers, up=not dice.rarely(), **fields)


WORLDS = st.integers(0, 2**32).map(some_world)
