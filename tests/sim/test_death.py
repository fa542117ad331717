"""How long a worker's sudden end costs service, by gossip alone: no API server, a good network, small adapters.

What engine and origin need for themselves is kept small: the budget is the agents'.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from sidecar.model import Distribution

from .loop import run
from .pool import SimPool

BUDGET = 6.0
ONE = Distribution(strategy="fixed", replicas=1)


async def _seconds_without_service(seed: int) -> float:
    rng = random.Random(seed)
    pool = SimPool(rng, "gossip", by_uid=rng.random() < 0.5)
    pool.origin.pace = (0.02, 0.1)
    for index in range(rng.randint(8, 12)):
        pool.adapter(f"lora-{index}", ONE)
    for _ in range(rng.randint(3, 8)):
        pool.add_worker(zone=rng.choice(("a", "b"))).engine.pace = (0.01, 0.05)
    await asyncio.sleep(20 + 10 * rng.random())
    for worker in pool.workers.values():
        worker.backend.fresh = False
    victim = max(pool.workers.values(), key=lambda w: len(w.engine.adapters))
    lost = set(victim.engine.adapters)
    assert lost, "the victim holds something"
    if rng.random() < 0.5:
        pool.air.dark.add(victim.address)
    began = pool.clock()
    victim.engine.kill()
    await victim.kill_agent()
    while lost - {name for w in pool.workers.values() for name in w.engine.adapters}:
        await asyncio.sleep(0.02)
        assert pool.clock() - began < 60, f"seed {seed}: {lost} are loaded nowhere"
    return pool.clock() - began


def _within_the_budget(seeds: range) -> None:
    took = {seed: run(_seconds_without_service(seed)) for seed in seeds}
    late = {seed: round(seconds, 2) for seed, seconds in took.items() if seconds > BUDGET}
    assert not late


def test_a_dead_worker_s_adapters_are_loaded_elsewhere_in_time() -> None:
    _within_the_budget(range(4))


@pytest.mark.slow
def test_so_they_are_with_many_seeds() -> None:
    _within_the_budget(range(4, 200))
