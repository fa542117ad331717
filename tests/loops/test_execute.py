"""Carrying out what was planned, when the plan changes meanwhile."""

from __future__ import annotations

import asyncio
import random

import pytest

from sidecar.core.memory import Memory
from sidecar.core.world import Swap, Unload
from sidecar.loops.engine_watch import EngineWatch
from sidecar.loops.execute import Executor
from sidecar.loops.fetches import Acting, Fetches
from sidecar.model import EngineView
from tests.core.worlds import NOW, R1
from tests.loops.engine import UnaskedEngine
from tests.sim.world import Disk, Origin, Silent, SimFetcher


class Engine(UnaskedEngine):
    """Notes what is taken from it."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []

    async def unload(self, name: str) -> None:
        self.unloaded.append(name)

    async def limits(self) -> None:
        return None

    async def look(self) -> EngineView:
        return EngineView(process="p", version="0.32.0", base_models=(), adapters={}, at=NOW)


@pytest.mark.parametrize(
    ("after", "gone"),
    [
        ({"a": NOW - 5}, ["a"]),  # the drain went on
        ({}, []),  # the name was wanted here again
        ({"a": NOW}, []),  # it was, and then not again: routed to a moment ago
    ],
)
async def test_a_copy_goes_only_at_the_end_of_the_drain_that_its_unload_was_planned_for(
    after: dict[str, float], gone: list[str]
) -> None:
    engine, memory, ended = Engine(), Memory(drains={"a": NOW - 5}), asyncio.Event()

    async def save() -> None:
        pass

    async def confirm(action: Unload | Swap) -> bool:
        memory.drains = dict(after)
        return True

    def clock() -> float:
        return NOW

    acting = Acting(
        memory=memory, clock=clock, meter=Silent(), save=save, changed=ended.set, rng=random.Random(7)
    )  # fmt: skip
    disk = Disk()
    fetches = Fetches(acting, SimFetcher(Origin(), disk, random.Random(7)), concurrency=1, tell_above=None)
    watch = EngineWatch(engine, clock, interval=1.0, up_window=3.0)
    executor = Executor(acting, engine, watch, disk, fetches, confirm=confirm)
    executor.start(Unload(name="a", revision=R1, key="default/a", handover=True), None)
    await asyncio.wait_for(ended.wait(), 10)
    assert engine.unloaded == gone
    assert gone or memory.drains == after
