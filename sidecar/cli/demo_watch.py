"""The demo's clients: all through the story they look at the pool and request every adapter, as a router would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sidecar.cli.demo_look import Answer, Eyes, NoAnswer, Snapshot
from sidecar.cli.demo_plan import DRAIN_SECONDS, Item
from sidecar.cli.demo_pool import Pool, Worker

INTERVAL = 0.2
# A request must arrive within the drain: "not found" for one that this machine held up for longer says nothing about
# the pool.
_LATE_SECONDS = 0.8 * DRAIN_SECONDS
_NOT_FOUND = 404

Law = Callable[[Snapshot], Sequence[str]]


@dataclass(frozen=True)
class Excuse:
    """What a crash explains: failures at `worker`, and that nobody serves `adapters`, of which it had the only copy."""

    worker: str
    adapters: frozenset[str]


@dataclass
class Tally:
    """What the clients met during one step. `gaps`: adapter -> seconds during which no agent said Loaded.

    `failures` are worker and text; `late` counts failures that this machine's own slowness explains.
    """

    late: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    gaps: dict[str, float] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def faults(self, excuse: Excuse | None) -> list[str]:
        """All that must not be, in a planned step or beside a crash."""
        gaps = {n: s for n, s in self.gaps.items() if excuse is None or n not in excuse.adapters}
        failures = [text for worker, text in self.failures if excuse is None or worker != excuse.worker]
        return [
            *self.broken,
            *(f"{name}: for {seconds:.1f} s no agent said Loaded" for name, seconds in gaps.items()),
            *failures,
        ]

    def hear(self, item: Item, answer: Answer) -> None:
        """Keep an answer that is unlike those before."""
        known = self.answers.setdefault(item.name, [])
        if all(answer.differs(other) for other in known):
            known.append(answer)


@dataclass
class Total:
    """All requests of the story."""

    requests: int = 0
    failed: int = 0
    late: int = 0

    def summary(self) -> str:
        """A sentence or two."""
        failed = (
            f"{self.failed} failed, all of them at what the story had just broken" if self.failed else "none failed"
        )
        late = f" {self.late} came too late to tell: this machine was busy." if self.late else ""
        return f"Of {self.requests} requests {failed}.{late}"


class Watch:
    """Looks five times a second, and each time requests each of `items` from one worker that says Loaded.

    Of each adapter one request is under way at a time, so that a slow engine is not buried in them.
    `law` names what a snapshot breaks. Answers of several workers are never of one moment, so only what a second look,
    directly after the first, shows as well is counted.
    """

    def __init__(self, pool: Pool, eyes: Eyes) -> None:
        self.items: list[Item] = []
        self.law: Law | None = None
        self.tally = Tally()
        self.total = Total()
        self.shown: Callable[[Snapshot, int], None] = lambda snapshot, requests: None
        self._pool, self._eyes = pool, eyes
        self._snapshot = Snapshot()
        self._news = asyncio.Event()
        self._gone_since: dict[str, float] = {}
        self._flying: dict[str, asyncio.Task[None]] = {}
        self._turn = 0

    def begin(self) -> Tally:
        """A fresh tally for the next step."""
        self.tally = Tally()
        self._gone_since.clear()
        return self.tally

    async def fresh(self) -> Snapshot:
        """A snapshot of which every part was asked for after this call."""
        asked = time.monotonic()
        while self._snapshot.began < asked:
            await self._news.wait()
        return self._snapshot

    async def run(self) -> None:
        """Watch for ever."""
        try:
            while True:
                began = time.monotonic()
                await self._round()
                await asyncio.sleep(max(0.02, INTERVAL - (time.monotonic() - began)))
        finally:
            for task in self._flying.values():
                task.cancel()

    async def landed(self) -> None:
        """Wait for the requests that are under way now."""
        await asyncio.gather(*self._flying.values())

    async def _round(self) -> None:
        items, tally = list(self.items), self.tally
        snapshot = await self._eyes.look(self._pool.present)
        gone, broken = self._nobody(snapshot, items), set(self.law(snapshot)) if self.law else set()
        if gone or broken:
            snapshot = await self._eyes.look(self._pool.present)
            gone &= self._nobody(snapshot, items)
            broken &= set(self.law(snapshot)) if self.law else set()
        if tally is self.tally:
            tally.broken += sorted(broken - set(tally.broken))
            self._note_gaps(tally, gone, snapshot.began)
        self._snapshot = snapshot
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._turn += 1
        for item in items:
            self._fly(snapshot, item, tally)
        self.shown(snapshot, self.total.requests)

    @staticmethod
    def _nobody(snapshot: Snapshot, items: Sequence[Item]) -> set[str]:
        if any(seen.record is None for seen in snapshot.seen.values()):
            return set()  # an agent that is slow to answer may be the one that has it
        return {item.name for item in items if not snapshot.told(item)}

    def _note_gaps(self, tally: Tally, gone: set[str], now: float) -> None:
        for name in gone:
            since = self._gone_since.setdefault(name, now - INTERVAL / 2)
            tally.gaps[name] = max(tally.gaps.get(name, 0.0), now - since)
        for name in set(self._gone_since) - gone:
            tally.gaps[name] = max(tally.gaps.get(name, 0.0), now - self._gone_since.pop(name))

    def _fly(self, snapshot: Snapshot, item: Item, tally: Tally) -> None:
        told, before = snapshot.told(item), self._flying.get(item.name)
        if before is not None and not before.done():
            return
        if before is not None:
            before.result()  # whatever it should not have raised
        if told:
            worker = self._worker(told[self._turn % len(told)])
            self._flying[item.name] = asyncio.create_task(self._request(snapshot.began, worker, item, tally))

    async def _request(self, told_at: float, worker: Worker, item: Item, tally: Tally) -> None:
        self.total.requests += 1
        try:
            answer = await self._eyes.complete(worker.engine_url, item.served_name)
        except NoAnswer as error:
            if error.status == _NOT_FOUND and time.monotonic() - told_at > _LATE_SECONDS:
                tally.late += 1
                self.total.late += 1
                return
            self.total.failed += 1
            text = f"{worker.name} said Loaded, but a request for {item.name} failed: {error}"
            tally.failures.append((worker.name, text))
        else:
            tally.hear(item, answer)

    def _worker(self, name: str) -> Worker:
        return next(worker for worker in self._pool.workers if worker.name == name)
