"""How soon a freshly started agent acts, on virtual time."""

from __future__ import annotations

import asyncio
import random

from .loop import run
from .pool import SimPool

SETTLE = 5.0


async def _seconds_until_loaded(*, silent_peer: bool) -> float:
    pool = SimPool(random.Random(1))
    pool.adapter("first")
    if silent_peer:
        silent = pool.add_worker()
        await silent.kill_agent()
        silent.engine.kill()
    worker = pool.add_worker()
    began = pool.clock()
    while not worker.engine.adapters:
        await asyncio.sleep(0.05)
        assert pool.clock() - began < 60
    return pool.clock() - began


def test_an_agent_that_hears_everyone_loads_at_once() -> None:
    assert run(_seconds_until_loaded(silent_peer=False)) < 2


def test_an_agent_waits_for_a_silent_peer_so_long_and_no_longer() -> None:
    seconds = run(_seconds_until_loaded(silent_peer=True))
    assert SETTLE <= seconds < SETTLE + 2
