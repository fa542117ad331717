"""What a worker does about the adapters that it should hold."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.core import outcome
from sidecar.core.drafts import wanted_revision
from sidecar.core.memory import FOREVER, LoadedOnce, Memory, Refused, dump, restore
from sidecar.core.plan import plan
from sidecar.core.world import Fetch, Load
from sidecar.model import State

from .worlds import (
    ME,
    NOW,
    R1,
    R2,
    SAID,
    adapter,
    entry,
    loads,
    peer,
    plan_of,
    retry,
    state,
    swaps,
    world,
)

A = adapter("a")
B = adapter("b")
REFUSED = {A.key: Refused(source_id=A.source_id, revision=R2)}
HISTORY = [LoadedOnce(process="p1", name="a", revision=R1)]


# -- loading


def test_content_on_the_disk_is_loaded() -> None:
    made = plan_of(A, wants={"a": R1}, disk=[R1])
    assert made.actions == (Load(key=A.key, name="a", revision=R1),)
    assert state(made, A) == State.LOADING
    assert not made.statuses[A.key].routed


def test_the_served_name_is_what_is_loaded_and_told() -> None:
    named = adapter("a", served_name="Team/Model.v1")
    made = plan_of(named, wants={"a": R1}, disk=[R1])
    assert loads(made)[0].name == "Team/Model.v1"
    assert made.statuses[named.key].served_name == "Team/Model.v1"


def test_what_the_check_found_strange_is_said_while_it_serves() -> None:
    memory = Memory()
    outcome.doubted(memory, R1, ["no tensors for ['nothing']", "no prefix"])
    memory = restore(dump(memory), NOW)
    made = plan_of(A, wants={"a": R1}, disk=[R1], owned={"a": R1}, memory=memory)
    told = made.statuses[A.key]
    assert (told.state, told.routed, told.message) == (State.LOADED, True, "no tensors for ['nothing']; no prefix")
    outcome.doubted(memory, R1, [])
    assert plan_of(A, wants={"a": R1}, disk=[R1], owned={"a": R1}, memory=memory).statuses[A.key].message == ""


def test_what_is_loaded_with_the_right_root_is_routed_and_left_alone() -> None:
    made = plan_of(A, wants={"a": R1}, disk=[R1], owned={"a": R1})
    assert made.actions == ()
    assert made.statuses[A.key].state == State.LOADED
    assert made.statuses[A.key].routed
    assert made.statuses[A.key].revision == R1


def test_a_name_that_another_serves_is_left_alone_and_said() -> None:
    made = plan_of(A, wants={"a": R1}, disk=[R1], foreign=frozenset({"a"}))
    assert made.actions == ()
    assert state(made, A) == State.FAILED
    assert "--lora-modules" in made.statuses[A.key].message
    assert not made.statuses[A.key].routed


def test_one_bad_adapter_changes_nothing_for_the_others() -> None:
    alone = plan_of(B, wants={"b": R2}, disk=[R2])
    beside = plan_of(A, B, wants={"a": R1, "b": R2}, disk=[R1, R2], memory=retry(R1, until=FOREVER, rejected=True))
    assert beside.actions == alone.actions
    assert beside.statuses[B.key] == alone.statuses[B.key]
    assert state(beside, A) == State.REJECTED


def test_a_failed_load_waits_for_its_time_and_says_why() -> None:
    made = plan_of(A, wants={"a": R1}, disk=[R1], memory=retry(R1))
    assert made.actions == ()
    assert made.statuses[A.key].message == SAID
    assert state(made, A) == State.FAILED
    assert made.wake_at == NOW + 30.0


def test_a_failed_load_is_tried_again_when_its_time_has_come() -> None:
    assert len(loads(plan_of(A, wants={"a": R1}, disk=[R1], memory=retry(R1, until=NOW)))) == 1


def test_a_rejection_of_other_content_does_not_stop_a_load() -> None:
    assert len(loads(plan_of(A, wants={"a": R1}, disk=[R1], memory=retry(R2, until=FOREVER, rejected=True)))) == 1


def test_nothing_new_is_loaded_before_the_peers_have_spoken() -> None:
    made = plan_of(A, wants={"a": R1}, disk=[R1], settled=False)
    assert made.actions == ()
    assert state(made, A) == State.PENDING


def test_nothing_is_fetched_before_the_peers_have_spoken() -> None:
    """An agent that has just started would fetch what isn't its own."""
    for made in (plan_of(A, settled=False), plan_of(A, wants={"a": R1}, settled=False)):
        assert made.actions == ()
        assert state(made, A) == State.PENDING


def test_what_is_loaded_goes_on_serving_before_the_peers_have_spoken() -> None:
    made = plan_of(A, wants={"a": R2}, owned={"a": R1}, settled=False)
    assert made.actions == ()
    assert made.statuses[A.key].routed


def test_without_an_engine_what_is_fetched_waits_for_it() -> None:
    made = plan_of(A, wants={"a": R1}, disk=[R1], up=False)
    assert made.actions == ()
    assert state(made, A) == State.PENDING
    assert made.statuses[A.key].message == "the engine does not answer"


def test_unknown_lists_stop_no_load_and_no_fetch() -> None:
    made = plan_of(A, B, wants={"a": R1, "b": R2}, disk=[R1], adapters_fresh=False, members_fresh=False)
    assert [type(a) for a in made.actions] == [Load, Fetch]


