"""Killed after any step, forgetting all that was not saved, and started again: the same end state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.core.memory import Memory, Quarantine
from sidecar.model import State

from .one_worker import PROCESS, OneWorker, states
from .worlds import ME, NOW, R1, R2, adapter, decision, entry, peer

A, B, C = adapter("a", drain_seconds=2), adapter("b"), adapter("c", served_name="Team/c")
NEW = adapter("a", uri="s3://bucket/new", drain_seconds=2)
CONTENTS = {"s3://bucket/a": "1", "s3://bucket/b": "b", "s3://bucket/c": "c", "s3://bucket/new": "2"}


def kept(*, previous: str = R1, **fields: Any) -> Memory:
    """The memory of a worker that has had R1 loaded for A."""
    return Memory(
        process=PROCESS,
        decisions={A.source_id: decision(A, R1)},
        previous={A.key: previous},
        drain_seconds={"a": 2},
        **fields,
    )


def facts(**fields: Any) -> Callable[[OneWorker], dict[str, Any]]:
    """The same facts all the time; peers speak anew each moment."""

    def now(worker: OneWorker) -> dict[str, Any]:
        peers = [peer(n, *entries, heard=worker.now) for n, entries in fields.get("peers", {}).items()]
        return {**fields, "peers": peers}

    return now


def cold_start() -> OneWorker:
    return OneWorker([A, B, C], facts(), contents=CONTENTS)


def update_alone() -> OneWorker:
    return OneWorker([NEW], facts(), engine={"a": R1}, disk={R1}, memory=kept(), contents=CONTENTS)


def update_beside_another() -> OneWorker:
    others = facts(targets={"a": [ME, "worker-1"]}, peers={"worker-1": [entry(A)]})
    return OneWorker([NEW], others, engine={"a": R1}, disk={R1}, memory=kept(), contents=CONTENTS)


def refused_update() -> OneWorker:
    return OneWorker(
        [NEW], facts(), engine={"a": R1}, disk={R1}, memory=kept(), contents=CONTENTS, refuses=frozenset({R2})
    )


def refused_update_beside_another() -> OneWorker:
    made = update_beside_another()
    made.refuses = frozenset({R2})
    return made


def poisoned_update() -> OneWorker:
    """The engine has died of the new content, twice, and started anew."""
    memory = kept(banned={R2: Quarantine(until=NOW + 7200.0, step=0)})
    return OneWorker([NEW], facts(), disk={R1, R2}, memory=memory, contents=CONTENTS)


def handover() -> OneWorker:
    there = facts(targets={"a": ["worker-1"]}, peers={"worker-1": [entry(A)]})
    return OneWorker([A], there, engine={"a": R1}, disk={R1}, memory=kept(), contents=CONTENTS)


def taking_over() -> OneWorker:
    wanted = facts(peers={"worker-1": [entry(A, State.LOADED, decision=decision(A, R1))]})
    return OneWorker([A], wanted, contents=CONTENTS)


def deletion() -> OneWorker:
    return OneWorker([], facts(), engine={"a": R1}, disk={R1}, memory=kept())


def wanted_nowhere() -> OneWorker:
    nowhere = facts(targets={"a": []}, unmatched=frozenset({A.key}))
    return OneWorker([A], nowhere, engine={"a": R1}, disk={R1}, memory=kept(), contents=CONTENTS)


def renamed() -> OneWorker:
    new = adapter("a", served_name="new", drain_seconds=2)
    return OneWorker([new], facts(), engine={"a": R1}, disk={R1}, memory=kept(), contents=CONTENTS)


def pushed_out() -> OneWorker:
    full = facts(targets={"a": [], "b": [ME]}, waiting={"a": [ME]})
    return OneWorker([A, B], full, engine={"a": R1}, disk={R1}, memory=kept(), contents=CONTENTS)


def engine_forgot() -> OneWorker:
    return OneWorker([A], facts(), disk={R1}, memory=kept(), contents=CONTENTS)


def prefix_cache_reset() -> OneWorker:
    memory = kept()
    memory.history = []
    return OneWorker([NEW], facts(stale_cache=True), engine={"a": R1}, disk={R1}, memory=memory, contents=CONTENTS)


STORIES = [
    cold_start,
    update_alone,
    update_beside_another,
    refused_update,
    refused_update_beside_another,
    poisoned_update,
    handover,
    taking_over,
    deletion,
    wanted_nowhere,
    renamed,
    pushed_out,
    engine_forgot,
    prefix_cache_reset,
]
# What the engine holds in the end, uninterrupted.
ENDS: dict[str, dict[str, str]] = {
    "update_alone": {"a": R2},
    "update_beside_another": {"a": R2},
    "refused_update": {"a": R1},
    "refused_update_beside_another": {"a": R1},
    "poisoned_update": {"a": R1},
    "handover": {},
    "taking_over": {"a": R1},
    "deletion": {},
    "wanted_nowhere": {},
    "renamed": {"new": R1},
    "engine_forgot": {"a": R1},
    "prefix_cache_reset": {"a": R2},
}


@pytest.mark.parametrize("story", STORIES)
def test_killed_after_any_step_it_comes_to_the_same_end(story: Callable[[], OneWorker]) -> None:
    whole = story()
    end = whole.run()
    assert whole.steps > 0
    if story.__name__ in ENDS:
        assert end["engine"] == ENDS[story.__name__]
    for step in range(1, whole.steps + 1):
        again = story()
        assert again.run(frozenset({step})) == end, f"killed after step {step}: {again.log}"


@pytest.mark.parametrize("story", STORIES)
def test_killed_twice_it_comes_to_the_same_end(story: Callable[[], OneWorker]) -> None:
    whole = story()
    end = whole.run()
    for steps in itertools.combinations(range(1, whole.steps + 3), 2):
        again = story()
        assert again.run(frozenset(steps)) == end, f"killed after {steps}: {again.log}"


def test_a_cold_start_loads_all() -> None:
    end = cold_start().run()
    assert sorted(end["engine"]) == ["Team/c", "a", "b"]
    assert set(states(end).values()) == {State.LOADED}


def test_pushed_out_it_makes_room_for_what_comes_first() -> None:
    end = pushed_out().run()
    assert sorted(end["engine"]) == ["b"]
    assert states(end) == {"a": State.WAITING, "b": State.LOADED}


def test_a_refused_update_is_said_and_not_tried_again() -> None:
    worker = refused_update()
    end = worker.run()
    assert end["told"][A.key] == (State.LOADED, R1, True, False)
    assert len([line for line in worker.log if "Swap" in line]) == 1
    assert worker.now > NOW


def test_the_second_look_precedes_every_handover() -> None:
    worker = handover()
    worker.run()
    (unload,) = [line for line in worker.log if "Unload" in line]
    assert float(unload.split()[0]) >= 3.0
