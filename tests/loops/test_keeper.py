"""What stays on the disk whatever room is needed, and what may go."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.core.memory import Attempt, LoadedOnce, Memory
from sidecar.core.world import World
from sidecar.loops.keeper import Keeper
from sidecar.model import Entry, State
from sidecar.ports import DiskFull
from tests.core.worlds import ME, NOW, R1, R2, R3, adapter, entry, peer, world
from tests.loops.engine import UnaskedEngine
from tests.sim.world import Disk

A = adapter("a")


class Engine(UnaskedEngine):
    """Tells that requests of these names are under way."""

    def __init__(self, *busy: str) -> None:
        self.busy: frozenset[str] | None = frozenset(busy)

    async def in_flight(self) -> frozenset[str] | None:
        return self.busy


def disk(*revisions: str) -> Disk:
    made = Disk()
    for each in revisions:
        made.publish(each)
    return made


def seen(**fields: Any) -> World:
    return world(**({"disk": [R1, R2, R3]} | fields))


@pytest.mark.parametrize(
    ("memory", "fields", "kept"),
    [
        (Memory(), {}, set()),
        (Memory(), {"owned": {"a": R1}}, {R1}),
        (Memory(unloaded={R1: NOW}), {}, {R1}),
        (Memory(previous={A.key: R2}), {}, {R2}),
        (Memory(attempts=[Attempt(A.key, R3, NOW)]), {}, {R3}),
    ],
)
async def test_what_is_needed_stays(memory: Memory, fields: dict[str, Any], kept: set[str]) -> None:
    store = disk(R1, R2, R3)
    await Keeper(store, Engine(), memory).tidy(seen(**fields))
    assert set(store.revisions()) == kept


async def test_what_is_wanted_stays() -> None:
    store = disk(R1, R2)
    await Keeper(store, Engine(), Memory()).tidy(world(A, wants={"a": R1}, disk=[R1, R2]))
    assert set(store.revisions()) == {R1}


@pytest.mark.parametrize(("busy", "kept"), [("a", {R1}), ("b", set())])
async def test_files_stay_while_a_request_may_read_them(busy: str, kept: set[str]) -> None:
    store = disk(R1, R2, R3)
    memory = Memory(history=[LoadedOnce("p1", "a", R1)])
    await Keeper(store, Engine(busy), memory).tidy(seen())
    assert set(store.revisions()) == kept


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ([entry(A, rev=R3)], {R3}),
        ([entry(A, rev=R2)], {R2, R3}),
        ([entry(A, State.DRAINING, R3)], {R2, R3}),
        ([], {R2, R3}),
    ],
)
async def test_the_old_files_stay_until_every_target_reports_the_new_revision(
    told: list[Entry], kept: set[str]
) -> None:
    store = disk(R1, R2, R3)
    memory = Memory(history=[LoadedOnce("p1", "a", each) for each in (R1, R2, R3)])
    there = world(
        A, targets={"a": [ME, "worker-1"]}, wants={"a": R3}, owned={"a": R3}, disk=[R1, R2, R3],
        peers=[peer("worker-1", *told)],
    )  # fmt: skip
    await Keeper(store, Engine(), memory).tidy(there)
    assert set(store.revisions()) == kept


async def test_a_name_that_is_always_in_use_does_not_keep_all_that_it_ever_was() -> None:
    store = disk(R1, R2, R3)
    memory = Memory(history=[LoadedOnce("p1", "a", R1), LoadedOnce("p1", "a", R2)])
    await Keeper(store, Engine("a"), memory).tidy(seen(owned={"a": R2}))
    assert set(store.revisions()) == {R2}


async def test_metrics_that_do_not_tell_hold_nothing_back() -> None:
    engine = Engine()
    engine.busy = None
    store = disk(R1)
    await Keeper(store, engine, Memory(history=[LoadedOnce("p1", "a", R1)])).tidy(seen())
    assert set(store.revisions()) == set()


@pytest.mark.parametrize("unknown", [{"up": False}, {"adapters_fresh": False}, {"members_fresh": False}])
async def test_nothing_goes_while_anything_is_unknown(unknown: dict[str, Any]) -> None:
    store = disk(R1, R2, R3)
    keeper = Keeper(store, Engine(), Memory())
    await keeper.before_actions(seen(**unknown))
    await keeper.tidy(seen(**unknown))
    assert set(store.revisions()) == {R1, R2, R3}


async def test_what_came_since_the_look_stays() -> None:
    store = disk(R1, R2)
    await Keeper(store, Engine(), Memory()).tidy(world(disk=[R1]))
    assert set(store.revisions()) == {R2}


class Told(Disk):
    """Notes what it is told to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[frozenset[str]] = []

    def evict(self, keep: frozenset[str]) -> tuple[str, ...]:
        self.kept.append(keep)
        return ()


async def test_what_is_newly_needed_is_told_before_it_is_loaded_and_no_more_than_that() -> None:
    store = Told()
    keeper = Keeper(store, Engine(), Memory())
    await keeper.before_actions(world(disk=[R1, R2]))
    assert store.kept == []
    await keeper.before_actions(world(A, wants={"a": R1}, disk=[R1, R2]))
    await keeper.before_actions(world(A, wants={"a": R1}, disk=[R1, R2]))
    assert store.kept == [frozenset({R1})]
    await keeper.before_actions(world(disk=[R1, R2]))
    assert len(store.kept) == 1


class Broken(Disk):
    def evict(self, keep: frozenset[str]) -> tuple[str, ...]:
        raise DiskFull("no")


async def test_a_disk_that_fails_ends_nothing() -> None:
    store = Broken()
    store.publish(R1)
    await Keeper(store, Engine(), Memory()).tidy(seen())
    assert set(store.revisions()) == {R1}
