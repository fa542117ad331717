"""Turns: one holder per key at a time, and calls that many share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from sidecar.ports import EngineUnavailable

T = TypeVar("T")


class Shared(Generic[T]):
    """One call for all who ask for it before it begins: never an answer from before one's question.

    While a call is under way, those who come share the one that begins when it has ended. Whoever asks may be
    cancelled; the call goes on for the others, so it must have a deadline of its own, and raise nothing.
    """

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._under_way: asyncio.Future[T] | None = None
        self._next: asyncio.Future[T] | None = None

    async def __call__(self) -> T:
        if self._next is None:
            self._next = asyncio.ensure_future(self._run(self._under_way))
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Future[T] | None) -> T:
        if before is not None:
            await asyncio.wait({before})
        self._under_way, self._next = self._next, None
        return await self._call()


class Turns:
    """Locks by key. A lock lives as long as somebody holds or awaits it: no longer, or the table would grow for ever,
    and no shorter, or two could hold one key."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, list[int]]] = {}

    @asynccontextmanager
    async def hold(self, key: str, wait: float, longest: float = math.inf) -> AsyncIterator[None]:
        """Hold `key` for the time of the block, but no longer than `longest` seconds: the next holder comes then,
        though the block goes on. Raises EngineUnavailable if the turn doesn't come within `wait` seconds."""
        lock, users = self._locks.setdefault(key, (asyncio.Lock(), [0]))
        users[0] += 1
        try:
            try:
                async with asyncio.timeout(wait):
                    await lock.acquire()
            except TimeoutError:
                raise EngineUnavailable(
                    f"not sent: an earlier call to the engine ({key}) has had no answer for {wait:g} s"
                ) from None
            given_back = False

            def give_back() -> None:
                nonlocal given_back
                if not given_back:
                    given_back = True
                    lock.release()

            timer = asyncio.get_running_loop().call_later(longest, give_back) if longest < math.inf else None
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()
                give_back()
        finally:
            users[0] -= 1
            if not users[0]:
                del self._locks[key]

    def __len__(self) -> int:
        """Keys that somebody holds or awaits."""
        return len(self._locks)
