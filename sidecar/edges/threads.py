"""Blocking calls, off the event loop.

Daemon threads instead of an executor: an executor's threads are joined when the interpreter ends, so that one read from
a dead origin would hold up the agent's exit until its timeout. Bounds on their number belong to the callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """What `call()` returns or raises, run on a thread of its own.

    A cancelled caller goes on at once; the call then ends by itself and its outcome is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T itself may be None

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as caught:  # noqa: BLE001  # handed over to the caller as it is
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="lora-sidecar-io", daemon=True).start()
    return await future


async def uninterrupted(
    call: Awaitable[T], *, undo: Callable[[T], None] | None = None, stop: Callable[[], None] | None = None
) -> T:
    """The result of `call`, which always comes to its end: two must not work in one directory.

    On a cancellation `stop` asks it to hurry, and `undo` takes back what it made.
    """
    future = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.wait({future})
        if undo is not None and future.exception() is None:
            undo(future.result())
        raise
