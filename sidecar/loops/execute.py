"""Carries out the planner's actions, each as a task of its own, and notes what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from sidecar.core import outcome
from sidecar.core.retry import Backoff
from sidecar.core.world import Action, Fetch, Load, Swap, Unload
from sidecar.loops.engine_watch import EngineWatch
from sidecar.loops.fetches import Acting, Fetches, result_of
from sidecar.loops.stale_cache import can_drop, drop_blocks
from sidecar.model import Adapter
from sidecar.ports import (
    REASON_OUT_OF_MEMORY,
    REASON_REFUSED,
    EdgeError,
    Engine,
    EngineDisconnected,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    Store,
)

log = structlog.get_logger()

# An action that ended in a fault of this program isn't begun again before.
CRASHED_SECONDS = 5.0


class Executor:
    """Runs actions; at most one a served name, and one fetch an adapter, at a time.

    `confirm(action)` looks at the world once more before a copy goes: True when it still may.
    """

    def __init__(
        self,
        acting: Acting,
        engine: Engine,
        watch: EngineWatch,
        store: Store,
        fetches: Fetches,
        *,
        confirm: Callable[[Unload | Swap], Coroutine[Any, Any, bool]],
    ) -> None:
        self._acting = acting
        self._engine = engine
        self._watch = watch
        self._store = store
        self._memory = acting.memory
        self._clock = acting.clock
        self._meter = acting.meter
        self._fetches = fetches
        self._confirm = confirm
        self._tasks: set[asyncio.Task[None]] = set()
        self.busy_names: set[str] = set()
        self.going: set[str] = set()
        self.fetching, self.coming = fetches.fetching, fetches.coming

    def start(self, action: Action, adapter: Adapter | None) -> None:
        """Begin `action` unless its name or content is being worked on already."""
        if isinstance(action, Fetch):
            if adapter is not None and self._fetches.take(action):
                self._spawn(self._fetches.run(action, adapter))
            return
        if action.name in self.busy_names:
            return
        self.busy_names.add(action.name)
        self._spawn(self._change(action, adapter))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("action_crashed", error=repr(error), exc_info=error)
        self._acting.changed()

    async def stop(self) -> None:
        """End what is running. A load that was begun may still take effect; the next start looks first."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _change(self, action: Load | Unload | Swap, adapter: Adapter | None) -> None:
        try:
            if isinstance(action, Unload):
                await self._unload(action)
            elif adapter is not None and isinstance(action, Load):
                await self._load_fresh(action, adapter)
            elif adapter is not None and isinstance(action, Swap):
                await self._swap(action, adapter)
            await self._acting.save()
        except Exception:  # a fault of this program: said by `_done`, and not run into again at once
            await asyncio.sleep(CRASHED_SECONDS)
            raise
        finally:
            self.busy_names.discard(action.name)
            self.going.discard(action.name)

    # Loading

    async def _load_fresh(self, action: Load, adapter: Adapter) -> None:
        if action.reset and not await self._reset(drop_blocks(self._engine, action.name), adapter, action.revision):
            return
        await self._load(adapter, action.name, action.revision)

    async def _reset(self, dropping: Coroutine[Any, Any, bool], adapter: Adapter, revision: str) -> bool:
        """Drop the prefix cache for `revision`; False (and remembered, for this engine process or for a while) if the
        engine doesn't let us."""
        try:
            done = await dropping
        except EdgeError as error:
            log.warning("prefix_cache_reset_failed", adapter=adapter.key, error=str(error))
            self._failed(adapter, revision, str(error), outcome.LOAD)
            return False
        if not done:
            process = self._watch.view.process if self._watch.view else None
            self._memory.no_reset.add(process or "")
        return done

    async def _load(self, adapter: Adapter, name: str, revision: str) -> bool:
        """One load, verified by a look. True when the engine lists the name with our path."""
        path = self._store.revisions().get(revision)
        if path is None or not await self._is_the_same_engine(adapter, revision):
            return False
        view = self._watch.view
        outcome.load_begins(
            self._memory, adapter.key, name, revision, (view.process or "") if view else "", self._clock()
        )
        await self._acting.save()
        began = self._clock()
        error: EdgeError | None = None
        try:
            await self._engine.load(name, path)
        except (EngineRefused, EngineTimeout, EngineUnavailable) as raised:
            error = raised
            if isinstance(raised, EngineUnavailable):
                self._watch.broke()
        if isinstance(error, EngineUnavailable) and not isinstance(error, EngineDisconnected):
            outcome.load_unsent(self._memory, adapter.key, revision)
        elif error is None or isinstance(error, EngineRefused | EngineTimeout):
            outcome.load_ended(self._memory, adapter.key, revision, self._clock())
        seen = await self._watch.look()
        if seen is not None and seen.adapters.get(name) == path:
            outcome.load_ended(self._memory, adapter.key, revision, self._clock())
            outcome.loaded(self._memory, adapter, revision, self._clock())
            self._store.touch(revision)
            self._meter.loaded("ok", self._clock() - began)
            log.info("adapter_loaded", adapter=adapter.key, served_name=name, revision=revision)
            return True
        self._meter.loaded(result_of(error), self._clock() - began)
        self._load_failed(adapter, name, revision, error)
        return False

    async def _is_the_same_engine(self, adapter: Adapter, revision: str) -> bool:
        """False if the engine is gone, or another process by now: what is loaded first, and last, is planned anew."""
        if not self._watch.in_doubt:
            return True
        before = self._watch.view.process if self._watch.view else None
        seen = await self._watch.look()
        if seen is None:
            outcome.put_off(self._memory, adapter, revision, self._watch.message, self._clock())
        return seen is not None and seen.process == before

    def _load_failed(self, adapter: Adapter, name: str, revision: str, error: EdgeError | None) -> None:
        message = (
            str(error) if error else f"the engine said yes, but does not list {name!r} with the path of {revision}"
        )
        log.warning("adapter_load_failed", adapter=adapter.key, served_name=name, revision=revision, error=message)
        if isinstance(error, EngineUnavailable) and not isinstance(error, EngineDisconnected):
            outcome.put_off(self._memory, adapter, revision, message, self._clock())
            return
        scarce = isinstance(error, EngineRefused) and error.reason == REASON_OUT_OF_MEMORY
        # A wrong key, a missing mount or a name that someone else took says nothing about the content.
        content = isinstance(error, EngineRefused) and error.reason == REASON_REFUSED
        if content and outcome.falls_back(self._memory, adapter, revision, self._store.revisions()):
            outcome.update_refused(self._memory, adapter, revision, f"the engine refused {revision}: {message}")
            return
        self._failed(adapter, revision, message, outcome.SCARCE if scarce else outcome.LOAD)

    def _failed(self, adapter: Adapter, revision: str, message: str, backoff: Backoff) -> None:
        outcome.failed(self._memory, adapter, revision, message, backoff, self._clock(), self._acting.rng.random())

    # Letting go

    async def _unload(self, action: Unload) -> None:
        if not await self._goes(action, ask=action.handover):
            log.info("unload_put_off", adapter=action.key, served_name=action.name)
            return
        if await self._remove(action.name, action.revision):
            outcome.let_go(self._memory, action.key)
            log.info("adapter_unloaded", adapter=action.key, served_name=action.name, revision=action.revision)

    async def _goes(self, action: Unload | Swap, *, ask: bool) -> bool:
        """The point of no return. False if the world, asked again, or a plan made meanwhile wants the copy to stay."""
        if ask:
            drain = self._memory.drains.get(action.name)
            if not await self._confirm(action):
                self._memory.drains.pop(action.name, None)
                return False
            # A plan that wanted the name here meanwhile has ended its drain; one that came after that has its own time.
            if drain is None or self._memory.drains.get(action.name) != drain:
                return False
        self.going.add(action.name)
        return True

    async def _remove(self, name: str, revision: str) -> bool:
        try:
            await self._engine.unload(name)
        except (EngineRefused, EngineTimeout, EngineUnavailable) as error:
            self._meter.unloaded(result_of(error))
            log.warning("adapter_unload_failed", served_name=name, error=str(error))
            await asyncio.sleep(1.0)  # looked at again before it is tried again
        seen = await self._watch.look()
        gone = seen is not None and name not in seen.adapters
        if gone:
            outcome.unloaded(self._memory, revision, self._clock())
            self._meter.unloaded("ok")
        return gone

    async def _swap(self, action: Swap, adapter: Adapter) -> None:
        """Unload, load; the old one again at once if the engine refuses the new one."""
        if action.reset and not await self._reset(can_drop(self._engine), adapter, action.new):
            return
        if not await self._goes(action, ask=bool(action.witnesses)):
            return
        if not await self._remove(action.name, action.old):
            return
        if action.reset and not await self._reset(drop_blocks(self._engine, action.name), adapter, action.new):
            await self._load(adapter, action.name, action.old)
            return
        if await self._load(adapter, action.name, action.new):
            log.info("adapter_updated", adapter=adapter.key, old=action.old, new=action.new)
            return
        if action.name not in (self._watch.view.adapters if self._watch.view else {}):
            await self._load(adapter, action.name, action.old)
