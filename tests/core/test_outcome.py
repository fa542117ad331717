"""What the agent remembers of what happened, and for how long."""

from __future__ import annotations

import pytest

from sidecar.core import outcome
from sidecar.core.memory import FOREVER, Attempt, Held, LoadedOnce, Memory, refused_revision
from sidecar.core.plan import plan
from sidecar.core.retry import Backoff
from sidecar.model import Adapter, Listing, Source, State

from .worlds import ME, NOW, R1, R2, R3, adapter, decision, world

A = adapter("a", drain_seconds=7)
B = adapter("b")
MOVED = adapter("a", uri="s3://bucket/elsewhere")


def fail(memory: Memory, times: int = 1, rev: str = R1, now: float = NOW) -> None:
    for _ in range(times):
        outcome.failed(memory, A, rev, "it broke", outcome.LOAD, now, 1.0)


# -- failures


def test_failures_in_a_row_wait_longer_and_longer() -> None:
    memory, waits = Memory(), []
    for _ in range(7):
        fail(memory)
        waits.append(memory.retries[A.key].not_before - NOW)
    assert waits == [1, 3, 9, 27, 81, 243, 300]


@pytest.mark.parametrize(
    "backoff", [outcome.FETCH, outcome.DENIED, outcome.DENIED_SECRET, outcome.LOAD, outcome.SCARCE]
)
def test_every_wait_is_jittered_and_has_a_cap(backoff: Backoff) -> None:
    assert 0 < backoff.delay(1, 0.0) < backoff.delay(1, 1.0)
    assert backoff.delay(10_000, 1.0) == backoff.cap <= 900


@pytest.mark.parametrize(("secret", "longest"), [(None, 600.0), ("s3-credentials", 60.0)])
def test_who_grants_a_role_or_rotates_a_key_waits_a_minute_at_most(secret: str | None, longest: float) -> None:
    source = Source(uri="s3://bucket/a", secret=secret)
    memory, private = Memory(), adapter("a", source=source)
    for _ in range(50):
        outcome.failed(memory, private, "", "denied", outcome.denied(private), NOW, 1.0)
        outcome.trial_failed(memory, private, "denied", None, NOW, 1.0)
    assert memory.retries[private.key].not_before == memory.trials[private.key].not_before == NOW + longest


def test_the_third_failure_in_a_row_asks_to_be_passed_over() -> None:
    memory = Memory()
    fail(memory, 2)
    assert memory.avoid == {}
    fail(memory)
    assert memory.avoid[A.key].until == NOW + 600.0
    assert memory.avoid[A.key].revision == R1


def test_asking_to_be_passed_over_doubles_up_to_two_hours() -> None:
    memory, lasted = Memory(), []
    for _ in range(6):
        fail(memory, 3)
        lasted.append(memory.avoid[A.key].until - NOW)
    assert lasted == [600, 1200, 2400, 4800, 7200, 7200]


def test_a_new_source_begins_anew() -> None:
    memory = Memory()
    fail(memory, 3)
    outcome.failed(memory, MOVED, "", "it broke", outcome.LOAD, NOW, 1.0)
    assert memory.retries[A.key].failures == 1
    fail(memory, 2)
    assert memory.retries[A.key].failures == 2


def test_one_adapters_failures_are_not_anothers() -> None:
    memory = Memory()
    fail(memory, 3)
    assert B.key not in memory.avoid
    assert B.key not in memory.retries


def test_a_rejection_is_for_ever() -> None:
    memory = Memory()
    outcome.rejected(memory, A, R1, "rank 64 is above 16")
    assert memory.retries[A.key].not_before == FOREVER
    assert memory.retries[A.key].rejected
    assert memory.avoid[A.key].until == FOREVER


# -- content


@pytest.mark.parametrize(
    ("before", "now", "again"),
    [("rank 8", "rank 16", True), ("rank 8", "rank 8", False), ("", "rank 8", False), ("rank 8", "", False)],
)
def test_with_other_limits_what_was_rejected_is_looked_at_again(before: str, now: str, again: bool) -> None:
    memory = Memory(limits=before)
    outcome.rejected(memory, A, R1, "the rank is 16, the limit 8")
    outcome.trial_failed(memory, A, "no adapter", Listing(files=decision(A, R2).listing), NOW, 1.0)
    outcome.judged_by(memory, now)
    assert memory.limits == (now or before)
    held = plan(world(A, targets={"a": ["worker-1"]}, wants={"a": R1}, memory=memory)).statuses.get(A.key)
    assert (held is None or not held.avoid) is again
    fetched = plan(world(A, wants={"a": R1}, memory=memory)).actions
    assert bool(fetched) is again
    assert bool(memory.trials) is not again


def test_other_limits_say_nothing_about_failures() -> None:
    memory = Memory(limits="rank 8")
    fail(memory, 3)
    outcome.judged_by(memory, "rank 16")
    assert A.key in memory.retries
    assert A.key in memory.avoid


