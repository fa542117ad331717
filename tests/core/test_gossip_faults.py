"""Gossip under bad networks, frozen agents and wrong clocks: false accusations are few, and quiet brings agreement."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sidecar.core.messages import Standing
from sidecar.model import State
from tests.core.gossip_pool import Agent, Pool, assert_converges

SEEDS = range(2)


def settled(seed: int, size: int) -> Pool:
    pool = Pool(seed, size)
    assert_converges(pool, 10)
    pool.run(pool.rng.uniform(2, 5))
    pool.deaths.clear()
    return pool


def change_something(pool: Pool) -> None:
    state = pool.rng.choice([State.LOADED, State.PENDING, None])
    message = "m" * pool.rng.randrange(300)
    pool.tell(pool.rng.choice(pool.running), f"ns/adapter-{pool.rng.randrange(20)}", state, message=message)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lossy_network_costs_nobody_its_life_and_no_news(seed: int) -> None:
    pool = settled(seed, 8)
    pool.network.loss, pool.network.duplicate, pool.network.delay = 0.3, 0.2, (0.001, 0.3)
    for _ in range(60):
        pool.run(1)
        change_something(pool)
    assert pool.deaths == []
    pool.network.loss = pool.network.duplicate = 0.0
    assert_converges(pool, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_datagrams_blocked_everything_goes_over_http(seed: int) -> None:
    pool = Pool(seed, 8)
    pool.network.udp = False
    assert_converges(pool, 10)
    pool.run(30)
    assert pool.deaths == []
    pool.tell(pool.agents["worker-1"], "ns/a", State.LOADED)
    assert assert_converges(pool, 5) < 2.0
    pool.stop(pool.agents["worker-1"])
    assert assert_converges(pool, 10) < 6.0


@pytest.mark.parametrize("seed", SEEDS)
def test_datagrams_are_used_again_when_they_come_through_again(seed: int) -> None:
    pool = Pool(seed, 4)
    pool.network.udp = False
    pool.run(20)
    members = pool.agents["worker-0"].speaker.gossip.members
    assert {member.udp for member in members.by_uid.values()} == {False}
    pool.network.udp = True
    pool.run(20)
    assert {member.udp for member in members.by_uid.values()} == {True}


@pytest.mark.parametrize("seed", SEEDS)
def test_one_agent_without_datagrams_is_asked_over_http_before_it_is_suspected(seed: int) -> None:
    """A NetworkPolicy that drops UDP to one pod: nobody ever suspects it."""
    pool = settled(seed, 5)
    agent = pool.agents["worker-3"]
    for other in pool.running:
        pool.network.cut_udp.update({(other.address, agent.address), (agent.address, other.address)})
    for _ in range(120):
        pool.run(0.25)
        assert not any(other.standing(agent) is Standing.SUSPECT for other in pool.running)
    assert pool.deaths == []


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_was_asleep_accuses_nobody(seed: int) -> None:
    pool = settled(seed, 6)
    agent = pool.agents["worker-2"]
    pool.freeze(agent, 20)
    pool.run(19.9)
    assert all(other.standing(agent) is Standing.DEAD for other in pool.running if other is not agent)
    pool.deaths.clear()
    pool.run(20)
    assert pool.deaths == []
    assert pool.converged(), pool.disagreement()


@pytest.mark.parametrize("seed", SEEDS)
def test_naps_shorter_than_the_patience_kill_nobody(seed: int) -> None:
    """A small CPU quota: agents that don't run for up to a second, again and again."""
    pool = settled(seed, 6)
    for _ in range(60):
        pool.freeze(pool.rng.choice(pool.running), pool.rng.uniform(0.2, 1.0))
        pool.run(pool.rng.uniform(0.2, 2.0))
    assert pool.deaths == []


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_hears_nobody_kills_nobody_else(seed: int) -> None:
    """One-way partition: what it sends arrives, what is sent to it does not."""
    pool = settled(seed, 8)
    agent = pool.agents["worker-4"]
    others = [other for other in pool.running if other is not agent]
    pool.network.split([other.address for other in others], [agent.address], one_way=True)
    pool.run(30)
    assert [subject for _, observer, subject in pool.deaths if agent.uid not in (observer, subject)] == []
    assert all(other.standing(agent) is Standing.DEAD for other in others)
    pool.network.cut.clear()
    assert_converges(pool, 30)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("apart", [30, pytest.param(3600, marks=pytest.mark.slow)])
