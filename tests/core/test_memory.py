"""What survives a restart of the agent, and what must not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.core.memory import (
    FOREVER,
    VOLATILE,
    Attempt,
    Avoid,
    Held,
    LoadedOnce,
    Memory,
    Quarantine,
    Refused,
    Rest,
    Retry,
    Trial,
    dump,
    restore,
    spoken,
)
from sidecar.model import Listing, Suspicion

from .worlds import NOW, R1, R2, adapter, decision

A = adapter("a")
FULL: dict[str, Any] = {
    "history": [LoadedOnce("p", "a", R1)],
    "avoid": {A.key: Avoid(A.source_id, R1, FOREVER, 2)},
    "retries": {A.key: Retry(A.source_id, 3, NOW + 5, "it broke", True)},
    "decisions": {A.source_id: decision(A, R1, refresh=4)},
    "previous": {A.key: R1},
    "refused": {A.key: Refused(A.source_id, R2)},
    "gone": {A.key: 4},
    "trials": {A.key: Trial(A.source_id, "no adapter", 1, NOW + 15, Listing(files=decision(A, R2).listing))},
    "suspicions": [Suspicion(revision=R1, kind="death", at=NOW)],
    "quarantine": {R1: Quarantine(NOW + 9, 1, NOW - 1)},
    "banned": {R2: Quarantine(NOW + 9, 1)},
    "held": {A.key: Held(R1, NOW - 5)},
    "attempts": [Attempt(A.key, R1, NOW - 1)],
    "deaths": [NOW - 3],
    "rest": Rest(NOW + 4, 1),
    "refreshed": {A.source_id: NOW},
    "unloaded": {R2: NOW},
    "drain_seconds": {"a": 7},
    "process": "p",
    "base_models": ("base",),
    "ready_process": "p",
    "limits": "rank 16",
    "doubts": {R1: "odd"},
}


def test_this_test_knows_every_field() -> None:
    assert set(FULL) | set(VOLATILE) == set(Memory.__struct_fields__)


def test_what_was_kept_is_restored() -> None:
    memory = Memory(**FULL)
    assert restore(dump(memory), NOW) == memory


def test_waits_begin_anew() -> None:
    memory = Memory(drains={"a": 1.0}, leaving={A.key: 1.0}, large={A.key: 1}, no_reset={"p"})
    assert restore(dump(memory), NOW) == Memory()


@pytest.mark.parametrize("data", [None, b"", b"{", b"[]", b"null", b'{"history": 7}', b"\xff\xfe"])
def test_what_cannot_be_read_is_an_empty_memory(data: bytes | None) -> None:
    assert restore(data, NOW) == Memory()


def test_fields_of_another_version_are_no_hindrance() -> None:
    data = msgspec.json.encode({"process": "p", "something_new": {"x": 1}})
    assert restore(data, NOW) == Memory(process="p")


def test_a_clock_that_was_ahead_does_not_count() -> None:
    memory = Memory(deaths=[NOW + 50], attempts=[Attempt(A.key, R1, NOW + 50)])
    restored = restore(dump(memory), NOW)
    assert restored.deaths == [NOW]
    assert restored.attempts == []


def test_two_memories_share_nothing() -> None:
    one, two = Memory(), Memory()
    one.avoid["x"] = Avoid("s", R1, 1.0)
    one.history.append(LoadedOnce("p", "a", R1))
    assert two == Memory()


@pytest.mark.parametrize(
    ("again", "said"),
    [(NOW + 30, "no; tried again at 13:47:10 UTC"), (NOW, "no"), (NOW - 5, "no"), (FOREVER, "no")],
)
def test_what_failed_says_when_it_is_tried_again(again: float, said: str) -> None:
    assert spoken("no", again, NOW) == said


def test_when_it_is_tried_again_is_never_cut_off() -> None:
    told = spoken("x" * 1000, NOW + 30, NOW)
    assert len(told) == 256
    assert told.endswith("tried again at 13:47:10 UTC")
