"""What is wrong is said where people look, and costs nothing else: bad resources, origins, engines and directories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from .processes import BASE, GONE, PoolWorker, ProcessPool, until

pytestmark = pytest.mark.slow


def says(worker: PoolWorker, name: str, state: str, *words: str) -> Any:
    """A condition: the row of `name` has this state, and a message with all these words."""

    async def holds() -> bool:
        row = (await worker.rows()).get(name)
        return row is not None and row["state"] == state and all(w in row["message"] for w in words)

    return holds


async def problems(worker: PoolWorker) -> str:
    _, found = await worker.get("/v1/adapters")
    return "\n".join(f"{p['where']}: {p['message']}" for p in found["problems"])


async def test_bad_resources_and_origins_are_said_and_the_good_one_is_loaded(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1) as pool:
        (worker,) = pool.workers
        pool.apply("good")
        pool.apply("first", servedName="same")
        pool.apply("second", servedName="same")
        pool.apply("greedy", servedName=BASE)
        pool.apply("absent", (tmp_path / "nothing-here").as_uri())
        (tmp_path / "hollow").mkdir()
        pool.apply("empty", (tmp_path / "hollow").as_uri())
        pool.apply("foreign", baseModel="another-model")
        (pool.manifests / "broken.yaml").write_text("apiVersion: [")
        (pool.manifests / "odd.yaml").write_text(
            "apiVersion: lora-sidecar.io/v1alpha1\nkind: Adapter\nmetadata: {name: odd}\n"
            "spec: {baseModel: base-model, source: {uri: 'ftp://host/x'}, colour: blue}\n"
        )
        await until(says(worker, "good", "Loaded"), "the good one to be loaded")
        await until(says(worker, "first", "Loaded"), "the older of two with one name to be loaded")
        await until(says(worker, "second", "Rejected", "same", "default/first"), "the newer to say why")
        await until(says(worker, "greedy", "Rejected", BASE), "who takes the base model's name to say why")
        await until(says(worker, "absent", "Failed", "nothing-here"), "the absent origin to be named")
        await until(says(worker, "empty", "Failed", "hollow"), "the empty origin to be named")
        assert set(await worker.engine.loaded() or {}) == {"good", "same"}
        assert (await worker.rows())["foreign"]["state"] in (None, "")
        told = await problems(worker)
        assert "broken.yaml" in told
        assert "odd.yaml" in told
        assert "ftp" in told or "colour" in told


async def test_a_good_version_stays_in_force_when_the_file_is_spoiled(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1) as pool:
        (worker,) = pool.workers
        pool.apply("a")
        await pool.settled()
        (pool.manifests / "a.yaml").write_text("kind: Adapter\nmetadata: {name: a")

        async def said() -> bool:
            return "a.yaml" in await problems(worker)

        await until(said, "the spoiled file to be named")
        assert set(await worker.engine.loaded() or {}) == {"a"}
        assert await worker.engine.calls("unload") == []


@asynccontextmanager
async def answering(status: int, body: str = "") -> AsyncIterator[tuple[str, list[str]]]:
    """A server that gives every request this answer; yields its URL and the paths that were asked for."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status, text=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