def test_two_halves_heal_within_a_minute(seed: int, apart: int) -> None:
    pool = settled(seed, 8)
    addresses = [agent.address for agent in pool.running]
    pool.network.split(addresses[:4], addresses[4:])
    pool.run(apart)
    change_something(pool)
    assert {len(agent.alive) for agent in pool.running} == {4}
    pool.network.cut.clear()
    assert assert_converges(pool, 60) < 30


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clock_outside_the_window_is_named_and_let_in_again_when_it_is_right(seed: int) -> None:
    pool = settled(seed, 5)
    agent = pool.agents["worker-2"]
    agent.wall_offset = 3600.0
    pool.run(20)
    others = [other for other in pool.running if other is not agent]
    assert all(other.standing(agent) is Standing.DEAD for other in others)
    skews = [other.speaker.skewed[agent.uid] for other in others if agent.uid in other.speaker.skewed]
    assert skews
    assert all(abs(skew - 3600) < 1 for skew in skews)
    agent.wall_offset = 0.0
    assert_converges(pool, 20)
    pool.run(20)
    assert not any(other.speaker.skewed for other in others)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clock_inside_the_window_changes_nothing(seed: int) -> None:
    pool = settled(seed, 5)
    pool.agents["worker-2"].wall_offset = -290.0
    pool.run(30)
    assert pool.deaths == []
    assert pool.converged(), pool.disagreement()


def _lose(pool: Pool) -> None:
    pool.network.loss = pool.rng.uniform(0, 0.6)
    pool.network.duplicate = pool.rng.uniform(0, 0.3)


def _slow(pool: Pool) -> None:
    pool.network.delay = (0.001, pool.rng.uniform(0.001, 0.8))


def _cut(pool: Pool) -> None:
    addresses = list(pool.at)
    pool.rng.shuffle(addresses)
    at = pool.rng.randrange(len(addresses))
    pool.network.split(addresses[:at], addresses[at:], one_way=pool.rng.random() < 0.5)


def _heal(pool: Pool) -> None:
    pool.network.cut.clear()


def _freeze(pool: Pool) -> None:
    pool.freeze(pool.rng.choice(pool.running), pool.rng.uniform(0.1, 15))


def _restart(pool: Pool) -> None:
    old: Agent = pool.rng.choice(pool.running)
    pool.stop(old)
    generation = max(old.speaker.gossip.me.generation + 1, int(pool.now))
    kept = pool.rng.random() < 0.7
    pool.start(
        old.name, uid=old.uid if kept else f"uid-{pool.rng.random()}", address=old.address, generation=generation
    )


def _jump(pool: Pool) -> None:
    pool.rng.choice(pool.running).wall_offset = pool.rng.choice([0.0, 100.0, -100.0, 1e4, -1e4])


def _block(pool: Pool) -> None:
    pool.network.udp = pool.rng.random() < 0.5


FAULTS: list[Callable[[Pool], None]] = [_lose, _slow, _cut, _heal, _freeze, _restart, _jump, _block, change_something]


def misfortune(seed: int, steps: int) -> Pool:
    """A pool after `steps` faults of every kind, at random; nothing is broken any more but what it believes."""
    pool = Pool(seed, 7)
    for _ in range(steps):
        pool.rng.choice(FAULTS)(pool)
        pool.run(pool.rng.uniform(0, 6))
    pool.network.loss = pool.network.duplicate = 0.0
    pool.network.delay = (0.001, 0.01)
    pool.network.udp = True
    pool.network.cut.clear()
    for agent in pool.running:
        agent.wall_offset = agent.frozen_until = 0.0
    return pool


@pytest.mark.parametrize("seed", range(4))
def test_after_any_misfortune_quiet_brings_agreement(seed: int) -> None:
    assert_converges(misfortune(seed, 25), 60)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_after_many_misfortunes_quiet_brings_agreement(block: int) -> None:
    for seed in range(1000 + 10 * block, 1000 + 10 * (block + 1)):
        assert_converges(misfortune(seed, 40), 60)
