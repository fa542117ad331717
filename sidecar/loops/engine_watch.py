"""Looks at the engine once a second, more often after it was lost: is it up, restarted, or dead?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from sidecar.core.dialect_vllm import Limits
from sidecar.model import EngineView
from sidecar.ports import Clock, EdgeError, Engine, EngineRefused

log = structlog.get_logger()

# After a look that failed. An engine that has just come up again holds nothing, while labels may still promise it; and
# being refused a connection costs next to nothing. But who has been away for long may be for hours.
MISSED_INTERVAL = 0.25
MISSED_LATELY = 30.0


class EngineWatch:
    """The last good look, and what came of it.

    `on_process(view, lost_at)` is called when another engine process answers than before; `lost_at` is when the old one
    was first missed.
    """

    def __init__(self, engine: Engine, clock: Clock, *, interval: float, up_window: float) -> None:
        self._engine = engine
        self._clock = clock
        self._interval = interval
        self._up_window = up_window
        self._lost_at: float | None = None
        self._was_up = False
        self._broke = False
        self._look_lock = asyncio.Lock()
        self.view: EngineView | None = None
        self.limits: Limits | None = None
        self.first_answer: float | None = None
        self.message = "the engine has not answered yet"
        self.beat = clock()
        self.on_process: Callable[[EngineView, float], None] | None = None

    def current(self) -> EngineView | None:
        """The engine's state if it is known now: it has answered within the window."""
        view = self.view
        return view if view is not None and self._clock() - view.at <= self._up_window else None

    @property
    def seen(self) -> bool:
        """The engine has answered at least once."""
        return self.view is not None

    @property
    def in_doubt(self) -> bool:
        """A look or another call has failed since the last good look: this may be another process now."""
        return self._broke or self._lost_at is not None

    def broke(self) -> None:
        """A call to the engine broke: look before the next one."""
        self._broke = True

    async def look(self) -> EngineView | None:
        """One look now; None if the engine gave no good answer."""
        async with self._look_lock:
            try:
                view = await self._engine.look()
            except EdgeError as error:
                self._missed(str(error), refused=isinstance(error, EngineRefused))
                return None
            fresh = self._answered(view)
            if fresh:
                self.limits = await self._engine.limits()
                self.first_answer = self._clock()
            return view

    def _missed(self, message: str, *, refused: bool) -> None:
        if message != self.message:
            log.warning("engine_unavailable", error=message)
        self.message = message
        if self._lost_at is None and not refused:
            self._lost_at = self._clock()

    def _answered(self, view: EngineView) -> bool:
        """Note a good look; True if another process answers than before."""
        before, lost_at = self.view, self._lost_at
        self._lost_at, self._broke = None, False
        self.view = view
        if self.message or before is None:
            log.info("engine_up", version=view.version, base_models=[m.id for m in view.base_models])
        self.message = ""
        restarted = before is not None and _another(before, view, missed=lost_at is not None)
        if (before is None or restarted) and self.on_process is not None:
            self.on_process(view, (lost_at or view.at) if restarted else 0.0)
        return before is None or restarted

    async def run(self, changed: Callable[[], None]) -> None:
        """Look for ever; call `changed` when the engine's content, or whether it is up, changed."""
        while True:
            before = self.view
            view = await self.look()
            self.beat = self._clock()
            up = self.current() is not None
            if up != self._was_up or (view is not None and (before is None or _differs(before, view))):
                changed()
            self._was_up = up
            await asyncio.sleep(min(self._interval, MISSED_INTERVAL) if self._lost_lately else self._interval)

    @property
    def _lost_lately(self) -> bool:
        """An engine that had answered before was lost a moment ago: one that is starting takes its time."""
        lost_at = self._lost_at
        return self.view is not None and lost_at is not None and self._clock() - lost_at < MISSED_LATELY


def _differs(before: EngineView, now: EngineView) -> bool:
    return (before.process, before.adapters, before.base_models) != (now.process, now.adapters, now.base_models)


def _another(before: EngineView, now: EngineView, *, missed: bool) -> bool:
    """Whether another process answers now: by its start time, or where there is none, by names gone after a silence."""
    if before.process is not None and now.process is not None:
        return before.process != now.process
    return missed and bool(before.adapters) and not now.adapters
