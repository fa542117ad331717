"""What a worker tells the others, and people."""

from __future__ import annotations

import pytest

from sidecar.core import outcome
from sidecar.core.memory import MESSAGE_LIMIT, Memory
from sidecar.core.placement import Assignment
from sidecar.core.report import entries, row
from sidecar.core.world import Status
from sidecar.model import Decision, Entry, State

from .worlds import ME, NOW, R1, R2, adapter, decision

A = adapter("a", served_name="Team/a")
B = adapter("b")


def told(
    status: Status,
    *,
    before: Entry | None = None,
    decided: Decision | None = None,
    memory: Memory | None = None,
    now: float = NOW,
) -> Entry:
    known = {A.key: decided} if decided else {}
    old = {A.key: before} if before else {}
    (found,) = entries({A.key: A}, {A.key: status}, old, known, memory or Memory(), now)
    return found


LOADED = Status(state=State.LOADED, served_name="Team/a", revision=R1, routed=True)


def test_an_entry_says_what_the_status_says() -> None:
    status = Status(state=State.FAILED, served_name="Team/a", revision=R1, message="it broke", avoid=True)
    assert told(status) == Entry(
        adapter=A.key, state=State.FAILED, revision=R1, served_name="Team/a", since=NOW, message="it broke", avoid=True
    )


def test_entries_come_in_order_so_that_equal_records_are_equal() -> None:
    statuses = {B.key: LOADED, A.key: LOADED}
    assert [e.adapter for e in entries({}, statuses, {}, {}, Memory(), NOW)] == [A.key, B.key]


@pytest.mark.parametrize(
    ("status", "same"),
    [
        (LOADED, True),
        (Status(state=State.LOADED, served_name="Team/a", revision=R1, message="news"), True),
        (Status(state=State.LOADED, served_name="Team/a", revision=R2), False),
        (Status(state=State.DRAINING, served_name="Team/a", revision=R1), False),
    ],
)
def test_since_when_lasts_while_state_and_revision_do(status: Status, same: bool) -> None:
    first = told(LOADED)
    assert (told(status, before=first, now=NOW + 5).since == NOW) is same


def test_an_unchanged_status_tells_nothing_new() -> None:
    first = told(LOADED, decided=decision(A, R1))
    assert told(LOADED, before=first, decided=decision(A, R1), now=NOW + 100) == first


def test_long_messages_are_cut() -> None:
    assert len(told(Status(state=State.FAILED, served_name="x", message="x" * 5000)).message) == MESSAGE_LIMIT == 256


def test_the_served_name_is_told_where_the_status_has_none() -> None:
    assert told(Status(state=State.REJECTED, served_name="")).served_name == "Team/a"


def test_a_decision_is_passed_on_only_with_its_list_of_files() -> None:
    listed, bare = decision(A, R1), decision(A, R1, listed=False)
    assert told(LOADED, decided=listed).decision == listed
    assert told(LOADED, decided=bare).decision is None


def test_bytes_that_are_gone_are_told_for_the_decision_they_belong_to() -> None:
    memory = Memory(gone={A.key: 3})
    assert told(LOADED, decided=decision(A, R1, refresh=3), memory=memory).gone
    assert not told(LOADED, decided=decision(A, R1, refresh=4), memory=memory).gone
    assert not told(LOADED, memory=memory).gone


def test_what_this_engine_refused_is_told_as_long_as_the_source_is_the_same() -> None:
    memory = Memory()
    outcome.update_refused(memory, A, R2, "refused")
    assert told(LOADED, memory=memory).refused == R2
    outcome.update_refused(memory, adapter("a", uri="s3://bucket/elsewhere"), R2, "refused")
    assert told(LOADED, memory=memory).refused == ""


# -- rows of /v1/adapters

PLACED = Assignment(adapter=A.key, members=3, wanted=2, targets=("worker-1", ME))


def test_a_row_of_a_target() -> None:
    found = row(A, ME, PLACED, LOADED, decision(A, R1, refresh=2), NOW, None)
    expected = {
        "namespace": "default",
        "name": "a",
        "servedName": "Team/a",
        "wantedHere": True,
        "rank": 1,
        "targets": ["worker-1", ME],
        "members": 3,
        "wanted": 2,
        "waiting": [],
        "state": "Loaded",
        "revision": R1,
        "wantedRevision": R1,
        "refresh": 2,
        "routed": True,
        "message": "",
        "since": NOW,
        "bytesDone": 0,
        "bytesTotal": 0,
    }
    assert {k: found[k] for k in expected} == expected


def test_a_row_of_an_adapter_that_is_none_of_this_workers_business() -> None:
    found = row(A, "worker-9", PLACED, None, None, 0.0, None)
    assert (found["wantedHere"], found["rank"], found["state"], found["routed"]) == (False, None, None, False)
    assert found["targets"] == ["worker-1", ME]


def test_a_row_before_anything_is_placed() -> None:
    found = row(A, ME, None, None, None, 0.0, None)
    assert (found["wantedHere"], found["targets"], found["members"]) == (False, [], 0)


def test_a_row_shows_progress_in_bytes() -> None:
    found = row(A, ME, PLACED, None, None, 0.0, (5, 10))
    assert (found["bytesDone"], found["bytesTotal"]) == (5, 10)
