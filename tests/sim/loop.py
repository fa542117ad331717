"""An asyncio loop whose time stands still while anything can run, and jumps when nothing can."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting, moves the loop's time on."""

    jump: Callable[[float], None]

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("the simulation is stuck: nothing is scheduled")
        if timeout > 0:
            self.jump(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Virtual seconds since 0. Threads run inline, so that a run depends on nothing but its seed."""

    def __init__(self) -> None:
        selector = _Jumping()
        selector.jump = self._jump
        self._virtual = 0.0
        super().__init__(selector)
        self.set_default_executor(InlineExecutor())

    def _jump(self, seconds: float) -> None:
        self._virtual += seconds

    def time(self) -> float:
        return self._virtual


class InlineExecutor(ThreadPoolExecutor):
    """Runs each call at once; a thread pool in name only, because asyncio accepts nothing else."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # handed to whoever waits for the future
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a virtual loop to its end, and everything that it left behind."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
