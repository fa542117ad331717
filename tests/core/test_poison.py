"""Engines that die of an adapter: who is suspected, who is rejected, who is quarantined, and who rests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core import outcome
from sidecar.core.memory import Attempt, Memory, Quarantine
from sidecar.core.poison import (
    blamed,
    engine_died,
    forget,
    rejected_until,
    resting,
    suspected,
    update_quarantine,
)
from sidecar.model import Suspicion

from .worlds import NOW, R1, R2, R3, adapter

A = adapter("a")
HOUR = 3600.0


def attempt(rev: str, ended: float | None = None, started: float = NOW - 100.0) -> Attempt:
    return Attempt(key=A.key, revision=rev, started=started, ended=ended)


@pytest.mark.parametrize(
    ("attempts", "suspect"),
    [
        ([], None),
        ([attempt(R1)], R1),
        ([attempt(R1, NOW - 60.0)], R1),
        ([attempt(R1, NOW - 60.1)], None),
        # Two loads within the minute: neither may be condemned for the other.
        ([attempt(R1, NOW - 30.0), attempt(R2, NOW - 10.0)], None),
        ([attempt(R1, NOW - 90.0), attempt(R2, NOW - 10.0)], R2),
        ([attempt(R1, NOW - 30.0), attempt(R1, NOW - 10.0)], R1),
        # The one in flight is the likeliest.
        ([attempt(R1, NOW - 10.0), attempt(R2)], R2),
        # One is loaded after the other: those that waited behind it were answered by a dead engine.
        ([attempt(R1), attempt(R2), attempt(R3)], R1),
    ],
)
def test_a_death_is_blamed_on_the_load_in_flight_or_the_only_one_in_a_minute(
    attempts: list[Attempt], suspect: str | None
) -> None:
    found = blamed(attempts, NOW)
    assert (found.revision if found else None) == suspect


def test_the_first_death_makes_a_suspect_the_second_a_rejection() -> None:
    memory = Memory(attempts=[attempt(R1)])
    assert engine_died(memory, NOW) == R1
    assert suspected(memory, NOW) == {R1}
    assert rejected_until(memory, R1, NOW) is None
    memory.attempts = [attempt(R1)]
    engine_died(memory, NOW + 700.0)
    assert rejected_until(memory, R1, NOW + 700.0) == NOW + 1300.0
    assert [s.kind for s in memory.suspicions] == ["death", "death", "rejection"]


def test_a_rejection_for_two_deaths_ends_and_each_further_death_doubles_it() -> None:
    """Whatever else ended the engine must not condemn an adapter for ever."""
    memory, now, bans = Memory(), NOW, []
    memory.attempts = [attempt(R1)]
    engine_died(memory, now)
    for _ in range(6):
        memory.attempts = [attempt(R1, started=now)]
        engine_died(memory, now)
        until = rejected_until(memory, R1, now)
        assert until is not None
        bans.append(until - now)
        assert rejected_until(memory, R1, until) is None
        now = until
    assert bans == [600, 1200, 2400, 4800, 7200, 7200]


@pytest.mark.parametrize(("held", "later", "again"), [(600.0, 1.0, False), (599.0, 1.0, True), (1.0, 90_000.0, False)])
def test_after_ten_good_minutes_or_a_day_a_death_is_a_first_one_again(held: float, later: float, again: bool) -> None:
    memory = Memory(banned={R1: Quarantine(until=NOW, step=3)})
    outcome.loaded(memory, A, R1, NOW)
    forget(memory, NOW + held)
    if held == 1.0:
        forget(memory, NOW + later)
    memory.attempts = [attempt(R1, started=NOW + later)]
    engine_died(memory, NOW + held + later)
    assert (rejected_until(memory, R1, NOW + held + later) is not None) is again


def test_a_second_death_long_after_the_first_is_a_first_one_again() -> None:
    memory = Memory(attempts=[attempt(R1)])
    engine_died(memory, NOW)
    memory.attempts = [attempt(R1, started=NOW + 1900)]
    engine_died(memory, NOW + 1900.0)
    assert memory.banned == {}
    assert suspected(memory, NOW + 1900.0) == {R1}


def test_a_death_without_a_load_condemns_nobody() -> None:
    memory = Memory()
    assert engine_died(memory, NOW) is None
    assert memory.suspicions == []


def test_one_load_is_blamed_for_one_death_only() -> None:
    memory = Memory(attempts=[attempt(R1, NOW - 10.0)])
    engine_died(memory, NOW)
    assert engine_died(memory, NOW + 5.0) is None
    assert memory.banned == {}


# -- resting


def test_a_second_death_within_ten_minutes_makes_the_worker_rest() -> None:
    memory = Memory()
    engine_died(memory, NOW)
    assert not resting(memory, NOW)
    engine_died(memory, NOW + 599.0)
    assert resting(memory, NOW + 599.0)
    assert resting(memory, NOW + 599.0 + 599.0)
    assert not resting(memory, NOW + 599.0 + 600.0)


def test_two_deaths_further_apart_do_not() -> None:
    memory = Memory()
    engine_died(memory, NOW)
    engine_died(memory, NOW + 601.0)
    assert not resting(memory, NOW + 601.0)


def test_the_rest_doubles_up_to_two_hours() -> None:
    memory = Memory()
    now, rests = NOW, []
    engine_died(memory, now)
    for _ in range(6):
        now += 1.0
        engine_died(memory, now)
        assert memory.rest is not None
        rests.append(memory.rest.until - now)
    assert rests == [600, 1200, 2400, 4800, 7200, 7200]


# -- quarantine


def seen(*revisions: str, at: float = NOW, kind: str = "death") -> tuple[Suspicion, ...]:
    return tuple(Suspicion(revision=r, kind="rejection" if kind == "rejection" else "death", at=at) for r in revisions)


@pytest.mark.parametrize(
    ("pool", "quarantined"),
    [
        ({"one": seen(R1, R1), "two": seen(R1)}, {R1}),
        ({"one": seen(R1), "two": seen(R1), "three": seen(R1)}, {R1}),
        ({"one": seen(R1), "two": seen(R1)}, set()),
        ({"one": seen(R1, R1, R1, R1)}, set()),
        ({"one": seen(R1, R1), "two": seen(R2)}, set()),
        ({"one": seen(R1) + seen(R1, kind="rejection"), "two": seen(R1)}, {R1}),
        ({"one": seen(R1, R1, at=NOW - 1801.0), "two": seen(R1)}, set()),
        ({"one": seen(R1, R2), "two": seen(R1, R2), "three": seen(R1, R2)}, {R1, R2}),
    ],
)
def test_three_suspicions_of_two_workers_in_half_an_hour_quarantine(
    pool: dict[str, tuple[Suspicion, ...]], quarantined: set[str]
) -> None:
    assert update_quarantine(Memory(), pool, NOW) == quarantined


def test_a_quarantine_ends_after_an_hour_and_comes_back_for_twice_as_long() -> None:
    memory = Memory()
    bad = {"one": seen(R3, R3), "two": seen(R3)}
    assert update_quarantine(memory, bad, NOW) == {R3}
    assert update_quarantine(memory, {}, NOW + HOUR - 1) == {R3}
    assert update_quarantine(memory, {}, NOW + HOUR) == frozenset()
    again = NOW + HOUR
    worse = {"one": seen(R3, R3, at=again), "two": seen(R3, at=again)}
    assert update_quarantine(memory, worse, again) == {R3}
    assert update_quarantine(memory, {}, again + 2 * HOUR - 1) == {R3}
    assert update_quarantine(memory, {}, again + 2 * HOUR) == frozenset()


def test_a_quarantine_never_lasts_longer_than_a_day() -> None:
    memory, now = Memory(), NOW
    for _ in range(8):
        update_quarantine(memory, {"one": seen(R1, R1, at=now), "two": seen(R1, at=now)}, now)
        last = memory.quarantine[R1].until - now
        now = memory.quarantine[R1].until
    assert last == 86_400.0


def test_the_same_suspicions_do_not_prolong_a_quarantine() -> None:
    memory = Memory()
    bad = {"one": seen(R1, R1), "two": seen(R1)}
    for later in (0.0, 100.0, 1000.0):
        update_quarantine(memory, bad, NOW + later)
    assert memory.quarantine[R1].until == NOW + HOUR


def test_who_comes_later_finds_the_same_quarantine() -> None:
    """The votes are told for as long as it lasts."""
    told = {name: Memory(suspicions=list(seen(R3, R3))) for name in ("one", "two")}
    pool = {name: tuple(memory.suspicions) for name, memory in told.items()}
    later = NOW + HOUR - 60.0
    for memory in told.values():
        update_quarantine(memory, pool, NOW)
        forget(memory, later)
    kept = {name: tuple(memory.suspicions) for name, memory in told.items()}
    newcomer = Memory()
    assert update_quarantine(newcomer, kept, later) == {R3}
    assert update_quarantine(newcomer, kept, NOW + HOUR) == frozenset()
    for memory in told.values():
        update_quarantine(memory, pool, NOW + HOUR)
        forget(memory, NOW + HOUR)
        assert memory.suspicions == []


def test_votes_further_apart_than_half_an_hour_do_not_add_up_whenever_they_are_heard() -> None:
    pool = {"one": seen(R1, at=NOW) + seen(R1, at=NOW + 1000.0), "two": seen(R1, at=NOW + 1801.0)}
    assert update_quarantine(Memory(), pool, NOW + 1801.0) == frozenset()


def test_three_new_votes_during_a_quarantine_double_it() -> None:
    memory = Memory()
    first = {"one": seen(R1, R1), "two": seen(R1)}
    update_quarantine(memory, first, NOW)
    more = {n: s + seen(R1, R1, at=NOW + 600.0) for n, s in first.items()}
    update_quarantine(memory, more, NOW + 600.0)
    assert memory.quarantine[R1].until == NOW + 600.0 + 2 * HOUR


def test_a_clock_that_is_ahead_does_not_prolong_a_quarantine() -> None:
    memory = Memory()
    bad = {"one": seen(R1, R1), "two": seen(R1, at=NOW + 300.0)}
    for later in (0.0, 100.0, 1000.0):
        update_quarantine(memory, bad, NOW + later)
    assert memory.quarantine[R1].until == NOW + HOUR


VOTES = st.lists(st.tuples(st.sampled_from(["one", "two", "three"]), st.integers(0, 50)), max_size=8)


@given(VOTES)
def test_a_quarantine_follows_the_literal_rule(votes: list[tuple[str, int]]) -> None:
    """Three by at least two workers within any half hour, whatever the order in which they are told."""
    pool: dict[str, tuple[Suspicion, ...]] = {}
    for worker, minutes in votes:
        pool[worker] = (*pool.get(worker, ()), *seen(R1, at=NOW + 60.0 * minutes))
    literal = any(
        len(within) >= 3 and len({w for w, _ in within}) >= 2
        for _, end in votes
        if (within := [(w, m) for w, m in votes if end - 30 <= m <= end])
    )
    assert (update_quarantine(Memory(), pool, NOW + 3000.0) == {R1}) is literal


@given(VOTES)
def test_votes_that_come_one_after_the_other_say_what_they_say_at_once(votes: list[tuple[str, int]]) -> None:
    at_once, piecemeal = Memory(), Memory()
    pool: dict[str, tuple[Suspicion, ...]] = {}
    for worker, minutes in sorted(votes, key=lambda v: v[1]):
        now = NOW + 60.0 * minutes
        pool[worker] = (*pool.get(worker, ()), *seen(R1, at=now))
        if len([v for v in votes if v[1] == minutes]) == 1:
            update_quarantine(piecemeal, pool, now)
    now = NOW + 3000.0
    assert update_quarantine(piecemeal, pool, now) == update_quarantine(at_once, pool, now)
    assert piecemeal.quarantine == at_once.quarantine


# -- with what the agent notes of its loads


def test_a_load_that_kills_the_engine_is_blamed_after_a_restart_of_the_agent_too() -> None:
    memory = Memory()
    outcome.load_begins(memory, A.key, "a", R1, "p", NOW)
    assert engine_died(memory, NOW + 100.0) == R1


def test_a_load_that_ended_long_ago_is_not_blamed() -> None:
    memory = Memory()
    outcome.load_begins(memory, A.key, "a", R1, "p", NOW)
    outcome.load_ended(memory, A.key, R1, NOW + 1.0)
    assert engine_died(memory, NOW + 62.0) is None
