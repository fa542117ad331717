"""Three real agents with a gossip key: who is there, who isn't, who is no peer; and keys that change."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.bench.agents import AgentPool
from tests.pool.gossiping import ONE, TWO, counted, eventually, holders, key_file, problems, rows, states

pytestmark = pytest.mark.slow

NO_KEY = {"gossip-key-file": ""}
ALL = {"worker-0": "alive", "worker-1": "alive", "worker-2": "alive"}


async def everybody_alive(pool: AgentPool) -> bool:
    return all([await states(pool, agent) == ALL for agent in pool.agents])


async def test_placement_is_the_same_and_a_killed_workers_adapters_are_soon_elsewhere(tmp_path: Path) -> None:
    names = [f"adapter-{number}" for number in range(9)]
    placed: list[dict[str, set[str]]] = []
    for flags in ({}, {"gossip-key-file": key_file(tmp_path / "key", ONE)}):
        async with AgentPool(3, capacity=50, flags=flags) as pool:
            await pool.settle()
            for name in names:
                pool.apply(name, pool.write_adapter(name), distribution={"strategy": "fixed", "replicas": 1})
            await pool.until(lambda p=pool: all(holders(p, n) for n in names), "nine adapters")  # type: ignore[misc]  # mypy can't infer a lambda with a default
            placed.append({name: holders(pool, name) for name in names})
            if not flags:
                continue
            row = (await rows(pool, pool.agents[0]))["worker-1"]
            assert row["state"] == "alive"
            assert row["udp"] is not False
            assert row["since"] <= row["heard"]
            victim = max(pool.agents, key=lambda agent: len(agent.loaded))
            left = [agent for agent in pool.agents if agent is not victim]
            await victim.kill()
            took = await pool.until(
                lambda p=left: all(any(n in a.loaded for a in p) for n in names),  # type: ignore[misc]  # as above
                "the dead worker's adapters",
            )
            assert took < 6
            assert (await states(pool, left[0]))[victim.name] in ("suspect", "dead")
    assert placed[0] == placed[1]


async def test_a_key_is_replaced_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "key"
    async with AgentPool(3, flags={"gossip-key-file": key_file(path, ONE)}) as pool:
        await pool.settle()
        seen: set[str] = set()

        async def watch() -> None:
            while True:
                for agent in pool.agents:
                    seen.update((await states(pool, agent)).values())
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        for keys in ((ONE, TWO), (TWO, ONE), (TWO,)):
            key_file(path, *keys)
            # Every agent has read it a second later; a failure would show after another two.
            await asyncio.sleep(3.5)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        assert seen == {"alive"}
        assert [
            await counted(pool, a, 'lora_sidecar_gossip_dropped_total{reason="stranger"}') for a in pool.agents
        ] == [0.0] * 3


async def test_an_agent_with_another_key_is_no_peer_and_is_named(tmp_path: Path) -> None:
    right, wrong = key_file(tmp_path / "right", ONE), key_file(tmp_path / "wrong", TWO)
    async with AgentPool(3, flags={"gossip-key-file": right}, each={2: {"gossip-key-file": wrong}}) as pool:
        one, two, stranger = pool.agents

        async def named() -> bool:
            return "another key" in await problems(pool, one) and "another key" in await problems(pool, stranger)

        await eventually(named, 20, "the wrong key")
        assert "worker-2" in await problems(pool, one)
        assert await states(pool, one) == {"worker-0": "alive", "worker-1": "alive", stranger.address: "unknown"}
        assert await counted(pool, one, 'lora_sidecar_gossip_dropped_total{reason="stranger"}') > 0
        pool.apply("shared", pool.write_adapter("shared"))
        await pool.until(lambda: {"worker-0", "worker-1"} <= holders(pool, "shared"), "an adapter")
        assert "worker-1" not in await problems(pool, one)
        assert two.loaded == {"shared"}


async def test_agents_with_and_without_a_key_know_each_other(tmp_path: Path) -> None:
    """As in a rollout: one has the key, two don't yet; then one of them is started anew and has it."""
    key = key_file(tmp_path / "key", ONE)
    names = [f"adapter-{number}" for number in range(6)]
    async with AgentPool(3, capacity=50, flags={"gossip-key-file": key}, each={1: NO_KEY, 2: NO_KEY}) as pool:
        await pool.settle()
        for name in names:
            pool.apply(name, pool.write_adapter(name), distribution={"strategy": "fixed", "replicas": 2})
        await pool.until(lambda: all(len(holders(pool, n)) == 2 for n in names), "two copies each")
        assert "worker-1, worker-2 don't speak gossip" in await problems(pool, pool.agents[0])
        before = {name: holders(pool, name) for name in names}
        again = pool.agents[1]
        assert again.process is not None
        again.process.terminate()
        await again.process.wait()
        again.flags = {}
        await pool.start(again)

        async def by_gossip() -> bool:
            found = await rows(pool, pool.agents[0])
            return found["worker-1"].get("udp") is True and set((await states(pool, again)).values()) == {"alive"}

        await eventually(by_gossip, 20, "the new one's gossip")
        await pool.until(lambda: {n: holders(pool, n) for n in names} == before, "all as it was")
        text = await problems(pool, pool.agents[0])
        assert "worker-2 don't speak gossip" in text
        assert "worker-1, worker-2" not in text


async def test_a_key_that_appears_later_is_said_and_not_used(tmp_path: Path) -> None:
    path = tmp_path / "key"
    async with AgentPool(2, flags={"gossip-key-file": str(path)}) as pool:
        await pool.settle()
        assert "gossip is off" in await problems(pool, pool.agents[0])
        key_file(path, ONE)

        async def said() -> bool:
            return "next start" in await problems(pool, pool.agents[0])

        await eventually(said, 20, "the key")
        assert set((await states(pool, pool.agents[0])).values()) == {"alive"}
