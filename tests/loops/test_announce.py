"""The own pod's labels and annotations: when they are written, and what the agent learns of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from structlog.testing import capture_logs

from sidecar.core.retry import Backoff
from sidecar.edges.kubernetes.watch import Pace
from sidecar.loops.announce import RETRY, Announcer
from sidecar.model import State
from sidecar.ports import EdgeError, Report

from .agent import FakeAgent

LABEL = "adapter.lora-sidecar.io/a"
SPACING = 0.3
HOLD = 0.15


class Platform:
    """Takes reports; refuses them while `refusing`."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self.reports: list[tuple[float, Report]] = []
        self.attempts = 0
        self.refusing = False
        self._shown: Report | None = None
        self.event = asyncio.Event()

    async def publish(self, report: Report) -> bool:
        self.attempts += 1
        self.event.set()
        if self.refusing:
            raise EdgeError("forbidden")
        if report == self._shown and report.labels == self.labels:
            return False
        self._shown, self.labels = report, dict(report.labels)
        self.reports.append((time.monotonic(), report))
        return True

    async def until(self, attempts: int) -> None:
        async with asyncio.timeout(5):
            while self.attempts < attempts:
                self.event.clear()
                await self.event.wait()


@contextlib.asynccontextmanager
async def announcing(agent: FakeAgent, platform: Platform) -> AsyncIterator[Announcer]:
    announcer = Announcer(
        agent,  # type: ignore[arg-type]  # the parts that it reads
        platform,  # type: ignore[arg-type]  # the part that it calls
        lambda: platform.labels,
        time.monotonic,
        spacing=SPACING,
        hold=HOLD,
        retry=Backoff(first=0.05, cap=0.1),
    )
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
    finally:
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def shown_nothing(agent: FakeAgent, platform: Platform) -> AsyncIterator[Announcer]:
    """The worker has told that it holds nothing, and may tell more at any moment."""
    async with announcing(agent, platform) as announcer:
        agent.holds_nothing()
        announcer.wake()
        await platform.until(1)
        await asyncio.sleep(SPACING)
        yield announcer


async def test_a_change_is_written_at_once_and_the_next_after_the_spacing() -> None:
    agent, platform = FakeAgent(), Platform()
    async with announcing(agent, platform) as announcer:
        agent.stands(State.FAILED)
        announcer.wake()
        await platform.until(1)
        agent.stands(State.LOADING)
        announcer.wake()
        agent.stands(State.LOADED)
        announcer.wake()
        await platform.until(2)
    (first, told), (second, last) = platform.reports
    assert (LABEL in told.labels, LABEL in last.labels) == (False, True)
    assert second - first >= SPACING * 0.9
    assert '"Loaded"' in last.annotations[LABEL]


async def test_what_is_loaded_a_moment_later_is_told_once_and_gets_its_label_at_once() -> None:
    agent, platform = FakeAgent(), Platform()
    async with shown_nothing(agent, platform) as announcer:
        for passing in (State.PENDING, State.DOWNLOADING, State.LOADING):
            agent.stands(passing)
            announcer.wake()
            await asyncio.sleep(HOLD / 10)
        assert len(platform.reports) == 1
        agent.stands(State.LOADED)
        announcer.wake()
        began = time.monotonic()
        await platform.until(2)
    when, told = platform.reports[-1]
    assert LABEL in told.labels
    assert '"Loaded"' in told.annotations[LABEL]
    assert when - began < HOLD / 2


async def test_a_state_that_does_not_pass_soon_is_told() -> None:
    agent, platform = FakeAgent(), Platform()
    async with shown_nothing(agent, platform) as announcer:
        began = time.monotonic()
        agent.stands(State.DOWNLOADING)
        announcer.wake()
        await asyncio.sleep(HOLD / 2)
        agent.stands(State.LOADING)  # another passing state doesn't begin the wait anew
        announcer.wake()
        await platform.until(2)
    when, told = platform.reports[-1]
    assert '"Loading"' in told.annotations[LABEL]
    assert HOLD * 0.9 <= when - began < HOLD * 1.4


