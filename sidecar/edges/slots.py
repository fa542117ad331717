"""A bound on transfers that move bytes, which transfers that hang don't count against."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from sidecar.ports import OriginError

T = TypeVar("T")

LOOK_SECONDS = 3.0
"""Without a byte for this long a transfer's slot goes to the next in line, so that a dead origin, whose timeouts take
far longer, holds up nobody else's adapters. It may still finish."""

GIVE_UP_SECONDS = 60.0
"""Without a byte for this long a transfer is given up. Shorter than this are the timeouts of most, but not of a server
that trickles."""


class Slots:
    """At most `count` transfers under way, first come first served."""

    def __init__(self, count: int, *, look_seconds: float = LOOK_SECONDS, give_up: float = GIVE_UP_SECONDS) -> None:
        self._free = asyncio.Semaphore(count)
        self._look = look_seconds
        self._give_up = give_up

    async def run(
        self, transfer: Callable[[], Coroutine[Any, Any, T]], position: Callable[[], int], what: str = "transfer"
    ) -> T:
        """Run `transfer` in a slot; `position` tells how far it is. Raises what it does; OriginError if it hangs."""
        async with self._slot() as give_back:
            task = asyncio.ensure_future(transfer())
            try:
                return await self._watch(task, position, give_back, what)
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task}, timeout=1)

    async def _watch(
        self, task: asyncio.Future[T], position: Callable[[], int], give_back: Callable[[], None], what: str
    ) -> T:
        idle, before = 0.0, position()
        while True:
            done, _ = await asyncio.wait({task}, timeout=self._look)
            if done:
                return task.result()
            now = position()
            idle = 0.0 if now != before else idle + self._look
            before = now
            if idle:
                give_back()
            if idle >= self._give_up:
                raise OriginError(f"{what}: no byte for {idle:.0f} s")

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[Callable[[], None]]:
        await self._free.acquire()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        try:
            yield give_back
        finally:
            give_back()