def test_fetched_content_is_decided_and_its_failures_are_over() -> None:
    memory = Memory(gone={A.key: 0}, large={A.key: 5})
    outcome.failed(memory, A, "", "no connection", outcome.FETCH, NOW, 1.0)
    found = decision(A, R1)
    outcome.fetched(memory, A, found, NOW + 5)
    assert memory.decisions == {A.source_id: found}
    assert memory.refreshed == {A.source_id: NOW + 5}
    assert (memory.gone, memory.large, memory.retries) == ({}, {}, {})


def test_fetching_again_does_not_forget_that_the_engine_rejects_it() -> None:
    memory = Memory()
    outcome.rejected(memory, A, R1, "rank 64 is above 16")
    outcome.fetched(memory, A, decision(A, R1), NOW)
    assert memory.retries[A.key].rejected


def test_other_content_is_tried_at_once() -> None:
    memory = Memory()
    fail(memory)
    outcome.fetched(memory, A, decision(A, R2, refresh=1), NOW)
    assert A.key not in memory.retries


def test_an_older_decision_does_not_replace_a_newer_one() -> None:
    memory = Memory()
    outcome.adopt(memory, decision(A, R2, refresh=2))
    outcome.adopt(memory, decision(A, R1, refresh=1))
    outcome.fetched(memory, A, decision(A, R1, refresh=1), NOW)
    assert memory.decisions[A.source_id].refresh == 2


def test_a_failed_look_for_new_content_says_nothing_against_what_is_decided_on() -> None:
    memory = Memory()
    outcome.fetched(memory, A, decision(A, R1), NOW)
    found = Listing(files=decision(A, R2).listing)
    outcome.trial_failed(memory, A, "no adapter", found, NOW + 60, 1.0)
    assert (memory.retries, memory.avoid) == ({}, {})
    assert memory.decisions[A.source_id].revision == R1
    assert memory.refreshed[A.source_id] == NOW + 60
    assert memory.trials[A.key].listing == found


def test_failed_looks_in_a_row_wait_longer() -> None:
    memory, waits = Memory(), []
    for _ in range(8):
        outcome.trial_failed(memory, A, "no connection", None, NOW, 1.0)
        waits.append(memory.trials[A.key].not_before - NOW)
    assert waits == [15, 30, 60, 120, 240, 480, 600, 600]


@pytest.mark.parametrize("end", ["nothing new", "new content"])
def test_a_look_that_goes_well_ends_the_failures(end: str) -> None:
    memory = Memory()
    outcome.trial_failed(memory, A, "no adapter", None, NOW, 1.0)
    if end == "nothing new":
        outcome.nothing_new(memory, A, NOW + 60)
    else:
        outcome.fetched(memory, A, decision(A, R2, refresh=1), NOW + 60)
    assert memory.trials == {}
    assert memory.refreshed[A.source_id] == NOW + 60


# -- loads


def test_a_load_that_was_never_sent_is_blamed_for_nothing() -> None:
    memory = Memory()
    outcome.load_begins(memory, B.key, "b", R2, "p1", NOW - 90)
    outcome.load_ended(memory, B.key, R2, NOW - 89)
    outcome.load_begins(memory, A.key, "a", R1, "p1", NOW)
    outcome.load_unsent(memory, A.key, R1)
    assert [a.revision for a in memory.attempts] == [R2]


def test_what_the_engine_died_of_stays_so_when_the_next_load_does_not_reach_it() -> None:
    memory = Memory()
    outcome.load_begins(memory, A.key, "a", R1, "p1", NOW)
    outcome.load_begins(memory, A.key, "a", R1, "p1", NOW + 1)
    outcome.load_unsent(memory, A.key, R1)
    assert [(a.started, a.ended) for a in memory.attempts] == [(NOW, None)]


def test_an_engine_out_of_reach_is_no_failure_of_the_adapter() -> None:
    memory = Memory()
    for i in range(9):
        outcome.put_off(memory, A, R1, "no connection", NOW + i)
    assert memory.avoid == {}
    assert memory.retries[A.key].not_before == NOW + 9
    fail(memory, 2)
    outcome.put_off(memory, A, R1, "no connection", NOW)
    assert memory.retries[A.key].failures == 2
    fail(memory)
    assert A.key in memory.avoid


def test_a_load_is_remembered_before_it_is_tried() -> None:
    memory = Memory()
    outcome.load_begins(memory, A.key, "a", R1, "p1", NOW)
    assert memory.history == [LoadedOnce(process="p1", name="a", revision=R1)]
    assert memory.attempts[0].ended is None
    outcome.load_begins(memory, A.key, "a", R1, "p1", NOW + 1)
    assert len(memory.history) == 1


def test_a_success_ends_all_failures() -> None:
    memory = Memory(unloaded={R1: NOW - 10})
    fail(memory, 3)
    outcome.loaded(memory, A, R1, NOW)
    assert (memory.retries, memory.avoid, memory.unloaded) == ({}, {}, {})
    assert memory.previous == {A.key: R1}
    assert memory.drain_seconds == {"a": 7}
    assert memory.held == {A.key: Held(R1, NOW)}


