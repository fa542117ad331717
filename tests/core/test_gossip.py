"""Gossip on virtual time: a pool finds itself, news travel, the dead are found, and cost doesn't grow with the pool."""

from __future__ import annotations

import pytest

from sidecar.core.messages import Standing
from sidecar.model import Decision, RemoteFile, State
from tests.core.gossip_pool import Pool, assert_converges

SEEDS = range(2)
REVISION = "sha256:" + "0" * 64


def settled(seed: int, size: int) -> Pool:
    pool = Pool(seed, size)
    assert_converges(pool, 10)
    pool.run(pool.rng.uniform(2, 5))
    return pool


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [2, 3, 10, 20])
def test_a_pool_finds_itself_from_a_few_addresses(seed: int, size: int) -> None:
    pool = Pool(seed, size)
    assert_converges(pool, 4)
    pool.run(20)
    assert pool.converged(), pool.disagreement()
    assert pool.deaths == []


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_joins_later_knows_all_and_is_known_to_all(seed: int) -> None:
    pool = settled(seed, 10)
    pool.start("late")
    assert assert_converges(pool, 5) < 1.5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_change_reaches_everyone_within_a_second(seed: int) -> None:
    pool = settled(seed, 10)
    pool.tell(pool.agents["worker-3"], "ns/a", State.LOADED, revision=REVISION)
    assert not pool.converged()
    assert assert_converges(pool, 5) < 1.0
    pool.tell(pool.agents["worker-3"], "ns/a", None)
    assert assert_converges(pool, 5) < 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_news_too_large_for_a_datagram_are_fetched(seed: int) -> None:
    pool = settled(seed, 10)
    files = tuple(RemoteFile(path=f"part-{n}-of-100.safetensors", size=n, etag="e" * 32) for n in range(100))
    decision = Decision(source_id="0" * 16, refresh=1, revision=REVISION, listing=files)
    pool.tell(pool.agents["worker-3"], "ns/a", State.LOADED, decision=decision)
    pool.tell(pool.agents["worker-3"], "ns/b", State.LOADED)
    assert assert_converges(pool, 5) < 3.0


@pytest.mark.parametrize("seed", SEEDS)
def test_many_changes_at_once_reach_everyone(seed: int) -> None:
    pool = settled(seed, 6)
    for n in range(100):
        pool.tell(pool.agents["worker-1"], f"ns/adapter-{n}", State.PENDING, revision=REVISION, message="waits")
    assert assert_converges(pool, 5) < 3.0
    for n in range(100):
        pool.tell(pool.agents["worker-1"], f"ns/adapter-{n}", None if n % 2 else State.LOADED)
    assert assert_converges(pool, 5) < 3.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_a_killed_agent_is_dead_to_all_within_five_seconds(seed: int, size: int) -> None:
    pool = settled(seed, size)
    pool.stop(pool.agents["worker-1"])
    assert assert_converges(pool, 10) < 5.0
    assert {subject for _, _, subject in pool.deaths} == {"uid-of-worker-1"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_suspicion_alone_moves_nothing(seed: int) -> None:
    pool = settled(seed, 4)
    pool.stop(pool.agents["worker-1"])
    pool.run(5, until=lambda: bool(pool.agents["worker-0"].speaker.gossip.members.suspects))
    assert pool.agents["worker-0"].standing(pool.agents["worker-1"]) is Standing.SUSPECT
    assert "uid-of-worker-1" in pool.agents["worker-0"].alive


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_restarts_is_never_dead(seed: int) -> None:
    pool = settled(seed, 6)
    agent = pool.agents["worker-2"]
    pool.stop(agent)
    pool.run(1.0)
    pool.start("worker-2", uid=agent.uid, address=agent.address, generation=int(pool.now))
    assert assert_converges(pool, 10) < 2.0
    pool.run(10)
    assert pool.deaths == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["worker-2", "a-stranger"])
def test_another_agent_on_a_dead_ones_address_does_not_keep_it_alive(seed: int, name: str) -> None:
    """Same address, with the same name (state lost) or another one: the dead one's UID gets no ack."""
    pool = settled(seed, 6)
    agent = pool.agents["worker-2"]
    pool.stop(agent)
    pool.start(name, uid="another-uid", address=agent.address)
    assert assert_converges(pool, 10) < 6.0
    assert pool.agents["worker-0"].standing(agent) is Standing.DEAD


def test_a_generation_that_is_known_higher_is_outbid() -> None:
    """The clock was set back and the state lost: the pool knows a later process of this agent than itself."""
    pool = settled(1, 5)
    agent = pool.agents["worker-2"]
    pool.stop(agent)
    again = pool.start("worker-2", uid=agent.uid, address=agent.address, generation=17)
    assert_converges(pool, 10)
    assert again.speaker.gossip.me.generation > agent.speaker.gossip.me.generation


def test_the_dead_are_forgotten_and_come_back_by_themselves() -> None:
    pool = settled(1, 4)
    agent = pool.agents["worker-2"]
    others = [other.address for other in pool.running if other is not agent]
    pool.network.split([agent.address], others)
    pool.run(700)
    assert pool.agents["worker-0"].standing(agent) is None
    assert agent.alive.keys() == {agent.uid}
    pool.network.cut.clear()
    assert assert_converges(pool, 60) < 30


def test_what_the_platform_says_is_gone_is_gone_at_once_and_stays_gone() -> None:
    pool = settled(1, 4)
    uids = {agent.uid for agent in pool.running}
    observer = pool.agents["worker-0"]
    membership = observer.speaker.gossip.membership
    membership.set_listed(uids)
    assert observer.alive.keys() == uids
    membership.set_listed(uids - {"uid-of-worker-2"})
    assert "uid-of-worker-2" not in observer.alive
    pool.run(60)
    assert "uid-of-worker-2" not in observer.alive, "the others still tell of it"
    membership.set_listed(uids)
    pool.run(60)
    assert observer.alive.keys() == uids


def test_an_agent_not_listed_yet_counts() -> None:
    pool = settled(1, 4)
    observer = pool.agents["worker-0"]
    observer.speaker.gossip.membership.set_listed({"uid-of-worker-1"})
    pool.run(10)
    assert len(observer.alive) == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_among_its_own_seeds_does_not_ask_itself_for_ever(seed: int) -> None:
    pool = Pool(seed)
    agent = pool.start("worker-0", address="10.0.0.1:8790", seeds=["some-name:8790"])
    pool.at["some-name:8790"] = agent
    pool.run(10)
    calls = agent.calls
    pool.run(100)
    assert agent.calls == calls


def test_idle_cost_does_not_grow_with_the_pool() -> None:
    """Bytes of datagrams and HTTP calls of one worker in a minute."""
    cost = {}
    for size in (5, 20):
        pool = Pool(3, size)
        assert_converges(pool, 10)
        pool.run(100)
        before = [(agent.sent, agent.calls) for agent in pool.running]
        pool.run(60)
        sent = [agent.sent - sent for agent, (sent, _) in zip(pool.running, before, strict=True)]
        calls = [agent.calls - calls for agent, (_, calls) in zip(pool.running, before, strict=True)]
        cost[size] = (sum(sent) / size, sum(calls) / size)
    assert cost[20][0] < cost[5][0] * 1.1
    assert cost[20][1] <= cost[5][1] + 1
    assert cost[20][0] / 60 < 1500
