"""New content under a served name: never at the cost of the old, one worker at a time."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.core.memory import FOREVER, LoadedOnce, Memory, Retry
from sidecar.core.world import Plan, Swap
from sidecar.model import State

from .worlds import ME, NOW, R1, R2, adapter, drained, entry, peer, plan_of, swaps

A = adapter("a")
# The pool wants R2; here R1 is loaded and both lie on the disk.
NEW: dict[str, Any] = {"wants": {"a": R2}, "disk": [R1, R2], "owned": {"a": R1}}
OLD_THERE = peer("worker-1", entry(A))
NEW_THERE = peer("worker-1", entry(A, rev=R2))


def targets(*names: str) -> dict[str, Any]:
    return {"targets": {"a": names}}


def waits(made: Plan) -> bool:
    """It serves the old revision, with its traffic, and does nothing."""
    status = made.statuses[A.key]
    return made.actions == () and (status.state, status.revision, status.routed) == (State.LOADED, R1, True)


def drains(made: Plan) -> bool:
    return made.actions == () and made.statuses[A.key].state == State.DRAINING and not made.statuses[A.key].routed


# -- alone


def test_who_alone_serves_the_name_changes_over_at_once_and_keeps_its_label() -> None:
    made = plan_of(A, **NEW)
    assert made.actions == (Swap(key=A.key, name="a", old=R1, new=R2),)
    assert made.statuses[A.key].state == State.LOADING
    assert made.statuses[A.key].routed
    assert made.drains == {}


def test_the_label_stays_until_the_old_one_is_unloaded() -> None:
    busy: dict[str, Any] = {"busy_names": frozenset({"a"})}
    for more in (busy, busy | {"going": frozenset({"a"})}):
        made = plan_of(A, **NEW, **more)
        assert made.actions == ()
        assert made.statuses[A.key].routed
    between = plan_of(A, wants={"a": R2}, disk=[R1, R2], **busy, going=frozenset({"a"}))
    assert not between.statuses[A.key].routed


def test_who_is_no_target_any_more_ends_the_change_over_that_it_began() -> None:
    going: dict[str, Any] = {"busy_names": frozenset({"a"}), "going": frozenset({"a"})}
    made = plan_of(A, **targets("worker-1"), **NEW, **going)
    assert made.actions == ()
    assert made.statuses[A.key].routed
    assert made.drains == {}
    between = plan_of(A, **targets("worker-1"), wants={"a": R2}, disk=[R1, R2], **going)
    assert between.statuses[A.key].state == State.LOADING
    assert not between.statuses[A.key].routed


@pytest.mark.parametrize(
    "silent",
    [
        peer("worker-1", entry(A), alive=False),
        peer("worker-1", entry(A), up=False),
        peer("worker-1", entry(A), heard=NOW - 10.1),
        peer("worker-1", entry(A, State.REJECTED, "", avoid=True)),
        peer("worker-1"),
    ],
)
def test_who_is_not_known_to_serve_is_not_counted_on(silent: Any) -> None:
    made = plan_of(A, **targets(ME, "worker-1"), **NEW, peers=[silent])
    assert [s.witnesses for s in swaps(made)] == [()]


# -- while another serves


def test_while_another_serves_the_traffic_goes_first() -> None:
    made = plan_of(A, **targets(ME, "worker-1"), **NEW, peers=[OLD_THERE])
    assert drains(made)
    assert made.drains == {"a": NOW}


@pytest.mark.parametrize(("told", "goes"), [(NOW - 4.9, False), (NOW - 5.0, True)])
def test_the_swap_comes_after_the_drain_and_names_its_witnesses(told: float, goes: bool) -> None:
    memory = Memory(drains={"a": told})
    made = plan_of(A, **targets(ME, "worker-1"), **NEW, peers=[OLD_THERE], memory=memory, withdrawn={"a": told})
    assert swaps(made) == ([Swap(key=A.key, name="a", old=R1, new=R2, witnesses=("worker-1",))] if goes else [])


def test_a_swap_under_way_keeps_its_drain() -> None:
    for going in (frozenset[str](), frozenset({"a"})):
        made = plan_of(
            A,
            **targets(ME, "worker-1"),
            **NEW,
            peers=[OLD_THERE],
            busy_names=frozenset({"a"}),
            going=going,
            **drained(since=NOW - 60.0),
        )
        assert made.actions == ()
        assert made.drains == {"a": NOW - 60.0}
        assert not made.statuses[A.key].routed


@pytest.mark.parametrize(
    ("first", "mine"),
    [
        (entry(A), False),
        (entry(A, State.DRAINING), False),
        (entry(A, State.LOADING, R2), False),
        (entry(A, State.LOADED, R2), True),
        # Behind, but it will not come: it fell out of the row.
        (entry(A, State.FAILED, R1), True),
        (entry(A, State.LOADED, R1, avoid=True), True),
    ],
)
def test_the_workers_change_over_in_rank_order(first: Any, mine: bool) -> None:
    made = plan_of(A, **targets("worker-1", ME), **NEW, peers=[peer("worker-1", first)])
    assert waits(made) is not mine
    assert mine or "worker-1" in made.statuses[A.key].message


@pytest.mark.parametrize(
    "later",
    [entry(A, State.DRAINING), entry(A, State.LOADING, R2), entry(A, rev=R2, hidden=True)],
    ids=["draining", "loading", "loaded, and not yet routed to"],
)
def test_nobody_begins_while_another_target_changes(later: Any) -> None:
    peers = [peer("worker-1", later), peer("worker-2", entry(A))]
    made = plan_of(A, **targets(ME, "worker-1", "worker-2"), **NEW, peers=peers)
    assert waits(made)
    assert "worker-1 is changing over" in made.statuses[A.key].message


def test_who_has_begun_goes_on_though_another_began_too() -> None:
    peers = [peer("worker-1", entry(A, State.DRAINING)), peer("worker-2", entry(A))]
    made = plan_of(A, **targets(ME, "worker-1", "worker-2"), **NEW, peers=peers, **drained())
    assert len(swaps(made)) == 1


def test_of_two_that_began_the_later_in_rank_gives_way() -> None:
    peers = [peer("worker-1", entry(A, State.DRAINING)), peer("worker-2", entry(A))]
    made = plan_of(A, **targets("worker-1", ME, "worker-2"), **NEW, peers=peers, **drained())
    assert waits(made)
    assert made.drains == {}


def test_a_dead_target_holds_nobody_up() -> None:
    dead = peer("worker-1", entry(A), alive=False)
    made = plan_of(A, **targets("worker-1", ME, "worker-2"), **NEW, peers=[dead, peer("worker-2", entry(A))])
    assert drains(made)


# -- not now


@pytest.mark.parametrize(
    "unknown", [{"members_fresh": False}, {"adapters_fresh": False}, {"settled": False}, {"isolated": True}]
)
def test_nothing_changes_over_while_not_all_are_in_view(unknown: dict[str, Any]) -> None:
    assert waits(plan_of(A, **NEW, **unknown))


def test_without_an_engine_nothing_changes_over() -> None:
    made = plan_of(A, **NEW, up=False)
    assert made.actions == ()
    assert not made.statuses[A.key].routed


def test_nobody_starts_with_what_another_engine_refused() -> None:
    refused = peer("worker-1", entry(A, rev=R1, refused=R2))
    made = plan_of(A, **targets("worker-1", ME), **NEW, peers=[refused])
    assert waits(made)
    assert "worker-1" in made.statuses[A.key].message
    assert not made.statuses[A.key].avoid


def test_a_refusal_of_other_content_stops_nobody() -> None:
    refused = peer("worker-1", entry(A, rev=R2, refused=R1))
    assert drains(plan_of(A, **targets("worker-1", ME), **NEW, peers=[refused]))


def test_a_failed_change_over_waits_for_its_time() -> None:
    retry = Retry(input=f"{A.source_id}@{R2}", failures=1, not_before=NOW + 9, message="no answer")
    made = plan_of(A, **NEW, memory=Memory(retries={A.key: retry}))
    assert waits(made)
    assert made.statuses[A.key].message == "no answer; tried again at 13:46:49 UTC"
    assert made.wake_at == NOW + 9


def test_who_serves_on_because_another_engine_refused_the_new_content_says_so() -> None:
    # It served the old content before, too: that is what it wants for as long as the new one is refused.
    refused = peer("worker-1", entry(A, rev=R1, refused=R2))
    made = plan_of(A, **targets("worker-1", ME), **NEW, peers=[refused], memory=Memory(previous={A.key: R1}))
    told = made.statuses[A.key]
    assert (told.state, told.revision, told.routed) == (State.LOADED, R1, True)
    assert told.message == "new content waits: the engine of worker-1 refused it"


def test_a_refused_update_is_never_tried_again() -> None:
    retry = Retry(input=f"{A.source_id}@{R2}", failures=1, not_before=FOREVER, message="refused")
    made = plan_of(A, **NEW, memory=Memory(retries={A.key: retry}))
    assert waits(made)
    assert not made.statuses[A.key].avoid


# -- the prefix cache


def guarded(**fields: Any) -> Plan:
    history = [LoadedOnce(process="p1", name="a", revision=R1)]
    base = {"stale_cache": True, "memory": Memory(history=history, **fields)}
    return plan_of(A, **NEW, **base)


def test_an_engine_that_mixes_cached_blocks_is_reset() -> None:
    assert [s.reset for s in swaps(guarded())] == [True]


def test_held_back_the_old_revision_serves_on_and_a_clean_worker_is_asked_for() -> None:
    made = guarded(no_reset={"p1"})
    status = made.statuses[A.key]
    assert waits(made)
    assert status.held
    assert status.avoid
    assert "held back" in status.message


def test_held_back_it_never_begins_to_drain() -> None:
    history = [LoadedOnce(process="p1", name="a", revision=R1)]
    memory = Memory(history=history, no_reset={"p1"}, drains={"a": NOW - 60.0})
    made = plan_of(
        A, **targets(ME, "worker-1"), **NEW, peers=[NEW_THERE], stale_cache=True, memory=memory,
        withdrawn={"a": NOW - 60.0},
    )  # fmt: skip
    assert waits(made)
    assert made.drains == {}
