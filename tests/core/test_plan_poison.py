"""What a worker does about content that engines die of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.memory import PROVEN_SECONDS, Held, Memory, Quarantine
from sidecar.core.plan import plan
from sidecar.core.world import Swap, Unload, World
from sidecar.model import Entry, State, Suspicion

from .random_worlds import WORLDS
from .worlds import (
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
    unloads,
)

A = adapter("a")
B = adapter("b")
BANNED = Quarantine(until=NOW + 30.0, step=0)
# 30 seconds after NOW.
AGAIN = "tried again at 13:47:10 UTC"


def suspicion(rev: str, kind: str = "death", at: float = NOW - 1) -> Suspicion:
    return msgspec.convert({"revision": rev, "kind": kind, "at": at}, Suspicion)


def test_a_suspect_is_loaded_after_everything_else_and_alone() -> None:
    memory = Memory(suspicions=[suspicion(R1)])
    both = plan_of(A, B, wants={"a": R1, "b": R2}, disk=[R1, R2], memory=memory)
    assert [a.name for a in loads(both)] == ["b"]
    assert state(both, A) == State.LOADING
    busy = plan_of(A, B, wants={"a": R1, "b": R2}, disk=[R1, R2], busy_names=frozenset({"b"}), memory=memory)
    assert loads(busy) == []
    last = plan_of(A, B, wants={"a": R1, "b": R2}, disk=[R1, R2], owned={"b": R2}, memory=memory)
    assert [a.name for a in loads(last)] == ["a"]


def test_of_two_suspects_one_is_loaded_at_a_time() -> None:
    memory = Memory(suspicions=[suspicion(R1), suspicion(R2)])
    assert len(loads(plan_of(A, B, wants={"a": R1, "b": R2}, disk=[R1, R2], memory=memory))) == 1


def test_an_old_suspicion_is_forgotten() -> None:
    memory = Memory(suspicions=[suspicion(R1, at=NOW - 1801)])
    assert len(loads(plan_of(A, B, wants={"a": R1, "b": R2}, disk=[R1, R2], memory=memory))) == 2


def shut_out(rev: str, why: str) -> dict[str, Any]:
    """Fields of a world in which `rev` may not be newly loaded here."""
    if why == "rejected":
        return {"memory": Memory(banned={rev: BANNED})}
    return {"memory": Memory(quarantine={rev: BANNED}), "quarantined": frozenset({rev})}


@pytest.mark.parametrize("why", ["rejected", "quarantined"])
def test_poison_is_not_loaded_and_asks_to_be_passed_over(why: str) -> None:
    fields: dict[str, Any] = {"wants": {"a": R1}, "disk": [R1], **shut_out(R1, why)}
    made = plan_of(A, **fields)
    assert made.actions == ()
    assert state(made, A) == State.REJECTED
    assert made.statuses[A.key].avoid
    assert AGAIN in made.statuses[A.key].message
    assert made.wake_at == NOW + 30.0
    # Passed over, it still says so: else it would become a target again, and so on for ever.
    passed_over = plan_of(A, targets={"a": ["worker-1"]}, **fields)
    assert passed_over.statuses[A.key].avoid
    assert AGAIN in passed_over.statuses[A.key].message
    assert passed_over.wake_at == NOW + 30.0


def test_who_died_of_it_twice_tries_it_again_when_its_time_has_come() -> None:
    """Something else may have ended the engine: nothing condemns content for ever."""
    memory = Memory(banned={R1: Quarantine(until=NOW, step=0)})
    made = plan_of(A, wants={"a": R1}, disk=[R1], memory=memory)
    assert [a.revision for a in loads(made)] == [R1]
    assert not made.statuses[A.key].avoid


def test_quarantined_new_content_leaves_the_old_serving() -> None:
    made = plan_of(A, wants={"a": R2}, disk=[R1, R2], owned={"a": R1}, quarantined=frozenset({R2}))
    assert made.actions == ()
    status = made.statuses[A.key]
    assert (status.state, status.revision, status.routed, status.avoid) == (State.LOADED, R1, True, False)
    assert "quarantined" in status.message


# -- what is loaded when a quarantine comes

YOUNG = {A.key: Held(R1, NOW - PROVEN_SECONDS + 1.0)}
OLD = {A.key: Held(R1, NOW - PROVEN_SECONDS)}
QUARANTINE: dict[str, Any] = {"wants": {"a": R1}, "disk": [R1], "quarantined": frozenset({R1})}


@pytest.mark.parametrize("held", [YOUNG, OLD])
def test_a_copy_that_serves_stays_in_quarantine(held: dict[str, Held]) -> None:
    made = plan_of(A, owned={"a": R1}, **drained(memory=Memory(held=held)), **QUARANTINE)
    status = made.statuses[A.key]
    assert made.actions == ()
    assert made.drains == {}
    assert (status.state, status.routed, status.avoid) == (State.LOADED, True, False)
    assert "quarantined" in status.message


@pytest.mark.parametrize("held", [YOUNG, OLD])
def test_the_last_copy_stays_in_quarantine_where_it_is_wanted_no_longer(held: dict[str, Held]) -> None:
    others = [peer("worker-1", entry(A, State.REJECTED, avoid=True))]
    memory = Memory(held=held, leaving={A.key: NOW - 5000.0})
    made = plan_of(
        A, targets={"a": ["worker-1"]}, owned={"a": R1}, peers=others, **drained(memory=memory), **QUARANTINE
    )
    assert made.actions == ()
    assert made.statuses[A.key].routed


@pytest.mark.parametrize(("held", "again"), [({}, False), (YOUNG, False), (OLD, True)])
def test_after_a_restart_of_the_engine_only_who_had_it_for_long_loads_it_again(
    held: dict[str, Held], again: bool
) -> None:
    made = plan_of(A, memory=Memory(held=held, previous={A.key: R1}), **QUARANTINE)
    assert bool(loads(made)) == again
    assert made.statuses[A.key].avoid != again


def test_what_another_adapter_had_for_long_proves_nothing() -> None:
    made = plan_of(A, memory=Memory(held={B.key: Held(R1, NOW - 5000.0)}), **QUARANTINE)
    assert loads(made) == []


def test_who_had_it_for_long_does_not_load_it_again_when_its_own_engine_dies_of_it_twice() -> None:
    made = plan_of(A, memory=Memory(held=OLD, banned={R1: BANNED}), **QUARANTINE)
    assert loads(made) == []
    assert state(made, A) == State.REJECTED


def test_who_serves_what_is_quarantined_does_not_change_back_to_what_served_before() -> None:
    made = plan_of(
        A, wants={"a": R2}, disk=[R1, R2], owned={"a": R2}, quarantined=frozenset({R2}),
        memory=Memory(previous={A.key: R1}),
    )  # fmt: skip
    assert made.actions == ()
    assert made.statuses[A.key].routed


# -- make before break


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(entry(A, State.LOADED, R2), id="the target serves what was before"),
        pytest.param(entry(A, State.LOADED, R1), id="the target has it"),
    ],
)
def test_a_copy_in_quarantine_goes_when_a_target_serves_the_name(target: Entry) -> None:
    others = [peer("worker-1", target), peer("worker-2", entry(A, State.REJECTED, avoid=True))]
    made = plan_of(A, targets={"a": ["worker-1", "worker-2"]}, owned={"a": R1}, peers=others, **drained(), **QUARANTINE)
    assert [a.handover for a in unloads(made)] == [True]


@given(WORLDS, st.booleans())
def test_a_quarantine_takes_nothing_that_serves(seen: World, proven: bool) -> None:
    """What would stay without the quarantine stays with it, as far as it is loaded in this revision."""
    since = NOW - (PROVEN_SECONDS if proven else 1.0)
    memory = msgspec.structs.replace(
        seen.memory, held={a.key: Held(r, since) for a in seen.catalog.active if (r := seen.owned.get(a.served_name))}
    )
    free = msgspec.structs.replace(seen, memory=memory, quarantined=frozenset())
    shut = msgspec.structs.replace(free, quarantined=frozenset(seen.owned.values()))
    gone = {a.name for a in plan(free).actions if isinstance(a, Unload | Swap)}
    for action in plan(shut).actions:
        if isinstance(action, Swap):
            assert action.old != action.new not in shut.quarantined
        elif isinstance(action, Unload) and action.name not in gone:
            # A target that serves another revision is good enough now: the name is served all the same.
            told = [p.entries[action.key] for p in shut.peers.values() if action.key in p.entries]
            assert any(e.state == State.LOADED for e in told)


@pytest.mark.parametrize("why", ["rejected", "quarantined"])
def test_who_must_not_load_the_new_content_loads_the_old_again(why: str) -> None:
    fields: dict[str, Any] = {"wants": {"a": R2}, "disk": [R1, R2], **shut_out(R2, why)}
    fields["memory"].previous = {A.key: R1}
    assert [a.revision for a in loads(plan_of(A, **fields))] == [R1]
    made = plan_of(A, **fields, owned={"a": R1})
    status = made.statuses[A.key]
    assert (status.state, status.revision, status.routed, status.avoid) == (State.LOADED, R1, True, False)
    assert "held back" in status.message
