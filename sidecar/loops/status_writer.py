"""Writes the status of the adapters for which this worker is first in rank, for the whole pool."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping

import msgspec
import structlog

from sidecar.core.retry import Backoff
from sidecar.core.status import NO_CANDIDATES, AdapterStatus, Happening, Pool, aggregate, digest, happenings, timed
from sidecar.core.world import World
from sidecar.core.writers import Writers
from sidecar.loops.reconcile import Reconciler
from sidecar.model import Adapter, Entry, Frozen
from sidecar.ports import Clock, EdgeError, StatusBoard, StatusConflict, StatusSeen

log = structlog.get_logger()

# Looked at at most so often; one adapter's status is written at most once a second.
SHORTEST_NAP = 0.2
LONGEST_NAP = 10.0
SPACING = 1.0
RETRY = Backoff(first=1.0, cap=60.0)
FIGHT = Backoff(first=20.0, cap=600.0)  # with the jitter's lower half at 0: 10 s doubling to 5 min
# A write counts as changed back when the watch has not shown it for so long.
SHOWN_WITHIN = 5.0
PEACE_AFTER = 600.0
# Another pool may be about to say that it has workers for the adapter: it then speaks first.
NO_CANDIDATES_AFTER = 2.0
# What is under way changes with every step of every worker, and each write costs the API server several milliseconds.
# A small adapter's first status says Ready; the progress of others is written so long after it began to differ.
PROGRESS_AFTER = 2.0
CONFLICT_AGAIN = 300.0
_PREFIX = "lora-sidecar-"


class _Desk(msgspec.Struct):
    """What is remembered of one adapter while this worker writes its status."""

    since: float
    written: str = ""
    written_at: float = 0.0
    shown: bool = False
    fights: int = 0
    not_before: float = 0.0
    # Since when what is shown is not what is so; None while it is.
    differs_since: float | None = None
    last: AdapterStatus | None = None
    told_conflict: tuple[str, ...] = ()


class Pace(Frozen, frozen=True, kw_only=True):
    """Waits in seconds."""

    spacing: float = SPACING
    fight: Backoff = FIGHT
    retry: Backoff = RETRY
    no_candidates_after: float = NO_CANDIDATES_AFTER
    progress_after: float = PROGRESS_AFTER


class StatusWriter:
    """`manager` is the pool's field manager."""

    def __init__(
        self,
        agent: Reconciler,
        board: StatusBoard,
        clock: Clock,
        *,
        manager: str,
        rng: random.Random | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._agent, self._board, self._clock = agent, board, clock
        self._manager = manager
        self._rng = rng or random.Random()
        self._pace = pace or Pace()
        self._writers = Writers()
        self._desks: dict[str, _Desk] = {}
        self._wake = asyncio.Event()
        self._wake_at = 0.0
        self.beat = clock()

    def wake(self) -> None:
        """Something in the pool may have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Write for ever."""
        failures = 0
        while True:
            nap = min(max(self._wake_at - self._clock(), SHORTEST_NAP), LONGEST_NAP)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(nap):
                    await self._wake.wait()
            self._wake.clear()
            self.beat = self._clock()
            try:
                await self.step()
                failures = 0
                await asyncio.sleep(SHORTEST_NAP)
            except EdgeError as error:
                failures += 1
                delay = self._pace.retry.delay(failures, self._rng.random())
                log.warning("status_not_written", error=str(error), again_in_seconds=round(delay, 1))
                await self._rest(delay)

    async def _rest(self, seconds: float) -> None:
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            self.beat = self._clock()
            await asyncio.sleep(min(left, LONGEST_NAP))
        self._wake.set()

    async def step(self) -> None:
        """One look at every adapter that is ours to write. Raises EdgeError when the platform can't be written to."""
        agent, world, roster = self._agent, self._agent.world, self._agent.roster
        self._wake_at = self._clock() + LONGEST_NAP
        if world is None or roster is None or not world.settled or world.isolated or not world.adapters_fresh:
            return
        alive = frozenset(n for n, p in roster.peers.items() if p.alive) | {agent.head.name}
        self._writers.update(agent.adapters, roster.workers, alive)
        base_models = tuple(sorted({m for w in roster.workers for m in w.base_models}))
        mine = [a for k, a in sorted(agent.adapters.items()) if self._writers.of(k) == agent.head.name]
        own = {e.adapter: e for e in agent.record.entries}
        self._desks = {a.key: self._desks.get(a.key) or _Desk(since=self._clock()) for a in mine}
        for adapter in mine:
            self.beat = self._clock()
            seen = self._board.status_seen(adapter.key)
            if seen is not None:
                status = aggregate(
                    adapter,
                    world.assignments.get(adapter.key),
                    _revision(world, adapter),
                    Pool(entries=self._entries(adapter.key, own, alive), base_models=base_models),
                    world.catalog.rejected.get(adapter.key, ""),
                )
                await self._consider(adapter, status, seen)

    def _entries(self, key: str, own: Mapping[str, Entry], alive: Iterable[str]) -> dict[str, Entry]:
        agent = self._agent
        found = {agent.head.name: own[key]} if key in own else {}
        peers = agent.roster.peers if agent.roster else {}
        for name in alive:
            peer = peers.get(name)
            entry = peer.entries.get(key) if peer else None
            if entry is not None:
                found[name] = entry
        return found

    async def _consider(self, adapter: Adapter, status: AdapterStatus, seen: StatusSeen) -> None:
        """Write `status` if it says something else than what is shown, and if it is time to."""
        desk, now, content = self._desks[adapter.key], self._clock(), digest(status)
        if seen.digest == content:
            desk.differs_since = None
            desk.shown = desk.shown or desk.written == content
            desk.last = desk.last or status
            if desk.fights and now - desk.written_at > PEACE_AFTER:
                desk.fights = 0
            return
        if desk.written == content and (desk.shown or now - desk.written_at > SHOWN_WITHIN):
            self._changed_back(adapter, desk, now)
        elif desk.written == content:
            self._at(desk.written_at + SHOWN_WITHIN)
            return
        wait = max(desk.not_before, desk.written_at + self._pace.spacing)
        unplaced = any(c.reason == NO_CANDIDATES for c in status.conditions)
        if unplaced:
            if any(m.startswith(_PREFIX) and m != self._manager for m in seen.managers):
                return  # another pool speaks for it
            wait = max(wait, desk.since + self._pace.no_candidates_after)
        if desk.differs_since is None:
            desk.differs_since = now
        if status.under_way and not _ready(seen):
            # That something is no longer ready is told at once.
            wait = max(wait, desk.differs_since + self._pace.progress_after)
        if now < wait:
            self._at(wait)
            return
        await self._write(adapter, status, seen, desk, force=seen.unplaced and not unplaced)

    def _changed_back(self, adapter: Adapter, desk: _Desk, now: float) -> None:
        desk.fights += 1
        desk.not_before = now + self._pace.fight.delay(desk.fights, 0.0)
        desk.written, desk.shown = "", False
        log.warning("status_changed_back", adapter=adapter.key, again_in_seconds=round(desk.not_before - now, 1))

    def _at(self, when: float) -> None:
        self._wake_at = min(self._wake_at, when)

    async def _write(
        self, adapter: Adapter, status: AdapterStatus, seen: StatusSeen, desk: _Desk, *, force: bool
    ) -> None:
        now = self._clock()
        was_ready = _ready(seen)
        try:
            await self._board.write_status(adapter, timed(status, seen.conditions, now), force=force)
        except StatusConflict as conflict:
            desk.not_before = now + CONFLICT_AGAIN
            await self._tell_conflict(adapter, desk, conflict)
            return
        desk.written, desk.written_at, desk.shown = digest(status), now, False
        desk.differs_since = None
        events = happenings(desk.last, status, was_ready)
        desk.last = status
        for happening in events:
            await self._tell(adapter, happening)

    async def _tell_conflict(self, adapter: Adapter, desk: _Desk, conflict: StatusConflict) -> None:
        if desk.told_conflict == conflict.managers:
            return
        desk.told_conflict = conflict.managers
        message = (
            f"the status is written by {', '.join(conflict.managers)}; {self._manager} leaves it alone. Two pools that "
            "serve one base model in a namespace both take this adapter: tell them apart by spec.workers"
        )
        await self._tell(adapter, Happening(reason="StatusConflict", message=message, warning=True))

    async def _tell(self, adapter: Adapter, happening: Happening) -> None:
        try:
            await self._board.tell(adapter, happening)
        except EdgeError as error:
            log.warning("event_not_written", adapter=adapter.key, reason=happening.reason, error=str(error))


def _ready(seen: StatusSeen) -> bool:
    ready = seen.conditions.get("Ready")
    return ready is not None and ready.status == "True"


def _revision(world: World, adapter: Adapter) -> str | None:
    decision = world.decisions.get(adapter.key)
    return decision.revision if decision else None
