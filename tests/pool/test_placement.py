"""Three agents beside three engines place as the rules say, and keep the laws, whatever happens to processes."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from .processes import ProcessPool, Watch, until

pytestmark = pytest.mark.slow

FIXED: dict[str, Any] = {"strategy": "fixed", "replicas": 2}
THIRD: dict[str, Any] = {"strategy": "percentage", "percentage": 34}


def thirty(pool: ProcessPool) -> None:
    """Thirty manifests: ten for all workers, ten for two, ten for 34 %."""
    for i in range(10):
        pool.apply(f"all-{i}", drainSeconds=0)
        pool.apply(f"two-{i}", drainSeconds=0, distribution=FIXED)
        pool.apply(f"third-{i}", drainSeconds=0, distribution=THIRD)


async def test_thirty_manifests_are_placed_as_the_rules_say(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 3) as pool:
        thirty(pool)
        await pool.settled()
        placed = pool.placement()
        assert {len(placed[n]) for n in placed if n.startswith("all")} == {3}
        assert {len(placed[n]) for n in placed if n.startswith("two")} == {2}
        assert {len(placed[n]) for n in placed if n.startswith("third")} == {1}
        for worker in pool.workers:
            for name, row in (await worker.rows()).items():
                assert set(row["targets"]) == placed[name]
                assert (row["state"] == "Loaded") == row["routed"] == (worker.name in placed[name])
            # Nobody did anything in vain: what is held was loaded once, and nothing was unloaded.
            held = await worker.engine.loaded()
            assert sorted(await worker.engine.calls("load")) == sorted(held or {})
            assert await worker.engine.calls("unload") == []


async def test_an_engine_that_forgets_everything_is_filled_again_without_a_byte_fetched(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 3) as pool:
        thirty(pool)
        await pool.settled()
        worker = pool.workers[1]
        before = await worker.engine.loaded()
        fetched = await worker.metric('lora_sidecar_fetches_total{result="ok"}')
        await worker.engine.kill()
        # Too short for the others to take over; the files stay where they are, and the origin is gone.
        (tmp_path / "origin").rename(tmp_path / "away")
        await worker.engine.start()
        took = await until(lambda: _holds(worker.engine, before), "the engine to hold what it held")
        assert took < 10
        assert await worker.metric('lora_sidecar_fetches_total{result="ok"}') == fetched
        assert await worker.metric("lora_sidecar_engine_restarts_total") == 1
        await pool.settled()


async def _holds(engine: Any, what: Any) -> bool:
    return bool(await engine.loaded() == what)


async def test_an_edited_manifest_moves_its_adapter_make_before_break(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 3) as pool, Watch(pool):
        pool.apply("a", drainSeconds=0, distribution={"strategy": "fixed", "replicas": 1})
        pool.apply("b", drainSeconds=0)
        await pool.settled()
        pool.apply("a", drainSeconds=0, distribution=FIXED)
        pool.apply("b", drainSeconds=0, distribution=THIRD)
        await pool.settled()
        pool.apply("a", drainSeconds=0, distribution={"strategy": "fixed", "replicas": 0})
        await pool.ready()
        await until(lambda: _nowhere(pool, "a"), "nobody to hold what is wanted nowhere")
        await until(lambda: _no_targets(pool, "a"), "everybody to know that it is wanted nowhere")
        pool.apply("a", drainSeconds=0)
        await pool.settled()


async def _no_targets(pool: ProcessPool, name: str) -> bool:
    rows = [await w.rows() for w in pool.workers]
    return all(name in each and each[name]["targets"] == [] for each in rows)


async def _nowhere(pool: ProcessPool, name: str) -> bool:
    return not any(name in names for names in (await pool.held()).values())


async def test_a_manifest_deleted_while_all_agents_are_down_is_unloaded_when_they_start(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 3) as pool:
        for name in ("a", "b", "c"):
            pool.apply(name, drainSeconds=0)
        await pool.settled()
        await asyncio.gather(*(w.agent.end() for w in pool.workers))
        pool.delete("b")
        held = await pool.held()
        assert all(set(names) == {"a", "b", "c"} for names in held.values())
        await asyncio.gather(*(w.start() for w in pool.workers))
        await pool.settled()
        for worker in pool.workers:
            assert await worker.engine.calls("unload") == ["b"]
            assert len(await worker.engine.calls("load")) == 3


@pytest.mark.parametrize("seed", [1, 2])
async def test_killed_at_any_moment_and_started_again_the_pool_comes_to_the_same_end(tmp_path: Path, seed: int) -> None:
    """SIGKILL to agents while adapters come, change and go: no copy that is wanted is ever lost."""
    rng = random.Random(seed)
    async with ProcessPool(tmp_path, 3) as pool, Watch(pool):
        thirty(pool)
        for round_ in range(6):
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            worker = rng.choice(pool.workers)
            await worker.agent.end()
            name = rng.choice(sorted(pool.wanted))
            kind = rng.choice(("edit", "delete", "update", "add"))
            if kind == "delete":
                pool.delete(name)
            elif kind == "add":
                pool.apply(f"new-{round_}", drainSeconds=0, distribution=FIXED)
            elif kind == "edit":
                pool.apply(
                    name, pool.wanted[name]["source"]["uri"], drainSeconds=0, distribution=rng.choice((FIXED, THIRD))
                )
            else:
                distribution = {k: v for k, v in pool.wanted[name].items() if k == "distribution"}
                pool.apply(name, pool.content(f"{name}-{round_}"), drainSeconds=0, **distribution)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            await worker.start()
        await pool.settled(120)


async def test_the_seed_numbers_of_four_workers(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 4) as pool:
        pool.apply("ten", distribution={"strategy": "fixed", "replicas": 10})
        pool.apply("half", distribution={"strategy": "percentage", "percentage": 50})
        pool.apply("tenth", distribution={"strategy": "percentage", "percentage": 10})
        pool.apply("every")
        await pool.settled()
        assert {n: len(at) for n, at in pool.placement().items()} == {"ten": 4, "half": 2, "tenth": 1, "every": 4}


async def test_an_agent_that_is_told_to_end_lets_go_of_a_load_and_a_download_that_hang(tmp_path: Path) -> None:
    """Both go on for minutes; and what was begun is found out when it starts again."""
    async with silent() as url, ProcessPool(tmp_path, 1, flags={"allow-http": "true"}) as pool:
        (worker,) = pool.workers
        await worker.engine.misbehave(hang_load=["hangs"])
        pool.apply("hangs")
        pool.apply("slow", f"{url}/adapter.tar.gz")

        async def busy() -> bool:
            rows = await worker.rows()
            return {n: r["state"] for n, r in rows.items()} == {"hangs": "Loading", "slow": "Downloading"}

        await until(busy, "a load and a download to hang")
        began = asyncio.get_running_loop().time()
        assert await worker.agent.end(signal.SIGTERM) == 0
        assert asyncio.get_running_loop().time() - began < 2.0
        await worker.engine.behave()
        pool.delete("slow")
        await worker.start()
        await pool.settled()


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """A server that takes connections and never answers; yields its URL."""
    ended = asyncio.Event()

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        ended.set()
        server.close()
        await server.wait_closed()


async def test_an_agent_that_is_told_to_end_ends_within_two_seconds_and_leaves_its_adapters(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1) as pool:
        pool.apply("a")
        await pool.settled()
        (worker,) = pool.workers
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            began = loop.time()
            assert await worker.agent.end(number) == 0
            assert loop.time() - began < 2.0
            assert set(await worker.engine.loaded() or {}) == {"a"}
            await worker.start()
            await pool.ready()
