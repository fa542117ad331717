"""What a worker fetches, when, and from whose decision."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.core.memory import FOREVER, Avoid, Memory, Retry, Trial
from sidecar.core.placement import Assignment
from sidecar.core.sight import told_decisions
from sidecar.core.world import Fetch, Plan, Rules
from sidecar.model import Decision, Listing, State

from .worlds import (
    ME,
    NOW,
    R1,
    R2,
    SAID,
    adapter,
    decision,
    entry,
    fetches,
    loads,
    peer,
    plan_of,
    retry,
    state,
)

A = adapter("a")


# -- fetching


def test_the_first_in_rank_reads_the_origin() -> None:
    made = plan_of(A, targets={"a": [ME, "worker-1"]})
    assert made.actions == (Fetch(key=A.key, refresh=0, limit=None),)
    assert state(made, A) == State.DOWNLOADING


def test_others_read_only_small_content_without_the_pools_decision() -> None:
    made = plan_of(A, targets={"a": ["worker-1", ME]})
    assert fetches(made)[0].limit == 16 * 1024 * 1024


def test_big_content_waits_for_the_first_in_rank() -> None:
    memory = Memory(large={A.key: 2**30})
    made = plan_of(A, targets={"a": ["worker-1", ME]}, memory=memory)
    assert made.actions == ()
    assert state(made, A) == State.PENDING
    assert "worker-1" in made.statuses[A.key].message


def coming(source_id: str = A.source_id) -> Decision:
    return msgspec.structs.replace(decision(A, R1), source_id=source_id, revision="")


def ahead(*, source_id: str = A.source_id, alive: bool = True, peer_bytes: bool = True) -> Plan:
    told = msgspec.structs.replace(entry(A, State.DOWNLOADING), coming=coming(source_id))
    return plan_of(
        A,
        targets={"a": ["worker-1", ME]},
        memory=Memory(large={A.key: 2**30}),
        peers=[peer("worker-1", told, alive=alive)],
        rules=Rules(peer_bytes=peer_bytes),
    )


def test_big_content_that_the_first_in_rank_is_reading_comes_from_there_meanwhile() -> None:
    made = ahead()
    assert made.actions == (Fetch(key=A.key, refresh=0, listing=Listing(files=coming().listing), ahead=True),)
    assert state(made, A) == State.PENDING


@pytest.mark.parametrize("other", [{"source_id": "another"}, {"alive": False}, {"peer_bytes": False}])
def test_what_comes_to_a_dead_worker_or_from_another_source_is_not_read_ahead(other: dict[str, Any]) -> None:
    assert ahead(**other).actions == ()


def test_what_is_coming_is_no_decision() -> None:
    told = msgspec.structs.replace(entry(A, State.DOWNLOADING), coming=coming())
    assert told_decisions([peer("worker-1", told)]) == {}


def test_who_becomes_the_first_in_rank_reads_big_content_itself() -> None:
    memory = Memory(large={A.key: 2**30})
    assert fetches(plan_of(A, targets={"a": [ME]}, memory=memory)) == [Fetch(key=A.key, refresh=0)]


def test_the_pools_decision_is_fetched_and_nothing_else() -> None:
    fetch = fetches(plan_of(A, targets={"a": ["worker-1", ME]}, wants={"a": R1}))[0]
    assert fetch.expected == R1
    assert fetch.listing is not None
    assert fetch.listing.files == decision(A, R1).listing


def test_a_decision_without_a_list_of_files_is_read_from_the_origin() -> None:
    made = plan_of(A, decisions={A.key: decision(A, R1, listed=False)})
    assert fetches(made) == [Fetch(key=A.key, refresh=0, expected=R1)]


def test_a_fetch_under_way_is_not_started_again() -> None:
    made = plan_of(A, wants={"a": R1}, busy_fetches={A.key: (5, 10)})
    assert made.actions == ()
    assert state(made, A) == State.DOWNLOADING


def test_a_failed_fetch_waits_and_says_why() -> None:
    made = plan_of(A, memory=retry())
    assert made.actions == ()
    assert state(made, A) == State.FAILED
    assert made.statuses[A.key].message == SAID
    assert made.wake_at == NOW + 30.0


def test_rejected_content_is_not_fetched_again() -> None:
    made = plan_of(A, wants={"a": R1}, memory=retry(R1, until=FOREVER, rejected=True))
    assert made.actions == ()
    assert state(made, A) == State.REJECTED


def test_what_is_loaded_serves_on_while_newer_content_is_fetched() -> None:
    made = plan_of(A, wants={"a": R2}, owned={"a": R1}, disk=[R1])
    assert [f.expected for f in fetches(made)] == [R2]
    assert made.statuses[A.key].state == State.LOADED
    assert made.statuses[A.key].revision == R1
    assert made.statuses[A.key].routed


# -- while the engine is starting


def starting(*targets: str, **fields: Any) -> Plan:
    """A worker that would be a target, were the engines up."""
    hoped = {A.key: Assignment(adapter=A.key, members=3, wanted=len(targets), targets=targets)}
    return plan_of(A, targets={"a": []}, prefetch=hoped, up=False, **fields)


def test_what_it_will_hold_is_fetched_while_the_engine_is_starting() -> None:
    made = starting(ME)
    assert made.actions == (Fetch(key=A.key, refresh=0),)
    assert state(made, A) == State.DOWNLOADING


def test_while_all_engines_are_starting_the_first_in_rank_to_be_decides() -> None:
    assert fetches(starting("worker-1", ME))[0].limit == 16 * 1024 * 1024
    assert starting("worker-1", ME, memory=Memory(large={A.key: 2**30})).actions == ()
    assert [f.expected for f in fetches(starting("worker-1", ME, wants={"a": R1}))] == [R1]


def test_what_is_fetched_waits_for_the_engine_and_says_so() -> None:
    made = starting(ME, wants={"a": R1}, disk=[R1])
    assert made.actions == ()
    assert state(made, A) == State.PENDING
    assert made.statuses[A.key].message == "the engine does not answer"


def test_nothing_is_fetched_early_before_the_peers_have_spoken_or_to_be_avoided() -> None:
    assert starting(ME, settled=False).actions == ()
    made = starting(ME, wants={"a": R1}, quarantined=frozenset({R1}))
    assert made.actions == ()
    assert made.statuses[A.key].avoid


# -- looking for new content


@pytest.mark.parametrize(("since", "due"), [(59.0, False), (60.0, True), (3600.0, True)])
def test_the_first_in_rank_looks_again_on_time(since: float, due: bool) -> None:
    fresh = adapter("a", refresh=60.0)
    d = decision(fresh, R1, refresh=3)
    memory = Memory(refreshed={fresh.source_id: NOW - since})
    made = plan_of(fresh, decisions={fresh.key: d}, disk=[R1], owned={"a": R1}, memory=memory)
    assert fetches(made) == ([Fetch(key=fresh.key, refresh=4, compare=d, trial=True)] if due else [])
    assert due or made.wake_at == NOW + 1.0


def test_only_the_first_in_rank_looks_again() -> None:
    fresh = adapter("a", refresh=60.0)
    made = plan_of(fresh, targets={"a": ["worker-1", ME]}, wants={"a": R1}, disk=[R1], owned={"a": R1})
    assert fetches(made) == []


def test_a_pinned_digest_is_never_looked_for_again() -> None:
    pinned = adapter("a", refresh=60.0, digest=R1)
    memory = Memory(gone={pinned.key: 0})
    made = plan_of(pinned, wants={"a": R1}, disk=[R1], owned={"a": R1}, memory=memory)
    assert fetches(made) == []


def test_the_first_in_rank_decides_anew_when_a_target_cannot_get_the_bytes() -> None:
    other = peer("worker-1", entry(A, State.FAILED, "", gone=True))
    made = plan_of(A, targets={"a": [ME, "worker-1"]}, wants={"a": R1}, peers=[other], disk=[R1], owned={"a": R1})
    assert fetches(made) == [Fetch(key=A.key, refresh=1, trial=True)]


@pytest.mark.parametrize(
    ("disk", "holder", "anew"),
    [([R1], State.LOADED, False), ([], State.LOADED, False), ([], State.FAILED, True), ([R1], State.FAILED, False)],
)
def test_where_workers_read_from_each_other_bytes_are_gone_when_nobody_has_them(
    disk: list[str], holder: State, anew: bool
) -> None:
    peers = [peer("worker-1", entry(A, State.FAILED, "", gone=True)), peer("worker-2", entry(A, holder, R1))]
    made = plan_of(
        A,
        targets={"a": [ME, "worker-1"]},
        wants={"a": R1},
        peers=peers,
        disk=disk,
        memory=Memory(gone={} if disk else {A.key: 0}),
        rules=Rules(peer_bytes=True),
    )
    assert any(f.trial for f in fetches(made)) is anew


def test_bytes_that_are_gone_here_are_decided_anew_by_the_first_in_rank_alone() -> None:
    lost = Memory(gone={A.key: 0})
    assert fetches(plan_of(A, wants={"a": R1}, memory=lost))[0].refresh == 1
    made = plan_of(A, targets={"a": ["worker-1", ME]}, wants={"a": R1}, memory=lost)
    assert [(f.refresh, f.expected) for f in fetches(made)] == [(0, R1)]


def test_a_waiting_retry_does_not_delay_the_decision_about_lost_bytes() -> None:
    memory = retry(R1)
    memory.gone[A.key] = 0
    assert [f.refresh for f in fetches(plan_of(A, wants={"a": R1}, memory=memory))] == [1]


BAD = Trial(source_id=A.source_id, message="no adapter", failures=1, not_before=NOW + 15.0)


def test_new_content_that_is_bad_is_said_and_costs_nothing() -> None:
    memory = Memory(trials={A.key: BAD})
    made = plan_of(A, wants={"a": R1}, disk=[R1], owned={"a": R1}, memory=memory)
    status = made.statuses[A.key]
    assert (status.state, status.routed, status.avoid) == (State.LOADED, True, False)
    assert "no adapter" in status.message
    # The engine forgot everything: what is decided on is loaded again all the same.
    assert len(loads(plan_of(A, wants={"a": R1}, disk=[R1], memory=memory))) == 1


def test_lost_bytes_are_looked_for_with_patience() -> None:
    memory = Memory(trials={A.key: BAD}, gone={A.key: 0})
    other = {"targets": {"a": [ME]}, "wants": {"a": R1}, "memory": memory}
    assert [f.trial for f in fetches(plan_of(A, **other))] == [False]
    assert [f.trial for f in fetches(plan_of(A, **other, now=NOW + 15.0))] == [True]


def test_rejected_content_is_looked_at_again_on_time_by_the_first_in_rank() -> None:
    fresh = adapter("a", refresh=60.0)
    memory = Memory(
        trials={A.key: BAD},
        retries={A.key: Retry(A.source_id, 3, FOREVER, "no adapter", True)},
        refreshed={A.source_id: NOW - 59.0},
    )
    assert plan_of(fresh, memory=memory).actions == ()
    assert fetches(plan_of(fresh, memory=memory, now=NOW + 1.0)) == [Fetch(key=A.key, refresh=0, trial=True)]
    assert plan_of(fresh, targets={"a": ["worker-1", ME]}, memory=memory, now=NOW + 1.0).actions == ()


def test_what_was_rejected_before_the_pool_decided_was_other_content() -> None:
    memory = Memory(
        retries={A.key: Retry(A.source_id, 3, FOREVER, "no adapter", True)},
        avoid={A.key: Avoid(A.source_id, "", FOREVER)},
    )
    undecided = plan_of(A, memory=memory)
    assert undecided.actions == ()
    assert state(undecided, A) == State.REJECTED
    assert undecided.statuses[A.key].avoid
    made = plan_of(A, wants={"a": R1}, memory=memory)
    assert [f.expected for f in fetches(made)] == [R1]
    assert not made.statuses[A.key].avoid
