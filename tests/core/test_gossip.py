"""Gossip on virtual time: it converges after quiet, finds the dead, and accuses few who live."""

from __future__ import annotations

import pytest

from sidecar.model import State
from tests.core.gossip_pool import Pool

SEEDS = range(8)


def assert_converges(pool: Pool, within: float) -> float:
    took = pool.run(within, until=pool.converged)
    assert pool.converged(), pool.disagreement()
    return took


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [2, 3, 10])
def test_a_pool_finds_itself(seed: int, size: int) -> None:
    pool = Pool(seed, size)
    assert_converges(pool, 10)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_change_reaches_everyone_within_a_second(seed: int) -> None:
    pool = Pool(seed, 10)
    assert_converges(pool, 10)
    pool.run(3)
    pool.agents["worker-3"].tell("ns/a", State.LOADED, pool.now, revision="sha256:" + "0" * 64)
    pool._wake(pool.agents["worker-3"])
    assert assert_converges(pool, 5) < 1.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_a_killed_agent_is_dead_to_all_within_five_seconds(seed: int, size: int) -> None:
    pool = Pool(seed, size)
    assert_converges(pool, 10)
    pool.run(pool.rng.uniform(2, 5))
    pool.stop(pool.agents["worker-1"])
    assert assert_converges(pool, 10) < 5.5
