"""An asyncio loop whose time stands still while anything can run, and jumps when nothing can.

What runs in the context of a `Process` runs only while that process does: a frozen one's timers, datagrams and answers
wait, as after SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, TypeVarTuple, Unpack

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Process:
    """Tasks that are stopped, continued and killed together."""

    def __init__(self) -> None:
        self.frozen = False
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self._held: deque[asyncio.Handle] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 64

    def own(self, task: asyncio.Task[Any]) -> None:
        """A task was begun by this process."""
        self._tasks.append(task)
        if len(self._tasks) > self._prune_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._prune_at = 64 + 2 * len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this process."""
        return asyncio.get_running_loop().create_task(work, context=self.context.copy())

    async def turn(self, work: Callable[[], T]) -> T:
        """What `work` gives, done by this process as soon as it runs."""
        if not self.frozen:
            return self.context.run(work)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def act() -> None:
            try:
                found = work()
            except Exception as error:  # noqa: BLE001  # handed to whoever waits for it
                if not done.done():
                    done.set_exception(error)
                return
            if not done.done():
                done.set_result(found)

        loop.call_soon(act, context=self.context.copy())
        return await done

    def hold(self, handle: asyncio.Handle) -> None:
        """Keep for later what is due now."""
        self._held.append(handle)

    def thaw(self, loop: VirtualLoop) -> None:
        """Run on; what was due meanwhile is done in its order, unless it is called off before its turn."""
        self.frozen = False
        loop.resume(self._held)
        self._held.clear()

    async def kill(self) -> None:
        """As SIGKILL: whatever it was about to do is not done."""
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        if isinstance(loop, VirtualLoop):
            self.thaw(loop)
        await asyncio.gather(*tasks, return_exceptions=True)


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
NOWHERE = contextvars.Context()
"""The context of what belongs to no process: the network, for example."""


class _Held(asyncio.Handle):
    """A callback of a process, held back while that is frozen."""

    __slots__ = ()
    process: Process

    def _run(self) -> None:
        if self.process.frozen:
            self.process.hold(self)
        else:
            super()._run()


class _Soon(_Held):
    """One that is due."""

    __slots__ = ("process",)


class _Later(_Held, asyncio.TimerHandle):
    """A timer."""

    __slots__ = ("process",)


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting, moves the loop's time on; there is nothing that it could wait for."""

    jump: Callable[[float], None]

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("the simulation is stuck: nothing is scheduled")
        if timeout > 0:
            self.jump(timeout)
        return ()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Virtual seconds since 0. Threads run inline, so that a run depends on nothing but its seed."""

    # asyncio's own queues, filled here without the detours of its base class: a simulation does little else.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

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

    def _write_to_self(self) -> None:
        """No other thread ever waits for this loop."""

    def create_task(
        self,
        coro: Any,
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task = super().create_task(coro, name=name, context=context)
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is not None:
            process.own(task)
        return task

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        context = context or contextvars.copy_context()
        process = context.get(_PROCESS)
        if process is None:
            handle = asyncio.Handle(callback, args, self, context)
        else:
            handle = _Soon(callback, args, self, context)
            handle.process = process
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        context = context or contextvars.copy_context()
        process = context.get(_PROCESS)
        if process is None:
            timer = asyncio.TimerHandle(when, callback, args, self, context)
        else:
            timer = _Later(when, callback, args, self, context)
            timer.process = process
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]  # as asyncio's own call_at has it
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._virtual + delay, callback, *args, context=context)

    def resume(self, handles: deque[asyncio.Handle]) -> None:
        """Run what was held back."""
        self._ready.extend(handle for handle in handles if not handle.cancelled())


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
        for _ in range(20):
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if not left:
                break
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
