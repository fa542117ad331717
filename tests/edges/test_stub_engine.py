"""The stub engine does what makes vLLM hard to look after: forgets, reads files again, mixes, dies."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from sidecar.edges.sample_adapter import write_adapter
from sidecar.edges.stub_engine import StubEngine, StubOptions
from tests.edges.scripted import until

LONG = "x" * 200  # more than one block of the prefix cache


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Client:
    """The calls of the API, as (status, document)."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def post(self, path: str, **body: object) -> tuple[int, str]:
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            return response.status, await response.text()

    async def load(self, name: str, path: Path, **more: object) -> int:
        return (await self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more))[0]

    async def unload(self, name: str) -> int:
        return (await self.post("/v1/unload_lora_adapter", lora_name=name))[0]

    async def tokens(self, model: str, prompt: str = "hello", count: int = 8) -> list[int] | int:
        """Tokens, or the status of an error."""
        body = {"model": model, "prompt": prompt, "max_tokens": count, "return_token_ids": True}
        status, text = await self.post("/v1/completions", **body)
        return json.loads(text)["choices"][0]["token_ids"] if status == 200 else status

    async def names(self) -> list[str]:
        async with self.session.get(f"{self.url}/v1/models") as response:
            return [card["id"] for card in (await response.json())["data"]]


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    return [write_adapter(tmp_path / f"a{n}", n) for n in range(4)]


async def test_tokens_tell_base_and_weights_apart(session: aiohttp.ClientSession, adapters: list[Path]) -> None:
    async with StubEngine(StubOptions(max_loras=4)) as stub:
        client = Client(session, stub.url)
        for n, path in enumerate(adapters):
            assert await client.load(f"a{n}", path) == 200
        assert await client.load("twin", adapters[0]) == 200
        outputs = [await client.tokens(name) for name in ("tiny", "a0", "a1", "a2", "a3")]
        assert len({str(output) for output in outputs}) == 5
        assert await client.tokens("twin") == outputs[1]
        assert await client.tokens("tiny") == outputs[0]
        assert await client.tokens("nothing") == 404


async def test_evicted_adapters_are_read_again_and_without_files_the_engine_dies(
    session: aiohttp.ClientSession, adapters: list[Path]
) -> None:
    async with StubEngine(StubOptions(max_loras=1, max_cpu_loras=2)) as stub:
        client = Client(session, stub.url)
        for n in range(3):
            assert await client.load(f"a{n}", adapters[n]) == 200
        first = await client.tokens("a0")  # put out by the third, read again; a1 is out now
        assert isinstance(first, list)
        shutil.rmtree(adapters[0])
        assert await client.tokens("a0") == first  # in memory
        assert await client.names() == ["tiny", "a0", "a1", "a2"]
        assert isinstance(await client.tokens("a1"), list)
        assert isinstance(await client.tokens("a2"), list)
        assert await client.tokens("a0") == 500
        await stub.closed()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.names()


async def test_an_unload_forgets_the_name_and_lets_requests_run(
    session: aiohttp.ClientSession, adapters: list[Path]
) -> None:
    async with StubEngine(StubOptions(token_seconds=0.02)) as stub:
        client = Client(session, stub.url)
        await client.load("a", adapters[0])
        expected = await client.tokens("a")
        request = asyncio.create_task(client.tokens("a"))
        await until(lambda: stub.server.model.running)
        assert await client.unload("a") == 200
        assert await client.tokens("a") == 404
        assert await request == expected


async def test_at_most_max_loras_adapters_run_at_once(session: aiohttp.ClientSession, adapters: list[Path]) -> None:
    async with StubEngine(StubOptions(max_loras=2, max_cpu_loras=4, token_seconds=0.02)) as stub:
        client = Client(session, stub.url)
        for n in range(3):
            await client.load(f"a{n}", adapters[n])
        requests = [asyncio.create_task(client.tokens(f"a{n}")) for n in (0, 0, 1, 2)]
        await until(lambda: stub.server.model.running == 3)
        base = asyncio.create_task(client.tokens("tiny"))
        await until(lambda: stub.server.model.running == 4)
        assert stub.server.model.waiting == 1
        assert all(isinstance(output, list) for output in await asyncio.gather(*requests, base))


