"""Who writes an adapter's status, when, and when not."""

from __future__ import annotations

import msgspec
import pytest

from sidecar.core.placement import Assignment
from sidecar.core.retry import Backoff
from sidecar.core.status import AdapterStatus, Happening, Transition, digest
from sidecar.core.writers import Writers
from sidecar.loops.status_writer import Pace, StatusWriter
from sidecar.model import Adapter, State
from sidecar.ports import StatusConflict, StatusSeen

from .agent import ADAPTER, FakeAgent

MANAGER = "lora-sidecar-p"
OTHER = "lora-sidecar-q"
ON_ME = Assignment(adapter=ADAPTER.key, members=1, wanted=1, targets=("w-0",))


class Board:
    """Shows what was written, unless the test shows something else."""

    def __init__(self) -> None:
        self.seen: StatusSeen | None = StatusSeen()
        self.written: list[tuple[AdapterStatus, bool]] = []
        self.events: list[Happening] = []
        self.conflict: tuple[str, ...] = ()

    def status_seen(self, key: str) -> StatusSeen | None:
        return self.seen

    async def write_status(self, adapter: Adapter, status: AdapterStatus, *, force: bool = False) -> None:
        if self.conflict and not force:
            raise StatusConflict("conflict", self.conflict)
        self.written.append((status, force))
        self.seen = StatusSeen(
            digest=digest(status),
            managers=(MANAGER,),
            conditions={c.type: Transition(c.status, c.last_transition_time) for c in status.conditions},
        )

    async def tell(self, adapter: Adapter, happening: Happening) -> None:
        self.events.append(happening)