def test_a_busy_name_is_not_started_again() -> None:
    made = plan_of(A, wants={"a": R1}, disk=[R1], busy_names=frozenset({"a"}))
    assert made.actions == ()
    assert state(made, A) == State.LOADING


# -- the prefix cache


@pytest.mark.parametrize(
    ("history", "memory_process", "stale", "expected"),
    [
        ([], "p1", True, "load"),
        (HISTORY, "p1", False, "load"),
        ([LoadedOnce(process="p0", name="a", revision=R1)], "p1", True, "load"),
        ([LoadedOnce(process="p1", name="b", revision=R1)], "p1", True, "load"),
        ([LoadedOnce(process="p1", name="a", revision=R2)], "p1", True, "load"),
        (HISTORY, "p1", True, "reset"),
        ([LoadedOnce(process="", name="a", revision=R1)], "p1", True, "reset"),
    ],
)
def test_another_revision_under_a_name_that_this_engine_has_seen_is_loaded_after_a_reset(
    history: list[LoadedOnce], memory_process: str, stale: bool, expected: str
) -> None:
    memory = Memory(history=history, process=memory_process)
    made = plan_of(A, wants={"a": R2}, disk=[R2], stale_cache=stale, memory=memory)
    assert loads(made) == [Load(key=A.key, name="a", revision=R2, reset=expected == "reset")]


def test_an_engine_that_cannot_reset_holds_the_content_back_and_asks_to_be_passed_over() -> None:
    memory = Memory(history=HISTORY, no_reset={"p1"})
    made = plan_of(A, wants={"a": R2}, disk=[R2], stale_cache=True, memory=memory)
    status = made.statuses[A.key]
    assert made.actions == ()
    assert (status.state, status.held, status.avoid, status.routed) == (State.PENDING, True, True, False)
    assert "onStalePrefixCache" in status.message


def test_replace_overrides_the_guard() -> None:
    careless = adapter("a", on_stale_prefix_cache="Replace")
    memory = Memory(history=HISTORY, no_reset={"p1"})
    made = plan_of(careless, wants={"a": R2}, disk=[R2], stale_cache=True, memory=memory)
    assert loads(made) == [Load(key=A.key, name="a", revision=R2)]


# -- refused updates


def test_who_refused_the_new_content_wants_the_old() -> None:
    memory = Memory(refused=REFUSED, previous={A.key: R1})
    seen = world(A, wants={"a": R2}, disk=[R1, R2], memory=memory)
    assert wanted_revision(seen, A) == R1
    assert [a.revision for a in loads(plan(seen))] == [R1]


def test_who_refused_the_new_content_stays_loaded_with_the_old_and_says_so() -> None:
    memory = retry(R2, until=FOREVER)
    memory.refused, memory.previous[A.key] = REFUSED, R1
    made = plan_of(A, wants={"a": R2}, disk=[R1, R2], owned={"a": R1}, memory=memory)
    status = made.statuses[A.key]
    assert made.actions == ()
    assert (status.state, status.revision, status.routed, status.avoid) == (State.LOADED, R1, True, False)
    assert status.message == "it broke"


def test_a_refusal_of_other_content_is_not_held_against_what_is_wanted_now() -> None:
    memory = Memory(refused=REFUSED, previous={A.key: R1})
    made = plan_of(A, wants={"a": R1}, disk=[R1, R2], owned={"a": R1}, memory=memory)
    assert made.statuses[A.key].message == ""


def test_the_refused_revision_is_tried_again_when_the_old_files_are_gone() -> None:
    memory = Memory(refused=REFUSED, previous={A.key: R1})
    seen = world(A, wants={"a": R2}, disk=[R2], memory=memory)
    assert wanted_revision(seen, A) == R2
    assert swaps(plan(seen)) == []


REFUSER = peer("worker-1", entry(A, rev=R1, refused=R2))


def test_nobody_else_starts_with_what_an_engine_refused() -> None:
    """Its own engine has started anew: what served before it serves again."""
    fields: dict[str, Any] = {"targets": {"a": ["worker-1", ME]}, "wants": {"a": R2}, "peers": [REFUSER]}
    again = plan_of(A, **fields, disk=[R1, R2], memory=Memory(previous={A.key: R1}))
    assert [a.revision for a in loads(again)] == [R1]
    fresh = plan_of(A, **fields, disk=[R2])
    status = fresh.statuses[A.key]
    assert fresh.actions == ()
    assert (status.state, status.held, status.avoid) == (State.PENDING, True, False)
    assert "worker-1" in status.message


def test_what_served_here_before_serves_again_whoever_refused_it() -> None:
    fields: dict[str, Any] = {"targets": {"a": ["worker-1", ME]}, "wants": {"a": R2}, "peers": [REFUSER]}
    made = plan_of(A, **fields, disk=[R1, R2], memory=Memory(previous={A.key: R2}))
    assert [a.revision for a in loads(made)] == [R2]


def test_who_refused_and_is_gone_stops_nobody() -> None:
    dead = msgspec.structs.replace(REFUSER, alive=False)
    made = plan_of(A, targets={"a": [ME]}, wants={"a": R2}, disk=[R2], peers=[dead])
    assert [a.revision for a in loads(made)] == [R2]


def test_a_refusal_does_not_outlive_the_source() -> None:
    moved = adapter("a", uri="s3://bucket/elsewhere")
    seen = world(moved, wants={"a": R2}, disk=[R1, R2], memory=Memory(refused=REFUSED, previous={A.key: R1}))
    assert wanted_revision(seen, moved) == R2
