"""The engine's edge against the stub engine: what it makes of a vLLM that works, and of one that doesn't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from sidecar.core.dialect_vllm import Limits
from sidecar.edges.engine import VllmEngine
from sidecar.edges.engine_url import base_url
from sidecar.edges.sample_adapter import write_adapter
from sidecar.edges.stub_engine import StubEngine, StubOptions
from sidecar.model import BaseModel
from sidecar.ports import (
    REASON_ALREADY_LOADED,
    REASON_BASE_MODEL,
    REASON_NOT_VISIBLE,
    REASON_OUT_OF_MEMORY,
    REASON_REFUSED,
    REASON_RUNTIME_DISABLED,
    REASON_UNAUTHORIZED,
    Engine,
    EngineDisconnected,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from sidecar.settings import Settings
from tests.edges.scripted import until

OPTIONS = StubOptions(model="/models/tiny", served_names=("tiny", "alias"), max_loras=2, max_cpu_loras=3)


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def stub() -> AsyncIterator[StubEngine]:
    async with StubEngine(OPTIONS) as stub:
        yield stub


@pytest.fixture
def engine(session: aiohttp.ClientSession, stub: StubEngine, clock: Clock) -> VllmEngine:
    return VllmEngine(session, Settings(engine_url=stub.url), clock)


@pytest.fixture
def good(tmp_path: Path) -> str:
    return str(write_adapter(tmp_path / "good", 1))


async def complete(session: aiohttp.ClientSession, url: str, model: str, prompt: str = "hello") -> tuple[int, object]:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "return_token_ids": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        document = await response.json()
        return response.status, document["choices"][0]["token_ids"] if response.status == 200 else document


def fits_the_port(engine: VllmEngine) -> Engine:
    """mypy proves here that the edge is what the loops expect."""
    return engine


async def test_load_serve_unload(
    engine: VllmEngine, stub: StubEngine, session: aiohttp.ClientSession, good: str
) -> None:
    view = await engine.look()
    assert view.base_models == tuple(BaseModel(id=name, root="/models/tiny") for name in ("tiny", "alias"))
    assert (view.adapters, view.version, view.at) == ({}, "0.32.0", 1_000.0)
    assert view.process == repr(stub.server.model.started)

    await engine.load("org/a:1", good)
    assert (await engine.look()).adapters == {"org/a:1": good}
    status, tokens = await complete(session, stub.url, "org/a:1")
    assert status == 200
    assert (status, tokens) != await complete(session, stub.url, "tiny")

    await engine.unload("org/a:1")
    assert (await engine.look()).adapters == {}
    await engine.unload("org/a:1")  # gone already: success
    assert [(call.kind, call.status) for call in stub.server.calls] == [("load", 200), ("unload", 200), ("unload", 404)]


async def test_load_inplace_is_never_sent(engine: VllmEngine, stub: StubEngine, good: str) -> None:
    await engine.load("a", good)
    await engine.unload("a")
    await engine.load("a", good)
    assert not stub.server.loras["a"].inplace


async def test_a_name_that_is_already_loaded_from_our_path_is_success(
    engine: VllmEngine, stub: StubEngine, good: str, tmp_path: Path
) -> None:
    await engine.load("a", good)
    await engine.load("a", good)
    other = str(write_adapter(tmp_path / "other", 2))
    with pytest.raises(EngineRefused, match=f"already serves 'a' from {good}") as refused:
        await engine.load("a", other)
    assert refused.value.reason == REASON_ALREADY_LOADED
    assert stub.server.loras["a"].path == good


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"r": 64}, r"LoRA rank 64 is greater than max_lora_rank 16\. Start vLLM with --max-lora-rank 64\."),
        ({"use_dora": True}, r"vLLM does not yet support DoRA\."),
    ],
)
async def test_a_refusal_carries_the_engines_reason(
    engine: VllmEngine, tmp_path: Path, config: dict[str, object], text: str
) -> None:
    with pytest.raises(EngineRefused, match=text) as refused:
        await engine.load("a", str(write_adapter(tmp_path / "bad", 1, config=config)))
    assert refused.value.reason == REASON_REFUSED


async def test_the_name_of_a_base_model(engine: VllmEngine, good: str) -> None:
    with pytest.raises(EngineRefused, match=r"conflicts with a served base model.*spec\.servedName") as refused:
        await engine.load("alias", good)
    assert refused.value.reason == REASON_BASE_MODEL


async def test_no_memory(engine: VllmEngine, stub: StubEngine, good: str) -> None:
    stub.faults.set(refuse={"a": "CUDA out of memory. Tried to allocate 20.00 MiB"})
    with pytest.raises(EngineRefused, match="CUDA out of memory") as refused:
        await engine.load("a", good)
    assert refused.value.reason == REASON_OUT_OF_MEMORY


async def test_files_that_only_the_engine_cannot_see(engine: VllmEngine, stub: StubEngine, good: str) -> None:
    stub.faults.set(hide=[good])
    with pytest.raises(EngineRefused, match="mount the same volume at the same path") as refused:
        await engine.load("a", good)
    assert refused.value.reason == REASON_NOT_VISIBLE


async def test_files_that_nobody_can_see(engine: VllmEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match=r"adapter_config\.json doesn't exist") as refused:
        await engine.load("a", str(tmp_path / "missing"))
    assert refused.value.reason == REASON_REFUSED


async def test_runtime_updating_disabled(session: aiohttp.ClientSession, clock: Clock, good: str) -> None:
    async with StubEngine(replace(OPTIONS, runtime_updating=False, lora_modules=(("fixed", good),))) as stub:
        engine = VllmEngine(session, Settings(engine_url=stub.url), clock)
        for call in (engine.load("a", good), engine.unload("a")):
            with pytest.raises(EngineRefused, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True") as refused:
                await call
            assert refused.value.reason == REASON_RUNTIME_DISABLED
        assert (await engine.look()).adapters == {"fixed": good}


async def test_older_answers_mean_the_same(
    session: aiohttp.ClientSession, clock: Clock, good: str, tmp_path: Path
) -> None:
    async with StubEngine(replace(OPTIONS, version="0.9.2")) as stub:
        engine = VllmEngine(session, Settings(engine_url=stub.url), clock)
        await engine.load("a", good)
        await engine.load("a", good)
        await engine.unload("nothing")
        with pytest.raises(EngineRefused, match="greater than max_lora_rank"):
            await engine.load("b", str(write_adapter(tmp_path / "b", 1, rank=32)))


async def test_the_api_key_is_read_again_when_its_file_changes(
    session: aiohttp.ClientSession, clock: Clock, good: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    async with StubEngine(replace(OPTIONS, api_keys=("first-key", "second-key"))) as stub:
        engine = VllmEngine(session, Settings(engine_url=stub.url, engine_api_key_file=str(file)), clock)
        with pytest.raises(EngineRefused, match="key can't be read: No such file") as refused:
            await engine.look()
        assert refused.value.reason == REASON_UNAUTHORIZED
        file.write_text("a wrong key\n")
        with pytest.raises(EngineRefused, match="must hold one key"):
            await engine.look()
        file.write_text("wrong-key\n")
        with pytest.raises(EngineRefused, match=f"refuses the key in --engine-api-key-file {file}") as refused:
            await engine.look()
        assert "wrong-key" not in str(refused.value)
        file.write_text("first-key\n")
        await engine.look()
        file.write_text("second-key")
        await engine.load("a", good)
        file.unlink()  # a Secret being swapped
        assert (await engine.look()).adapters == {"a": good}


async def test_without_a_key_the_flag_is_named(session: aiohttp.ClientSession, clock: Clock, good: str) -> None:
    async with StubEngine(replace(OPTIONS, api_keys=("k" * 8,))) as stub:
        engine = VllmEngine(session, Settings(engine_url=stub.url), clock)
        for call in (engine.look(), engine.load("a", good), engine.unload("a")):
            with pytest.raises(EngineRefused, match="--engine-api-key-file") as refused:
                await call
            assert refused.value.reason == REASON_UNAUTHORIZED


async def test_a_load_that_times_out_may_still_take_effect(
    session: aiohttp.ClientSession, stub: StubEngine, clock: Clock, good: str
) -> None:
    engine = VllmEngine(session, Settings(engine_url=stub.url, load_timeout=0.1, unload_timeout=0.1), clock)
    stub.faults.set(hang_load=["a"])
    with pytest.raises(EngineTimeout, match="may still take effect"):
        await engine.load("a", good)
    assert (await engine.look()).adapters == {}  # still answers while it hangs
    with pytest.raises(EngineTimeout):
        await engine.unload("a")  # vLLM's own lock on the name
    stub.faults.set(hang_load=[])
    await until(lambda: len(stub.server.calls) == 2)
    # Load, then the unload that waited for it: both took effect after their callers had given up.
    assert [(call.kind, call.status) for call in stub.server.calls] == [("load", 200), ("unload", 200)]
    assert engine.contradiction is None


async def test_one_load_at_a_time_and_one_call_per_name(
    session: aiohttp.ClientSession, stub: StubEngine, clock: Clock, good: str
) -> None:
    engine = VllmEngine(session, Settings(engine_url=stub.url), clock)
    stub.faults.set(hang_load=["a"])
    first = asyncio.create_task(engine.load("a", good))
    await until(lambda: stub.server.requests["/v1/load_lora_adapter"])
    second = asyncio.create_task(engine.load("b", good))
    third = asyncio.create_task(engine.unload("a"))
    await engine.unload("c")  # another name's unload need not wait
    await engine.look()
    assert stub.server.requests["/v1/load_lora_adapter"] == 1
    assert stub.server.requests["/v1/unload_lora_adapter"] == 1
    stub.faults.clear()
    await asyncio.gather(first, second, third)
    assert set(stub.server.loras) == {"b"}


async def test_who_waits_too_long_for_a_turn_has_sent_nothing(
    session: aiohttp.ClientSession, stub: StubEngine, clock: Clock, good: str
) -> None:
    engine = VllmEngine(session, Settings(engine_url=stub.url, unload_timeout=0.1), clock)
    stub.faults.set(hang_load=["a"])
    hung = asyncio.create_task(engine.load("a", good))
    await until(lambda: stub.server.requests["/v1/load_lora_adapter"])
    with pytest.raises(EngineUnavailable, match="not sent"):
        await engine.unload("a")
    assert stub.server.requests["/v1/unload_lora_adapter"] == 0
    stub.faults.clear()
    await hung


async def test_a_restart_shows_as_another_process(engine: VllmEngine, stub: StubEngine, good: str) -> None:
    await engine.load("a", good)
    before = await engine.look()
    await stub.stop()
    with pytest.raises(EngineUnavailable, match="no connection"):
        await engine.look()
    with pytest.raises(EngineUnavailable, match="no connection"):
        await engine.load("b", good)
    await stub.restart()
    after = await engine.look()
    assert after.process not in (None, before.process)
    assert after.adapters == {}


async def test_a_restart_between_two_looks_shows_by_the_names_it_lost(
    engine: VllmEngine, stub: StubEngine, good: str
) -> None:
    await engine.load("a", good)
    before = await engine.look()
    await stub.restart()
    assert (await engine.look()).process not in (None, before.process)


async def test_a_restart_that_loses_no_name_shows_within_ten_seconds(
    engine: VllmEngine, stub: StubEngine, clock: Clock
) -> None:
    before = await engine.look()
    await stub.restart()
    asked = stub.server.requests["/metrics"]
    clock.now += 9.9
    assert (await engine.look()).process == before.process
    assert stub.server.requests["/metrics"] == asked
    clock.now += 0.1
    assert (await engine.look()).process not in (None, before.process)


async def test_a_name_gets_new_content_when_the_requests_of_the_old_have_ended(
    session: aiohttp.ClientSession, clock: Clock, good: str, tmp_path: Path
) -> None:
    others = [str(write_adapter(tmp_path / f"b{n}", n)) for n in (2, 3)]
    async with StubEngine(replace(OPTIONS, token_seconds=0.05)) as stub:
        engine = VllmEngine(session, Settings(engine_url=stub.url), clock)
        await engine.load("a", good)
        await engine.look()
        old = asyncio.create_task(complete(session, stub.url, "a"))
        await until(lambda: stub.server.model.running)
        await engine.unload("a")
        await engine.load("a", others[0])
        assert old.done()
        new = asyncio.create_task(complete(session, stub.url, "a"))
        await until(lambda: stub.server.model.running)
        await engine.load("a", others[0])  # serving already: nothing to wait for
        await engine.load("b", others[1])
        assert not new.done()
        assert [(await old)[0], (await new)[0]] == [200, 200]


async def test_an_engine_that_dies_of_a_load(engine: VllmEngine, stub: StubEngine, good: str) -> None:
    stub.faults.set(die_on_load=["a"])
    with pytest.raises(EngineDisconnected, match="EngineCore encountered an issue"):
        await engine.load("a", good)
    await stub.closed()
    with pytest.raises(EngineUnavailable, match="no connection"):
        await engine.look()


async def test_in_flight(stub: StubEngine, engine: VllmEngine, session: aiohttp.ClientSession, good: str) -> None:
    assert await engine.in_flight() == frozenset()
    stub.server.model.options = replace(OPTIONS, token_seconds=0.05)
    await engine.load("a,b", good)
    await engine.look()
    request = asyncio.create_task(complete(session, stub.url, "a,b"))
    await until(lambda: stub.server.model.running)
    # The metrics name it from its first token on; before, they can't tell.
    while (busy := await engine.in_flight()) is None:
        await engine.look()
    assert "a,b" in busy
    assert (await request)[0] == 200
    assert await engine.in_flight() == frozenset()
    await stub.stop()
    assert await engine.in_flight() is None


@pytest.mark.parametrize("version", ["0.20.0", "0.32.0"])
async def test_without_dev_mode_the_prefix_cache_cannot_be_reset(
    session: aiohttp.ClientSession, clock: Clock, version: str
) -> None:
    async with StubEngine(replace(OPTIONS, version=version)) as stub:
        assert await VllmEngine(session, Settings(engine_url=stub.url), clock).reset_prefix_cache() is False


@pytest.mark.parametrize("version", ["0.20.0", "0.30.0", "0.32.0"])
async def test_reset_prefix_cache_is_true_only_if_it_was_dropped(
    session: aiohttp.ClientSession, clock: Clock, version: str
) -> None:
    options = replace(OPTIONS, version=version, dev_mode=True, token_seconds=0.05)
    async with StubEngine(options) as stub:
        engine = VllmEngine(session, Settings(engine_url=stub.url), clock)
        assert await engine.reset_prefix_cache() is True
        request = asyncio.create_task(complete(session, stub.url, "tiny"))
        await until(lambda: stub.server.model.running)
        if version == "0.20.0":
            # Blocks in use: newer versions say so and can preempt, older ones answer 200 all the same.
            with pytest.raises(EngineUnavailable, match="could not be dropped"):
                await engine.reset_prefix_cache()
        else:
            assert await engine.reset_prefix_cache() is True
        assert (await request)[0] == 200
        assert await engine.reset_prefix_cache() is True


async def test_limits(session: aiohttp.ClientSession, clock: Clock, engine: VllmEngine) -> None:
    assert await engine.limits() is None
    async with StubEngine(replace(OPTIONS, dev_mode=True)) as stub:
        engine = VllmEngine(session, Settings(engine_url=stub.url), clock)
        assert await engine.limits() == Limits(max_loras=2, max_cpu_loras=3, max_lora_rank=16)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_be_the_one_that_clients_are_given(suffix: str) -> None:
    assert base_url(f"http://h:1{suffix}") == "http://h:1"
    assert base_url(f"http://h:1/prefix{suffix}") == "http://h:1/prefix"
