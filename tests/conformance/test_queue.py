"""Requests that wait for a slot: vLLM's metrics don't name their adapter, and it is waited for all the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sidecar.core.metrics_vllm import Traffic
from sidecar.edges.engine import VllmEngine
from sidecar.loops.stale_cache import drop_blocks
from sidecar.settings import Settings
from tests.conformance.api import Api, until_metric
from tests.vllm.client import LONG

# Tokens of a request that runs for seconds.
LASTING = 1500


@asynccontextmanager
async def with_a_request_that_waits(api: Api, engine: VllmEngine) -> AsyncIterator[asyncio.Task[list[int]]]:
    """ "a" is unloaded, and a request of it waits for b or c to give up a slot."""
    for name, adapter in (("b", "a3"), ("c", "a4"), ("a", "a1")):
        await engine.load(name, api.adapter(adapter))
    old = await api.tokens("a", LONG)
    await engine.look()
    slots = [asyncio.create_task(api.tokens(name, "hi", LASTING, ignore_eos=True)) for name in "bc"]
    await until_metric(api, "vllm:num_requests_running", 2)
    waiting = asyncio.create_task(api.tokens("a", LONG))
    await until_metric(api, "vllm:num_requests_waiting", 1)
    await engine.unload("a")
    assert await engine.in_flight() == {"b", "c"}
    assert not waiting.done()
    yield waiting
    assert await waiting == old
    assert {len(answer) for answer in await asyncio.gather(*slots)} == {LASTING}
    assert await engine.traffic("c") is Traffic.NONE


async def test_a_name_gets_new_content_when_its_waiting_request_has_ended(api: Api) -> None:
    engine = VllmEngine(api.session, Settings(engine_url=api.url), time.time)
    await engine.load("right", api.adapter("a2"))
    new = await api.tokens("right", LONG)
    async with with_a_request_that_waits(api, engine) as waiting:
        assert await engine.traffic("a") is Traffic.PERHAPS
        await engine.load("a", api.adapter("a2"))
        assert waiting.done()
        # The two of one name together would end vLLM when a third adapter needs a slot.
        later = [asyncio.create_task(api.tokens("a", LONG)) for _ in range(2)]
        await engine.load("d", api.adapter("a5"))
        assert await asyncio.gather(*later) == [new, new]


async def test_cached_blocks_are_dropped_when_the_waiting_request_has_ended(stale_api: Api) -> None:
    """Else it would fill the cache again, under the name that the new content is about to get."""
    api = stale_api
    engine = VllmEngine(api.session, Settings(engine_url=api.url), time.time)
    await engine.load("right", api.adapter("a2"))
    new = await api.tokens("right", LONG)
    async with with_a_request_that_waits(api, engine) as waiting:
        assert await drop_blocks(engine, "a") is True
        assert waiting.done()
        await engine.load("a", api.adapter("a2"))
        assert await api.tokens("a", LONG) == new