class Desk:
    """A writer, its agent, its board and its clock."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.agent, self.board = FakeAgent(), Board()
        self.writer = StatusWriter(
            self.agent,  # type: ignore[arg-type]  # the parts that it reads
            self.board,
            lambda: self.now,
            manager=MANAGER,
            pace=Pace(fight=Backoff(first=20.0, cap=600.0)),
        )

    async def look(self, after: float = 0.0) -> int:
        """Statuses written by one look, so long after the last."""
        self.now += after
        before = len(self.board.written)
        await self.writer.step()
        return len(self.board.written) - before


async def test_it_is_written_when_it_says_something_else_and_only_then() -> None:
    desk = Desk()
    desk.agent.stands(State.LOADING, assignment=ON_ME)
    assert await desk.look() == 0
    assert await desk.look(2) == 1
    assert await desk.look(10) == 0
    desk.agent.stands(State.LOADED, assignment=ON_ME)
    assert await desk.look(10) == 1
    assert [h.reason for h in desk.board.events] == ["Loaded"]
    assert [s.summary for s, _ in desk.board.written] == ["0/1", "1/1"]


async def test_changes_within_a_second_are_written_together() -> None:
    desk = Desk()
    desk.agent.stands(State.FAILED, assignment=ON_ME)
    assert await desk.look() == 1
    desk.agent.stands(State.REJECTED, assignment=ON_ME)
    assert await desk.look(0.3) == 0
    desk.agent.stands(State.LOADED, assignment=ON_ME)
    assert await desk.look(0.8) == 1


async def test_what_is_loaded_a_moment_later_is_written_once() -> None:
    desk = Desk()
    for state in (State.PENDING, State.DOWNLOADING, State.LOADING):
        desk.agent.stands(state, assignment=ON_ME)
        assert await desk.look(0.6) == 0
    desk.agent.stands(State.LOADED, assignment=ON_ME)
    assert await desk.look(0.1) == 1
    assert [s.summary for s, _ in desk.board.written] == ["1/1"]


async def test_progress_is_written_in_time_however_often_it_changes() -> None:
    desk = Desk()
    for number in range(20):
        desk.agent.stands(State.DOWNLOADING, assignment=ON_ME)
        (entry,) = desk.agent.record.entries
        told = msgspec.structs.replace(entry, message=f"attempt {number}")
        desk.agent.record = msgspec.structs.replace(desk.agent.record, entries=(told,))
        await desk.look(0.5)
    assert [s.workers[0].message for s, _ in desk.board.written] == [f"attempt {n}" for n in (4, 9, 14, 19)]


async def test_what_is_no_longer_ready_is_written_at_once() -> None:
    desk = Desk()
    desk.agent.stands(State.LOADED, assignment=ON_ME)
    assert await desk.look() == 1
    desk.agent.stands(State.LOADING, assignment=ON_ME)
    assert await desk.look(1.0) == 1


@pytest.mark.parametrize("state", [State.FAILED, State.REJECTED])
async def test_a_failure_is_written_at_once(state: State) -> None:
    desk = Desk()
    desk.agent.stands(State.DOWNLOADING, assignment=ON_ME)
    assert await desk.look() == 0
    desk.agent.stands(state, assignment=ON_ME)
    assert await desk.look(0.1) == 1


async def test_a_worker_that_is_not_first_in_rank_writes_nothing_until_the_first_is_dead() -> None:
    desk = Desk()
    first = next(n for n in (f"w-{i}" for i in range(1, 99)) if _first(desk, n) == n)
    desk.agent.stands(State.LOADED, assignment=ON_ME)
    desk.agent.with_peer(first, State.LOADED)
    assert await desk.look() == 0
    desk.agent.roster.peers[first] = msgspec.structs.replace(desk.agent.roster.peers[first], alive=False)
    assert await desk.look() == 1


def _first(desk: Desk, other: str) -> str | None:
    writers = Writers()
    workers = [desk.agent._worker("w-0"), desk.agent._worker(other)]
    writers.update(desk.agent.adapters, workers, frozenset({"w-0", other}))
    return writers.of(ADAPTER.key)


async def test_nothing_is_written_while_the_adapters_are_unknown() -> None:
    desk = Desk()
    desk.agent.stands(State.LOADED, assignment=ON_ME, fresh=False)
    assert await desk.look() == 0


async def test_who_is_changed_back_waits_ten_seconds_and_doubles() -> None:
    desk = Desk()
    desk.agent.stands(State.LOADED, assignment=ON_ME)
    await desk.look()
    waits = []
    for _ in range(7):
        await desk.look(1.0)  # it is shown
        desk.board.seen = StatusSeen(digest="another", managers=(MANAGER,))
        waited = 0.0
        while not await desk.look(1.0):
            waited += 1.0
        waits.append(waited)
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


async def test_another_pool_in_the_way_is_told_once_and_left_alone() -> None:
    desk = Desk()
    desk.board.conflict = (OTHER,)
    desk.board.seen = StatusSeen(digest="theirs", managers=(OTHER,))
    desk.agent.stands(State.LOADED, assignment=ON_ME)
    for _ in range(400):
        assert await desk.look(2.0) == 0
    assert [h.reason for h in desk.board.events] == ["StatusConflict"]
    assert OTHER in desk.board.events[0].message


async def test_a_pool_with_workers_takes_over_from_one_that_has_none() -> None:
    desk = Desk()
    desk.board.conflict = (OTHER,)
    desk.board.seen = StatusSeen(digest="theirs", managers=(OTHER,), unplaced=True)
    desk.agent.stands(State.LOADED, assignment=ON_ME)
    assert await desk.look() == 1
    assert desk.board.written[0][1] is True


async def test_a_pool_without_workers_says_so_after_a_moment_and_only_where_nobody_else_speaks() -> None:
    desk = Desk()
    desk.agent.stands(State.PENDING)
    assert await desk.look() == 0
    assert await desk.look(2.5) == 1
    assert {c.reason for c in desk.board.written[0][0].conditions} == {"NoCandidates"}
    silent = Desk()
    silent.board.seen = StatusSeen(digest="theirs", managers=(OTHER,))
    silent.agent.stands(State.PENDING)
    assert await silent.look() == 0
    assert await silent.look(100.0) == 0


async def test_times_of_conditions_stay_over_another_writer() -> None:
    desk = Desk()
    since = {"Placed": Transition("True", "2020-01-01T00:00:00Z"), "Ready": Transition("False", "2020-01-01T00:00:00Z")}
    desk.board.seen = StatusSeen(digest="older", managers=(MANAGER,), conditions=since)
    desk.agent.stands(State.LOADED, assignment=ON_ME)
    await desk.look()
    times = {c.type: c.last_transition_time for c in desk.board.written[0][0].conditions}
    assert times == {"Placed": "2020-01-01T00:00:00Z", "Ready": "1970-01-12T13:46:40Z"}
