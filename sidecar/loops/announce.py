"""Shows this worker on its own pod: a step of its own, retried on its own, so that no failure of it ever causes a load.

A change is patched at once, the next at the earliest a second later. The label is the promise to get traffic: the drain
of an adapter begins when the patch that takes its label away has been answered, not when it was decided.

So a patch that only says Pending, Downloading or Loading would keep the label of an adapter that is loaded a moment
later waiting for that second. What only tells of such passing states is held for a moment: the first patch of a small
adapter then says Loaded and carries the label. Everything else (a label that comes or goes, Loaded, Failed, Draining,
an adapter that is gone, what the worker says of itself) goes at once, and takes with it what was held.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping

import structlog

from sidecar.core.annotations import news, routed_here, show
from sidecar.core.retry import Backoff
from sidecar.loops.reconcile import Reconciler
from sidecar.model import Record
from sidecar.ports import Backend, Clock, EdgeError, Report

log = structlog.get_logger()

SPACING = 1.0
LONGEST_NAP = 10.0
# Small adapters are loaded within it; who watches a long download is told of it little later.
HOLD = 0.5
# Who is routed to depends on it: after an outage, and behind an API server that answers now and then, no wait may be
# longer than those of the watches that bring the news.
RETRY = Backoff(first=1.0, cap=8.0)


class Announcer:
    """`labels` are the own pod's now, the same object until the pod changes."""

    def __init__(
        self,
        agent: Reconciler,
        backend: Backend,
        labels: Callable[[], Mapping[str, str]],
        clock: Clock,
        *,
        rng: random.Random | None = None,
        spacing: float = SPACING,
        hold: float = HOLD,
        retry: Backoff = RETRY,
    ) -> None:
        self._agent, self._backend, self._labels, self._clock = agent, backend, labels, clock
        self._rng = rng or random.Random()
        self._spacing, self._hold, self._retry = spacing, hold, retry
        self._wake = asyncio.Event()
        self._routes: frozenset[str] | None = None
        self._done: tuple[Record, frozenset[str], Mapping[str, str]] | None = None
        # Until when passing states that aren't shown yet may wait; None while there are none.
        self._held_until: float | None = None
        self.beat = clock()

    def wake(self) -> None:
        """Something about this worker may have changed."""
        self._wake.set()

    def routes(self) -> frozenset[str] | None:
        """Served names whose traffic the platform sends here, by the last patch that was answered; None: unknown."""
        return self._routes

    async def run(self) -> None:
        """Announce for ever."""
        failures, told = 0, ""
        earliest = 0.0
        while True:
            await self._awakened()
            while (wait := earliest - self._clock()) > 0:
                await asyncio.sleep(min(wait, LONGEST_NAP))
                self.beat = self._clock()
            self._wake.clear()
            if self._may_wait():
                continue
            try:
                written = await self._publish()
            except EdgeError as error:
                failures += 1
                delay = self._retry.delay(failures, self._rng.random())
                if str(error) != told:
                    log.warning("report_not_written", error=str(error), again_in_seconds=round(delay, 1))
                    told = str(error)
                earliest = self._clock() + delay
                self._wake.set()
                continue
            failures, told = 0, ""
            if written:
                earliest = self._clock() + self._spacing

    async def _awakened(self) -> None:
        """Wait for a change, or until what is held is due; every few seconds say that this loop lives."""
        while not self._wake.is_set():
            self.beat = self._clock()
            nap = LONGEST_NAP if self._held_until is None else min(self._held_until - self.beat, LONGEST_NAP)
            if nap <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(nap):
                    await self._wake.wait()
        self.beat = self._clock()

    def _may_wait(self) -> bool:
        """Whether there is nothing to write yet but passing states, and those not for long."""
        agent, labels, done = self._agent, self._labels(), self._done
        if agent.plan is None or agent.world is None or done is None or agent.record is done[0]:
            return False
        routed = routed_here(agent.plan.statuses, agent.world.engine is not None, labels)
        fresh = news(done[0], agent.record) if done[1:] == (routed, labels) else "lasting"
        if fresh == "lasting":
            return False
        self._tell(self._promised())
        if fresh == "none":
            self._done, self._held_until = (agent.record, *done[1:]), None
            return True
        now = self._clock()
        if self._held_until is None:
            self._held_until = now + self._hold
        return now < self._held_until

    async def _publish(self) -> bool:
        """Write what isn't written yet; whether there was anything to write."""
        self._held_until = None
        agent, labels = self._agent, self._labels()
        plan, world, record = agent.plan, agent.world, agent.record
        if plan is None or world is None:
            return False
        promised = self._promised()
        routed = routed_here(plan.statuses, promised is not None, labels)
        if self._done is not None and self._done[0] is record and self._done[1:] == (routed, labels):
            self._tell(promised)
            return False
        shown = show(record.head, self._base_model(), record.entries, routed)
        written = await self._backend.publish(Report(labels=shown.labels, annotations=shown.annotations))
        self._done = (record, routed, self._labels())
        self._tell(promised)
        return written

    def _promised(self) -> frozenset[str] | None:
        """Served names that the plan wants traffic for; None while the engine's content is unknown."""
        agent = self._agent
        if agent.plan is None or agent.world is None or agent.world.engine is None:
            return None
        return frozenset(s.served_name for s in agent.plan.statuses.values() if s.routed)

    def _tell(self, routes: frozenset[str] | None) -> None:
        if routes != self._routes:
            self._routes = routes
            self._agent.wake()

    def _base_model(self) -> str:
        view = self._agent.watch.view
        if view is not None and view.base_models:
            return view.base_models[0].id
        return next(iter(self._agent.head.base_models), "")
