"""Requests that wait for a slot: vLLM's metrics don't name their adapter, and it is waited for all the same."""

from __future__ import annotations

import asyncio
import time

from sidecar.core.metrics_vllm import Traffic
from sidecar.edges.engine import VllmEngine
from sidecar.settings import Settings
from tests.conformance.api import Api, until_metric
from tests.vllm.client import LONG


async def test_a_name_gets_new_content_when_its_waiting_request_has_ended(api: Api) -> None:
    engine = VllmEngine(api.session, Settings(engine_url=api.url), time.time)
    for name, adapter in (("right", "a2"), ("b", "a3"), ("c", "a4"), ("a", "a1")):
        await engine.load(name, api.adapter(adapter))
    old, new = await api.tokens("a", LONG), await api.tokens("right", LONG)
    await engine.look()
    slots = [asyncio.create_task(api.tokens(name, "hi", 400, ignore_eos=True)) for name in "bc"]
    await until_metric(api, "vllm:num_requests_running", 2)
    waiting = asyncio.create_task(api.tokens("a", LONG))
    await until_metric(api, "vllm:num_requests_waiting", 1)
    assert await engine.in_flight() == {"b", "c"}
    await engine.unload("a")
    assert await engine.traffic("a") is Traffic.PERHAPS
    assert not waiting.done()
    await engine.load("a", api.adapter("a2"))
    assert waiting.done()
    # The two of one name together would end vLLM when a third adapter needs a slot.
    later = [asyncio.create_task(api.tokens("a", LONG, 12)) for _ in range(2)]
    await engine.load("d", api.adapter("a5"))
    assert await waiting == old
    assert await asyncio.gather(*later) == [new, new]
    assert {len(answer) for answer in await asyncio.gather(*slots)} == {400}
    assert await engine.traffic("c") is Traffic.NONE