def test_the_old_revision_back_does_not_forget_what_was_refused() -> None:
    memory = Memory()
    outcome.loaded(memory, A, R1, NOW)
    outcome.update_refused(memory, A, R2, "refused")
    outcome.loaded(memory, A, R1, NOW)
    assert refused_revision(memory, A) == R2
    assert memory.retries[A.key].message == "refused"
    assert memory.previous == {A.key: R1}
    assert memory.avoid == {}


@pytest.mark.parametrize("after", [A, MOVED])
def test_later_content_that_loads_ends_the_story_of_a_refusal(after: Adapter) -> None:
    memory = Memory()
    outcome.loaded(memory, A, R1, NOW)
    outcome.update_refused(memory, A, R2, "refused")
    outcome.loaded(memory, A, R1, NOW)
    outcome.loaded(memory, after, R3, NOW)
    assert (memory.refused, memory.retries) == ({}, {})
    told = plan(world(after, wants={"a": R3}, disk=[R3], owned={"a": R3}, memory=memory)).statuses[A.key]
    assert told.message == ""


def test_a_refusal_is_not_held_against_another_source() -> None:
    memory = Memory()
    outcome.update_refused(memory, A, R2, "refused")
    assert refused_revision(memory, MOVED) == ""


def test_an_unloaded_revision_is_remembered_for_its_files() -> None:
    memory = Memory()
    outcome.unloaded(memory, R1, NOW)
    assert memory.unloaded == {R1: NOW}


# -- forgetting


def full() -> Memory:
    memory = Memory()
    outcome.loaded(memory, A, R1, NOW)
    outcome.update_refused(memory, A, R2, "refused")
    fail(memory, 3)
    outcome.fetched(memory, A, decision(A, R1), NOW)
    outcome.trial_failed(memory, A, "no adapter", None, NOW, 1.0)
    memory.gone[A.key] = 0
    memory.large[A.key] = 1
    memory.unloaded[R3] = NOW
    return memory


def test_what_belongs_to_no_adapter_is_forgotten() -> None:
    memory = full()
    outcome.forget(memory, {}, NOW, 600.0)
    for table in (
        "avoid",
        "retries",
        "previous",
        "held",
        "refused",
        "gone",
        "trials",
        "large",
        "decisions",
        "refreshed",
    ):
        assert getattr(memory, table) == {}, table


def test_what_belongs_to_an_adapter_stays() -> None:
    memory, before = full(), full()
    outcome.forget(memory, {A.key: A}, NOW, 600.0)
    assert memory == before


def test_a_new_source_ends_retries_and_the_wish_to_be_passed_over() -> None:
    memory = full()
    outcome.forget(memory, {A.key: MOVED}, NOW, 600.0)
    assert (memory.retries, memory.avoid, memory.decisions, memory.refused, memory.trials) == ({}, {}, {}, {}, {})
    assert memory.previous == {A.key: R1}


@pytest.mark.parametrize(("age", "kept"), [(599.0, True), (600.0, False)])
def test_an_unload_is_remembered_for_ten_minutes(age: float, kept: bool) -> None:
    memory = Memory(unloaded={R1: NOW - age})
    outcome.forget(memory, {}, NOW, 600.0)
    assert (R1 in memory.unloaded) is kept


@pytest.mark.parametrize(("ended", "kept"), [(None, True), (NOW - 599.0, True), (NOW - 600.0, False)])
def test_a_load_keeps_its_files_for_as_long_whether_another_follows_or_not(ended: float | None, kept: bool) -> None:
    memory = Memory(attempts=[Attempt(key=A.key, revision=R1, started=NOW - 700.0, ended=ended)])
    outcome.forget(memory, {}, NOW, 600.0)
    assert bool(memory.attempts) is kept


def test_avoiding_ends_by_itself_and_is_told_while_no_target() -> None:
    memory = Memory()
    fail(memory, 3)
    seen = world(A, targets={"a": ["worker-1"]}, wants={"a": R1}, memory=memory)
    told = plan(seen).statuses[A.key]
    assert (told.avoid, told.state, told.message) == (True, State.FAILED, "it broke; tried again at 13:56:40 UTC")
    later = world(A, targets={"a": ["worker-1"]}, wants={"a": R1}, memory=memory, now=NOW + 600.0)
    assert A.key not in plan(later).statuses
    target = world(A, targets={"a": [ME]}, wants={"a": R1}, memory=memory, now=NOW + 600.0, disk=[R1])
    assert not plan(target).statuses[A.key].avoid


def test_new_content_is_not_avoided_for_the_old() -> None:
    memory = Memory()
    fail(memory, 3)
    seen = world(A, targets={"a": ["worker-1"]}, wants={"a": R2}, memory=memory)
    assert A.key not in plan(seen).statuses
