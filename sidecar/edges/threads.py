"""Blocking calls, off the event loop.

Daemon threads instead of an executor: an executor's threads are joined when the interpreter ends, so that one read from
a dead origin would hold up the agent's exit until its timeout. Bounds on their number belong to the callers. A thread
that is done waits a while for the next call: starting one makes the event loop wait for it, for milliseconds where the
cores are busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

IDLE_SECONDS = 10.0

# Does the work; what it returns is called when its thread counts as idle again, so that whoever waits for the outcome
# finds that thread for the next call.
_Work = Callable[[], Callable[[], None]]


class _Crew:
    """Threads that wait for work, the one that was busy last first."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[_Work]] = []
        self._lock = threading.Lock()

    def do(self, work: _Work) -> None:
        """Have `work` done by an idle thread, or a new one."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is not None:
            inbox.put(work)
        else:
            threading.Thread(target=self._live, args=(work,), name="lora-sidecar-io", daemon=True).start()

    def _live(self, work: _Work) -> None:
        inbox: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        while True:
            tell = work()
            with self._lock:
                self._idle.append(inbox)
            tell()
            del work, tell  # else a thread that waits would keep what they hold
            try:
                work = inbox.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                work = inbox.get()  # given at the last moment


_crew = _Crew()


async def in_thread(call: Callable[[], T]) -> T:
    """What `call()` returns or raises, run on a thread that does nothing else meanwhile.

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

    def run() -> Callable[[], None]:
        result, error = None, None
        try:
            result = call()
        except BaseException as caught:  # noqa: BLE001  # handed over to the caller as it is
            error = caught

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(settle, result, error)

        return tell

    _crew.do(run)
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