async def test_what_is_not_shown_uses_up_nobodys_moment() -> None:
    agent, platform = FakeAgent(), Platform()
    async with shown_nothing(agent, platform) as announcer:
        agent.record = msgspec.structs.replace(agent.record, version=agent.record.version + 1)
        announcer.wake()
        await asyncio.sleep(HOLD * 0.9)
        agent.stands(State.DOWNLOADING)
        announcer.wake()
        await asyncio.sleep(HOLD * 0.5)
        agent.stands(State.LOADED)
        announcer.wake()
        await platform.until(2)
    assert '"Loaded"' in platform.reports[1][1].annotations[LABEL]


@pytest.mark.parametrize("state", [State.FAILED, State.REJECTED, State.WAITING, State.DRAINING])
async def test_what_may_stay_is_told_at_once(state: State) -> None:
    agent, platform = FakeAgent(), Platform()
    async with shown_nothing(agent, platform) as announcer:
        agent.stands(State.DOWNLOADING)
        announcer.wake()
        agent.stands(state)
        announcer.wake()
        began = time.monotonic()
        await platform.until(2)
    assert platform.reports[-1][0] - began < HOLD / 2


async def test_a_label_goes_at_once_though_the_state_after_it_passes() -> None:
    agent, platform = FakeAgent(), Platform()
    async with announcing(agent, platform) as announcer:
        agent.stands(State.LOADED)
        announcer.wake()
        await platform.until(1)
        await asyncio.sleep(SPACING)
        agent.stands(State.LOADING)
        announcer.wake()
        began = time.monotonic()
        await platform.until(2)
    assert platform.reports[-1][1].labels == {}
    assert platform.reports[-1][0] - began < HOLD / 2


async def test_a_drain_begins_when_the_withdrawal_is_written() -> None:
    agent, platform = FakeAgent(), Platform()
    async with announcing(agent, platform) as announcer:
        assert announcer.routes() is None
        agent.stands(State.LOADED)
        announcer.wake()
        await platform.until(1)
        assert announcer.routes() == {"A"}
        platform.refusing = True
        agent.stands(State.DRAINING)
        announcer.wake()
        await platform.until(4)
        assert announcer.routes() == {"A"}
        woken = agent.woken
        platform.refusing = False
        await platform.until(platform.attempts + 1)
        assert announcer.routes() == frozenset()
        assert agent.woken > woken


async def test_no_label_goes_while_the_engine_is_unknown_and_all_go_when_it_answers_anew() -> None:
    agent, platform = FakeAgent(), Platform()
    async with announcing(agent, platform) as announcer:
        agent.stands(State.LOADED)
        announcer.wake()
        await platform.until(1)
        agent.stands(State.PENDING, engine=False)
        announcer.wake()
        await platform.until(2)
        assert platform.reports[-1][1].labels == {LABEL: "loaded"}
        assert announcer.routes() is None
        agent.stands(State.LOADING)
        announcer.wake()
        await platform.until(3)
        assert platform.reports[-1][1].labels == {}


async def test_a_pass_without_news_writes_nothing() -> None:
    agent, platform = FakeAgent(), Platform()
    async with announcing(agent, platform) as announcer:
        agent.stands(State.LOADED)
        announcer.wake()
        await platform.until(1)
        for _ in range(5):
            announcer.wake()
            await asyncio.sleep(0.02)
        assert len(platform.reports) == 1


async def test_a_lasting_failure_is_tried_again_soon_and_logged_once() -> None:
    assert RETRY.cap <= Pace().retry.cap, "labels wait for no attempt that lies behind the news of the watches"
    agent, platform = FakeAgent(), Platform()
    platform.refusing = True
    with capture_logs() as logs:
        async with announcing(agent, platform) as announcer:
            agent.stands(State.LOADED)
            announcer.wake()
            await platform.until(4)
            platform.refusing = False
            await platform.until(5)
    assert [report.labels for _, report in platform.reports] == [{LABEL: "loaded"}]
    assert [entry["event"] for entry in logs] == ["report_not_written"]