@pytest.mark.parametrize(
    ("version", "same_path", "new_path"), [("0.10.2", False, False), ("0.30.0", True, True), ("0.32.0", True, False)]
)
async def test_new_weights_under_an_old_name_meet_the_prefix_cache(
    session: aiohttp.ClientSession,
    adapters: list[Path],
    tmp_path: Path,
    version: str,
    same_path: bool,
    new_path: bool,
) -> None:
    async with StubEngine(StubOptions(version=version, max_loras=4)) as stub:
        client = Client(session, stub.url)
        await client.load("right", adapters[1])
        expected = {prompt: await client.tokens("right", prompt) for prompt in (LONG, "short")}
        for path, stale in ((tmp_path / "moved", new_path), (adapters[0], same_path)):
            await client.load("a", adapters[0])
            await client.tokens("a", LONG)
            await client.unload("a")
            if path == adapters[0]:
                shutil.copytree(adapters[1], path, dirs_exist_ok=True)
            else:
                shutil.copytree(adapters[1], path)
            await client.load("a", path)
            assert (await client.tokens("a", LONG) != expected[LONG]) is stale
            assert await client.tokens("a", "short") == expected["short"]
            await client.unload("a")


async def test_two_adapters_of_one_name_end_the_engine_when_a_third_takes_a_slot(
    session: aiohttp.ClientSession, adapters: list[Path]
) -> None:
    async with StubEngine(StubOptions(max_loras=2, token_seconds=0.02)) as stub:
        client = Client(session, stub.url)
        await client.load("a", adapters[0])
        old = asyncio.create_task(client.tokens("a", count=100))
        await until(lambda: stub.server.model.running == 1)
        await client.unload("a")
        await client.load("a", adapters[1])
        new = asyncio.create_task(client.tokens("a", count=100))
        await until(lambda: stub.server.model.running == 2)
        assert isinstance(await client.tokens("tiny", count=2), list)
        await client.load("b", adapters[2])
        assert await asyncio.gather(old, new) == [500, 500]
        await stub.closed()


async def test_load_inplace_reads_the_files_at_every_step(session: aiohttp.ClientSession, adapters: list[Path]) -> None:
    async with StubEngine(StubOptions(max_loras=4)) as stub:
        client = Client(session, stub.url)
        await client.load("b", adapters[1])
        assert await client.load("a", adapters[0], load_inplace=True) == 200
        shutil.copytree(adapters[1], adapters[0], dirs_exist_ok=True)
        assert await client.tokens("a") == await client.tokens("b")
        shutil.rmtree(adapters[0])
        assert await client.tokens("a") == 500


async def test_faults_come_and_go_over_http(session: aiohttp.ClientSession, adapters: list[Path]) -> None:
    async with StubEngine() as stub:
        client = Client(session, stub.url)
        assert (await client.post("/stub/faults", refuse={"*": "no"}))[0] == 200
        assert await client.load("a", adapters[0]) == 500
        assert (await client.post("/stub/faults", nonsense=1))[0] == 400
        await client.post("/stub/faults", models_status=503)
        async with session.get(f"{stub.url}/v1/models") as response:
            assert response.status == 503
        async with session.delete(f"{stub.url}/stub/faults") as response:
            assert response.status == 200
        await client.post("/stub/faults", lie_on_load=["a"])
        assert await client.load("a", adapters[0]) == 200
        assert await client.names() == ["tiny"]
        async with session.get(f"{stub.url}/stub/calls") as response:
            assert [call["status"] for call in await response.json()] == [500, 200]


async def test_a_load_can_kill_at_once_or_later(session: aiohttp.ClientSession, adapters: list[Path]) -> None:
    async with StubEngine() as stub:
        client = Client(session, stub.url)
        stub.faults.set(die_after_load={"a": 0.05})
        assert await client.load("a", adapters[0]) == 200
        assert "a" in await client.names()
        await stub.closed()
        stub.faults.set(die_after_load={}, die_on_load=["a"])
        await stub.restart()
        assert await client.names() == ["tiny"]
        assert await client.load("a", adapters[0]) == 500
        await stub.closed()


async def test_as_a_process(session: aiohttp.ClientSession, adapters: list[Path]) -> None:
    arguments = ["--port", "0", "--model", "m", "--lora-modules", f"fixed={adapters[0]}", "--max-loras", "2"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidecar.edges.stub_engine", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        client = Client(session, url)
        assert await client.names() == ["m", "fixed"]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_process_whose_engine_dies_ends_with_zero(session: aiohttp.ClientSession) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidecar.edges.stub_engine", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        client = Client(session, (await process.stdout.readline()).decode().strip())
        await client.post("/stub/faults", die_on_load=["*"])
        assert await client.load("a", Path("/nowhere")) == 500
        assert await asyncio.wait_for(process.wait(), 5) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
