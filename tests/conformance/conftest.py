"""The servers of the suite: each test runs against the stub engine and against the real vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from sidecar.edges.stub_engine import StubEngine
from tests.conformance.api import Api, like_the_real_one
from tests.vllm.fixtures import KEY, STALE_VERSION
from tests.vllm.server import VllmServer

BOTH = ["stub", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=BOTH)
async def api(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Api]:
    """Both servers, started the same way; each test finds no adapter loaded."""
    async with aiohttp.ClientSession() as session:
        if request.param == "stub":
            async with StubEngine(like_the_real_one(tiny)) as stub:
                yield Api(session, stub.url, tiny)
            return
        server: VllmServer = request.getfixturevalue("vllm")
        async with _left_empty(Api(session, server.url, tiny)) as api:
            yield api


@pytest.fixture(params=BOTH)
async def stale_api(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Api]:
    """An old vLLM, whose prefix cache takes a new adapter for the old one of the same name, in dev mode."""
    async with aiohttp.ClientSession() as session:
        if request.param == "stub":
            async with StubEngine(like_the_real_one(tiny, version=STALE_VERSION, dev_mode=True)) as stub:
                yield Api(session, stub.url, tiny)
            return
        server: VllmServer = request.getfixturevalue("stale")
        async with _left_empty(Api(session, server.url, tiny)) as api:
            yield api


@asynccontextmanager
async def _left_empty(api: Api) -> AsyncIterator[Api]:
    try:
        yield api
    finally:
        for name in await api.adapters():
            await api.unload(name)


@pytest.fixture(params=BOTH)
async def guarded_api(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Api]:
    """With an API key, an adapter from the command line, and dev mode."""
    async with aiohttp.ClientSession() as session:
        if request.param == "stub":
            modules = (("fixed", str(tiny / "adapters" / "a6")),)
            options = like_the_real_one(tiny, api_keys=(KEY,), lora_modules=modules, dev_mode=True)
            async with StubEngine(options) as stub:
                yield Api(session, stub.url, tiny, KEY)
            return
        server: VllmServer = request.getfixturevalue("guarded")
        yield Api(session, server.url, tiny, KEY)


@pytest.fixture(params=BOTH)
async def static_api(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Api]:
    """Without VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
    async with aiohttp.ClientSession() as session:
        if request.param == "stub":
            modules = (("fixed", str(tiny / "adapters" / "a6")),)
            async with StubEngine(like_the_real_one(tiny, lora_modules=modules, runtime_updating=False)) as stub:
                yield Api(session, stub.url, tiny)
            return
        server: VllmServer = request.getfixturevalue("static")
        yield Api(session, server.url, tiny)
