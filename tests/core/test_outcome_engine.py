"""What the agent remembers of an engine process: its cache, its loads, and since when it has had what."""

from __future__ import annotations

import pytest

from sidecar.core import outcome
from sidecar.core.memory import Held, LoadedOnce, Memory
from sidecar.core.poison import proven

from .worlds import NOW, R1, R2, adapter

A = adapter("a")


# -- another engine process


def test_a_new_process_has_nothing_cached() -> None:
    memory = Memory(process="p1", history=[LoadedOnce("p1", "a", R1)], no_reset={"p1"}, drains={"a": NOW})
    outcome.engine_restarted(memory, "p2", NOW)
    assert (memory.process, memory.history, memory.no_reset, memory.drains) == ("p2", [], set(), {})


def test_while_the_process_is_unknown_the_history_counts() -> None:
    past = [LoadedOnce("p1", "a", R1)]
    memory = Memory(process="p1", history=past)
    outcome.engine_restarted(memory, None, NOW)
    assert memory.history == past
    assert memory.process == "p1"


def test_the_same_process_has_kept_its_cache() -> None:
    past = [LoadedOnce("p1", "a", R1)]
    memory = Memory(process="p1", history=past)
    outcome.engine_restarted(memory, "p1", NOW)
    assert memory.history == past


@pytest.mark.parametrize("process", ["p1", None])
def test_a_new_agent_takes_loads_of_its_predecessor_as_over(process: str | None) -> None:
    memory = Memory(process="p1")
    outcome.load_begins(memory, A.key, "a", R1, "p1", NOW)
    outcome.agent_started(memory, process, NOW + 5)
    assert [a.ended for a in memory.attempts] == [NOW + 5]
    assert memory.history == [LoadedOnce("p1", "a", R1)]


def test_a_new_agent_beside_a_new_engine_blames_nobody() -> None:
    memory = Memory(process="p1")
    outcome.load_begins(memory, A.key, "a", R1, "p1", NOW)
    outcome.agent_started(memory, "p2", NOW + 5)
    assert (memory.attempts, memory.history, memory.process) == ([], [], "p2")


# -- since when something has been loaded


def test_the_same_revision_loaded_again_goes_on_counting_and_another_begins_anew() -> None:
    memory = Memory()
    outcome.loaded(memory, A, R1, NOW)
    outcome.loaded(memory, A, R1, NOW + 5)
    assert memory.held == {A.key: Held(R1, NOW)}
    outcome.loaded(memory, A, R2, NOW + 6)
    assert memory.held == {A.key: Held(R2, NOW + 6)}


def test_what_the_engine_is_found_with_counts_from_then_on() -> None:
    memory = Memory()
    outcome.found_loaded(memory, {A.key: R1}, NOW)
    outcome.found_loaded(memory, {A.key: R1}, NOW + 5)
    assert memory.held == {A.key: Held(R1, NOW)}


def test_what_was_handed_over_begins_anew() -> None:
    memory = Memory()
    outcome.loaded(memory, A, R1, NOW)
    outcome.let_go(memory, A.key)
    assert memory.held == {}


@pytest.mark.parametrize(("seconds", "kept"), [(599.0, False), (600.0, True), (5000.0, True)])
def test_only_what_was_loaded_for_long_when_the_engine_was_lost_has_proved_anything(seconds: float, kept: bool) -> None:
    memory = Memory()
    outcome.loaded(memory, A, R1, NOW)
    outcome.engine_restarted(memory, "p2", NOW + seconds)
    assert (A.key in memory.held) is kept
    assert proven(memory, A.key, R1, NOW + 10_000.0) is kept
