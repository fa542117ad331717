"""Peers for a view to ask, over real sockets: other agents' servers, and servers that are none."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from sidecar.edges.peers_http import PolledPeers, Timing
from sidecar.model import Entry, Head, Member, Record, State
from tests.edges.agent_view import StaticView, serving

Answer = Callable[[web.Request], web.StreamResponse]

# Quick asks; nobody counts as dead for being slow on a busy machine.
PATIENT = Timing(near_interval=0.03, far_interval=0.03, near_window=20, far_window=20, near_timeout=5, tick=0.02)
# For tests in which somebody shall die.
HASTY = Timing(near_interval=0.03, near_window=0.4, near_timeout=0.3, tick=0.02)


def record(name: str, *, uid: str = "", pool: str = "p", generation: int = 1, version: int = 1) -> Record:
    head = Head(uid=uid or f"uid-{name}", name=name, pool=pool, generation=generation, address=f"{name}:1")
    return Record(head=head, version=version, entries=(Entry(adapter="ns/a", state=State.LOADED),))


def at(address: str) -> Member:
    return Member(name=address, address=address)


@dataclass
class Watch:
    """A running view of `members`, and what it told."""

    members: tuple[Member, ...] | None = ()
    timing: Timing = PATIENT
    told: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.peers = PolledPeers(
            pool="p",
            uid="uid-me",
            members=lambda: self.members,
            clock=time.monotonic,
            rng=random.Random(1),
            timing=self.timing,
        )

    def changed(self) -> None:
        self.told += 1
        self.news.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PolledPeers]:
        task = asyncio.create_task(self.peers.run(self.changed))
        await asyncio.sleep(0)  # it has begun
        try:
            yield self.peers
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for news until `holds`; so it also proves that `changed` was called."""
        async with asyncio.timeout(10):
            while not holds():
                self.news.clear()
                await self.news.wait()

    def alive(self) -> dict[str, bool]:
        return {name: observed.alive for name, observed in self.peers.view().items()}


@dataclass
class Asked:
    """A server that answers with whatever it is told, and notes what it was asked."""

    answer: Answer
    times: list[tuple[str, float]] = field(default_factory=list)
    again: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.times.append((request.path, time.monotonic()))
        async with self.again:
            self.again.notify_all()
        return self.answer(request)

    async def wait(self, count: int) -> None:
        """Until `count` more questions came."""
        goal = len(self.times) + count
        async with asyncio.timeout(10), self.again:
            await self.again.wait_for(lambda: len(self.times) >= goal)


@asynccontextmanager
async def answering(answer: Answer, hosts: int = 1) -> AsyncIterator[tuple[str, Asked]]:
    """The address (several are separated by spaces) and what was asked there."""
    asked = Asked(answer)
    app = web.Application()
    app.router.add_get("/{path:.*}", asked.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        for number in range(1, hosts + 1):
            await web.TCPSite(runner, f"127.0.0.{number}", 0).start()
        yield " ".join(f"{host}:{port}" for host, port in runner.addresses), asked
    finally:
        await runner.cleanup()


@asynccontextmanager
async def agents(records: Iterable[Record]) -> AsyncIterator[list[tuple[str, StaticView]]]:
    async with AsyncExitStack() as stack:
        started = []
        for one in records:
            view = StaticView(own=one)
            started.append((await stack.enter_async_context(serving(view)), view))
        yield started
