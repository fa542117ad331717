"""How a worker lets go of what it should no longer hold: route away, wait, look again, unload."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.core.memory import Memory
from sidecar.core.world import Unload
from sidecar.model import Distribution, State

from .worlds import (
    ME,
    NOW,
    R1,
    R2,
    adapter,
    drained,
    entry,
    loads,
    peer,
    plan_of,
    state,
    swaps,
    unloads,
)

A = adapter("a")
THERE = peer("worker-1", entry(A))
MOVED: dict[str, Any] = {"targets": {"a": ["worker-1"]}, "wants": {"a": R1}, "disk": [R1], "owned": {"a": R1}}


# -- moved to others


def test_a_copy_stays_routed_until_the_target_reports_its_own() -> None:
    loading = peer("worker-1", entry(A, State.LOADING))
    made = plan_of(A, **MOVED, peers=[loading], **drained())
    assert made.actions == ()
    assert made.statuses[A.key].state == State.LOADED
    assert made.statuses[A.key].routed
    assert made.drains == {}


def test_once_the_target_reports_its_own_the_traffic_goes_first() -> None:
    made = plan_of(A, **MOVED, peers=[THERE])
    assert made.actions == ()
    assert state(made, A) == State.DRAINING
    assert not made.statuses[A.key].routed
    assert made.drains == {"a": NOW}


@pytest.mark.parametrize(
    ("drain_seconds", "told", "goes"),
    [(5, NOW - 4.9, False), (5, NOW - 5.0, True), (0, NOW - 2.9, False), (0, NOW - 3.0, True), (60, NOW - 59, False)],
)
def test_the_copy_goes_after_the_drain_and_not_before_a_second_look(
    drain_seconds: int, told: float, goes: bool
) -> None:
    slow = adapter("a", drain_seconds=drain_seconds)
    memory = Memory(drains={"a": told - 1.0})
    made = plan_of(slow, **MOVED, peers=[THERE], memory=memory, withdrawn={"a": told})
    expected = Unload(name="a", revision=R1, key=A.key, handover=True, witnesses=("worker-1",))
    assert unloads(made) == ([expected] if goes else [])
    assert state(made, A) == State.DRAINING
    assert made.drains == {"a": told - 1.0}


def test_the_drain_counts_from_when_the_world_was_told() -> None:
    made = plan_of(A, **MOVED, peers=[THERE], memory=Memory(drains={"a": NOW - 60.0}))
    assert made.actions == ()
    assert made.wake_at <= NOW + 1.0


def test_a_busy_name_is_not_unloaded_again() -> None:
    made = plan_of(A, **MOVED, peers=[THERE], busy_names=frozenset({"a"}), **drained())
    assert made.actions == ()
    assert state(made, A) == State.DRAINING


def test_an_unload_that_can_no_longer_be_called_off_keeps_the_traffic_away() -> None:
    loading = peer("worker-1", entry(A, State.LOADING))
    made = plan_of(A, **MOVED, peers=[loading], going=frozenset({"a"}), busy_names=frozenset({"a"}), **drained())
    assert made.actions == ()
    assert state(made, A) == State.DRAINING


def test_what_the_platform_may_end_at_any_moment_gets_no_traffic_back() -> None:
    loading = peer("worker-1", entry(A, State.LOADING))
    made = plan_of(A, **MOVED, peers=[loading], going=frozenset({"a"}), terminating=True)
    assert made.actions == ()
    assert not made.statuses[A.key].routed


def test_a_target_again_takes_its_traffic_back() -> None:
    fields = MOVED | {"targets": {"a": [ME]}}
    made = plan_of(A, **fields, **drained())
    assert made.actions == ()
    assert made.drains == {}
    assert made.statuses[A.key].routed


def test_a_target_again_while_its_unload_is_under_way_does_not_pretend_to_serve() -> None:
    fields = MOVED | {"targets": {"a": [ME]}}
    made = plan_of(A, **fields, going=frozenset({"a"}), busy_names=frozenset({"a"}), **drained())
    assert made.actions == ()
    assert state(made, A) == State.LOADING
    assert not made.statuses[A.key].routed


@pytest.mark.parametrize(
    "unknown", [{"adapters_fresh": False}, {"members_fresh": False}, {"isolated": True}, {"settled": False}]
)
def test_unknown_is_never_empty(unknown: dict[str, Any]) -> None:
    made = plan_of(A, **MOVED, peers=[THERE], **drained(), **unknown)
    assert made.actions == ()
    assert made.statuses[A.key].routed


def test_a_terminating_worker_hands_its_traffic_over_and_unloads_nothing() -> None:
    made = plan_of(A, **MOVED, peers=[THERE], terminating=True, **drained())
    assert made.actions == ()
    assert state(made, A) == State.DRAINING
    assert not made.statuses[A.key].routed


def test_patience_begins_when_the_worker_stopped_being_a_target() -> None:
    made = plan_of(A, **MOVED)
    assert made.leaving == {A.key: NOW}
    assert made.wake_at == NOW + 600.0
    later = plan_of(A, **MOVED, memory=Memory(leaving={A.key: NOW - 10.0}))
    assert later.leaving == {A.key: NOW - 10.0}
    back = plan_of(A, **(MOVED | {"targets": {"a": [ME]}}), memory=Memory(leaving={A.key: NOW - 10.0}))
    assert back.leaving == {}


def test_no_news_is_told_about_adapters_that_are_none_of_its_business() -> None:
    made = plan_of(A, targets={"a": ["worker-1"]}, wants={"a": R1}, peers=[THERE])
    assert A.key not in made.statuses
    assert made.actions == ()


def test_who_has_no_room_says_so() -> None:
    made = plan_of(A, targets={"a": ["worker-1"]}, waiting={"a": [ME]})
    assert state(made, A) == State.WAITING


# -- deleted


def test_a_name_of_a_deleted_adapter_drains_and_goes() -> None:
    first = plan_of(owned={"a": R1}, disk=[R1])
    assert first.actions == ()
    assert first.drains == {"a": NOW}
    later = plan_of(owned={"a": R1}, disk=[R1], **drained())
    assert unloads(later) == [Unload(name="a", revision=R1)]


def test_a_deleted_adapter_drains_as_long_as_its_spec_said() -> None:
    kept = Memory(drain_seconds={"a": 30})
    early = plan_of(owned={"a": R1}, **drained(since=NOW - 29.0, memory=kept))
    assert early.actions == ()
    assert len(unloads(plan_of(owned={"a": R1}, **drained(since=NOW - 30.0, memory=kept)))) == 1


def test_foreign_names_are_nobodys_orphans() -> None:
    made = plan_of(foreign=frozenset({"x"}), **drained("x"))
    assert made.actions == ()
    assert made.drains == {}


@pytest.mark.parametrize(
    "unknown", [{"adapters_fresh": False}, {"members_fresh": False}, {"isolated": True}, {"up": False}]
)
def test_nothing_is_an_orphan_while_the_lists_are_unknown(unknown: dict[str, Any]) -> None:
    assert plan_of(owned={"a": R1}, **drained(), **unknown).actions == ()


def test_a_renamed_adapter_is_loaded_under_its_new_name_and_the_old_one_drains_and_goes() -> None:
    renamed = adapter("a", served_name="new")
    first = plan_of(renamed, wants={"a": R1}, disk=[R1], owned={"old": R1})
    assert [a.name for a in loads(first)] == ["new"]
    assert first.drains == {"old": NOW}
    made = plan_of(renamed, wants={"a": R1}, disk=[R1], owned={"old": R1, "new": R1}, **drained("old"))
    assert [a.name for a in unloads(made)] == ["old"]
    assert made.statuses[renamed.key].routed


@pytest.mark.parametrize(
    "distribution",
    [Distribution(strategy="fixed", replicas=0), Distribution(strategy="percentage", percentage=0)],
)
def test_wanted_nowhere_by_will_is_a_deletion(distribution: Distribution) -> None:
    unwanted = adapter("a", distribution=distribution)
    fields = MOVED | {"targets": {"a": []}}
    first = plan_of(unwanted, **fields)
    assert first.actions == ()
    assert state(first, A) == State.DRAINING
    made = plan_of(unwanted, **fields, **drained())
    assert unloads(made) == [Unload(name="a", revision=R1, key=A.key)]


# -- new content for who is no target


def test_who_only_waits_for_its_successor_changes_nothing() -> None:
    fields = MOVED | {"wants": {"a": R2}, "disk": [R1, R2]}
    made = plan_of(A, **fields, peers=[THERE], **drained())
    assert made.actions == ()
    assert made.statuses[A.key].revision == R1
    assert made.statuses[A.key].routed
    assert swaps(made) == []