async def test_an_origin_that_denies_access_is_named_and_not_asked_in_a_hurry(tmp_path: Path) -> None:
    body = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    async with answering(403, body) as (url, asked):
        environment = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        environment |= {"AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        async with ProcessPool(tmp_path, 1, environment=environment) as pool:
            (worker,) = pool.workers
            pool.apply("a", "s3://private/a")
            await until(says(worker, "a", "Failed", "s3://private/a"), "the denial to be said")
            message = (await worker.rows())["a"]["message"]
            assert "denied" in message.lower() or "403" in message
            before = len(asked)
            await asyncio.sleep(4)
            assert len(asked) - before <= 2


# -- engines


async def test_an_engine_that_takes_long_is_waited_for_without_hurry(tmp_path: Path) -> None:
    async with answering(503) as (url, asked), ProcessPool(tmp_path, 1, start=False) as pool:
        (worker,) = pool.workers
        worker.flags = {"engine-url": url, "base-model": BASE}
        pool.apply("a")
        await worker.start()
        # Nothing is loaded, but the files are brought, and the platform is told to wait.
        await until(says(worker, "a", "Pending", "503"), "the adapter to wait for the engine")
        before, began = len(asked), asyncio.get_running_loop().time()
        await asyncio.sleep(6)
        seconds = asyncio.get_running_loop().time() - began
        assert 0 < len(asked) - before <= 1.2 * seconds + 2
        assert (await worker.get("/healthz"))[0] == 200
        status, why = await worker.get("/readyz")
        assert status == 503
        assert "engine" in str(why)
        (tmp_path / "origin").rename(tmp_path / "away")
        await worker.agent.end()
        worker.flags = {"base-model": BASE}
        await worker.engine.start()
        await worker.start()
        await until(says(worker, "a", "Loaded"), "the adapter to be loaded from what was fetched before")


async def test_what_cannot_be_remembered_is_said_once_and_costs_no_service(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1) as pool:
        (worker,) = pool.workers
        pool.apply("a")
        await pool.settled()
        kept = worker.adapters_dir / "state/memory.json"
        kept.unlink()
        (kept / "in-the-way").mkdir(parents=True)
        for name in ("b", "c", "d"):
            pool.apply(name)
            await until(says(worker, name, "Loaded"), "the adapter to be loaded all the same")
        assert "state/memory.json" in await problems(worker)
        assert worker.agent.log.count("state_not_saved") == 1
        (kept / "in-the-way").rmdir()
        kept.rmdir()

        async def forgotten() -> bool:
            return await problems(worker) == ""

        await until(forgotten, "the memory to be kept again")


async def test_an_engine_that_answers_no_more_is_named_until_it_does(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1) as pool:
        (worker,) = pool.workers
        pool.apply("a")
        await pool.settled()
        assert await problems(worker) == ""
        await worker.engine.kill()

        async def said(words: str) -> bool:
            return words in await problems(worker)

        await until(lambda: said("no connection"), "the engine's absence to be said")
        await worker.engine.start()
        await until(says(worker, "a", "Loaded"), "the adapter to be loaded again")
        assert await problems(worker) == ""


async def test_a_wrong_key_is_named_and_a_right_one_needs_no_restart(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1, start=False) as pool:
        (worker,) = pool.workers
        key = tmp_path / "key"
        key.write_text("not-the-one\n")
        worker.engine.flags = ["--api-key", "right"]
        worker.flags = {"engine-api-key-file": str(key), "base-model": BASE}
        await worker.engine.start()
        pool.apply("a")
        await worker.start()
        await until(says(worker, "a", "Pending", "unauthorized"), "the wrong key to be named")
        assert "not-the-one" not in (await worker.rows())["a"]["message"]
        assert (await worker.get("/healthz"))[0] == 200
        key.write_text("right\n")
        await until(says(worker, "a", "Loaded"), "the right key to be used")
        assert await worker.engine.answer("a")


async def test_an_engine_that_takes_no_adapters_at_run_time_says_how_it_would(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1, start=False) as pool:
        (worker,) = pool.workers
        worker.engine.flags = ["--no-runtime-updating"]
        await worker.engine.start()
        pool.apply("a")
        await worker.start()
        await until(says(worker, "a", "Failed", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"), "the setting to be named")


async def test_a_load_that_hangs_keeps_neither_the_agent_nor_the_other_adapters(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1) as pool:
        (worker,) = pool.workers
        pool.apply("before")
        await pool.settled()
        await worker.engine.misbehave(hang_load=["bad"])
        pool.apply("bad")
        await until(says(worker, "bad", "Loading"), "the load to begin")
        for name in ("x", "y"):
            pool.apply(name)
        pool.delete("before")

        async def others() -> bool:
            assert (await worker.get("/healthz"))[0] == 200
            return set(await worker.engine.loaded() or {}) == {"x", "y"}

        await until(others, "the others to be loaded and unloaded as wanted", 40)
        await worker.engine.behave()
        await pool.settled()


async def test_an_unload_that_hangs_keeps_neither_the_agent_nor_the_other_adapters(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1) as pool:
        (worker,) = pool.workers
        pool.apply("bad", drainSeconds=0)
        pool.apply("a", drainSeconds=0)
        await pool.settled()
        await worker.engine.misbehave(hang_unload=["bad"])
        pool.delete("bad")
        await asyncio.sleep(1)
        pool.delete("a")
        pool.apply("b")

        async def others() -> bool:
            assert (await worker.get("/healthz"))[0] == 200
            return set(await worker.engine.loaded() or {}) == {"bad", "b"}

        await until(others, "the others to be loaded and unloaded as wanted", 20)
        await worker.engine.behave()
        await pool.settled()


async def test_an_engine_that_dies_of_one_adapter_keeps_the_others(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 1) as pool:
        (worker,) = pool.workers
        pool.apply("good")
        await pool.settled()
        await worker.engine.misbehave(die_on_load=["bad"])
        pool.apply("bad")
        deaths = 0
        while deaths < 2:
            await until(lambda: _down(worker), "the engine to die")
            deaths += 1
            await worker.engine.start()
            await worker.engine.misbehave(die_on_load=["bad"])
        await until(says(worker, "bad", "Rejected", "died"), "the poison to be rejected")
        await until(says(worker, "good", "Loaded"), "the good one to be loaded again")
        assert await worker.engine.answer("good")
        assert await worker.engine.loaded() is not None


async def _down(worker: PoolWorker) -> bool:
    return await worker.engine.loaded() is None


# -- directories


async def test_a_directory_in_use_names_its_holder(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 2, start=False) as pool:
        first, second = pool.workers
        await first.engine.start()
        await first.start()
        await until(lambda: _serves(first), "the first agent to start")
        second.flags = {"adapters-dir": str(first.adapters_dir)}
        await second.start()
        assert await second.agent.code() == 2
        assert first.name in second.agent.log
        assert str(first.adapters_dir) in second.agent.log


async def _serves(worker: PoolWorker) -> bool:
    try:
        return (await worker.get("/healthz"))[0] == 200
    except GONE:
        return False


@pytest.mark.parametrize("directory", ["/proc/lora-sidecar", "{tmp}/no/such/parent", "{tmp}/a-file"])
async def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, directory: str) -> None:
    async with ProcessPool(tmp_path, 1, start=False) as pool:
        (worker,) = pool.workers
        (tmp_path / "a-file").write_text("")
        directory = directory.format(tmp=tmp_path)
        worker.flags = {"adapters-dir": directory}
        await worker.start()
        assert await worker.agent.code() == 2
        assert directory in worker.agent.log
        assert "Traceback" not in worker.agent.log


async def test_two_agents_with_one_name_serve_as_one(tmp_path: Path) -> None:
    async with ProcessPool(tmp_path, 3, start=False) as pool:
        first, other, second = pool.workers
        for worker in pool.workers:
            await worker.engine.start()
        for worker in (first, other):
            await worker.start()
        pool.apply("a", drainSeconds=0)
        await until(lambda: _loaded(first, other), "the first two to load")
        await asyncio.sleep(1.1)  # generations are seconds: who starts later must be the later one
        second.flags = {"name": first.name}
        await second.start()

        async def said() -> bool:
            return await _serves(second) and "two live agents have this name" in await problems(second)

        await until(said, "the second of the name to say so")
        await asyncio.sleep(3)
        assert await second.engine.loaded() == {}
        assert set(await first.engine.loaded() or {}) == {"a"}
        await first.agent.end()
        await until(lambda: _loaded(second), "the second to take over when the first is gone")


async def _loaded(*workers: PoolWorker) -> bool:
    return all([set(await w.engine.loaded() or {}) == {"a"} for w in workers])
