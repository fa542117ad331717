"""Says what must stay on the disk; what isn't needed any more goes when its room is."""

from __future__ import annotations

import asyncio

import structlog

from sidecar.core.memory import Memory
from sidecar.core.world import World
from sidecar.model import State
from sidecar.ports import EdgeError, Engine, Store

log = structlog.get_logger()


class Keeper:
    """A revision's files stay while the engine lists it, until 10 minutes after its unload, while a request of it is in
    flight as far as the metrics tell, while a target of its name doesn't report the newer one yet, and while anything
    about the adapters, the members or the engine is unknown."""

    def __init__(self, store: Store, engine: Engine, memory: Memory) -> None:
        self._store, self._engine, self._memory = store, engine, memory
        # Names with requests under way, as of the last time that was asked.
        self._in_flight: frozenset[str] = frozenset()
        # Names of which not every target serves what the pool wants.
        self._behind: frozenset[str] = frozenset()
        self._kept: frozenset[str] = frozenset()

    async def before_actions(self, world: World) -> None:
        """What is newly needed is told before it is loaded: a download may look for room at any moment."""
        if not self._needed(world) <= self._kept:
            await self._tell(world)

    async def tidy(self, world: World) -> None:
        """Look again at everything."""
        # A request that was queued before the unload may read the files when its turn comes, however late.
        self._in_flight = await self._engine.in_flight() or frozenset() if world.engine else frozenset()
        self._behind = _behind(world)
        await self._tell(world)

    async def _tell(self, world: World) -> None:
        self._kept = self._needed(world)
        # What was published since this look stays too.
        since = self._store.revisions().keys() - world.disk
        try:
            await asyncio.to_thread(self._store.evict, self._kept | since)
        except EdgeError as error:
            log.error("eviction_failed", error=str(error))

    def _needed(self, world: World) -> frozenset[str]:
        memory = self._memory
        if world.engine is None or not (world.adapters_fresh and world.members_fresh):
            return world.disk
        return frozenset(
            (
                *world.owned.values(),
                *memory.unloaded,
                *memory.previous.values(),
                *(d.revision for d in world.decisions.values()),
                *(a.revision for a in memory.attempts),
                # Requests of a name that is loaded are on what it has now: that was loaded when earlier ones had ended.
                *(p.revision for p in memory.history if p.name in self._in_flight and p.name not in world.owned),
                # The last one before what is loaded now: others may have to go back to it.
                *{
                    p.name: p.revision
                    for p in memory.history
                    if p.name in self._behind and p.revision != world.owned.get(p.name)
                }.values(),
            )
        )


def _behind(world: World) -> frozenset[str]:
    found = set()
    for adapter in world.catalog.active:
        decision, placed = world.decisions.get(adapter.key), world.assignments.get(adapter.key)
        if decision is None or placed is None or not world.owned.get(adapter.served_name):
            continue
        others = (world.peers.get(name) for name in placed.targets if name != world.me)
        entries = (peer.entries.get(adapter.key) if peer is not None else None for peer in others)
        if any(e is None or e.state != State.LOADED or e.revision != decision.revision for e in entries):
            found.add(adapter.served_name)
    return frozenset(found)
