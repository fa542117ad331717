"""Real agents with a gossip key read an adapter's bytes from each other, and hardly from the origin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.core.flight import CHUNK
from tests.adapters import adapter
from tests.bench.agents import AgentPool
from tests.pool.gossiping import ONE, counted, eventually, holders, key_file
from tests.s3proxy import Fault, Proxy
from tests.s3server import S3Server

pytestmark = pytest.mark.slow

# More than what every worker may read from the origin by itself.
SIZE = 20_000_000
RECEIVED = 'lora_sidecar_received_bytes_total{source="%s"}'


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@asynccontextmanager
async def running(s3: S3Server, directory: Path) -> AsyncIterator[tuple[AgentPool, Proxy]]:
    """Three agents, and what they ask the origin for; its adapter `big` is there already."""
    for path, data in adapter("big", weights_bytes=SIZE).items():
        s3.put("adapters", f"big/{path}", data)
    flags = {"gossip-key-file": key_file(directory / "key", ONE)}
    async with Proxy(s3.endpoint) as proxy:
        environment = {**s3.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        async with AgentPool(3, flags=flags, environment=environment) as pool:
            await pool.settle()
            yield pool, proxy


def read_from(proxy: Proxy) -> int:
    return sum(one.sent for one in proxy.gets("big"))


async def received(pool: AgentPool, source: str) -> float:
    return sum([await counted(pool, agent, RECEIVED % source) for agent in pool.agents])


async def test_one_adapter_for_three_workers_is_read_from_the_origin_once(s3: S3Server, tmp_path: Path) -> None:
    async with running(s3, tmp_path) as (pool, proxy):
        pool.apply("big", "s3://adapters/big")
        await pool.until(lambda: len(holders(pool, "big")) == 3, "three copies")
        assert SIZE <= read_from(proxy) < 1.05 * SIZE
        assert await received(pool, "origin") == read_from(proxy)
        assert 2 * SIZE <= await received(pool, "peer") < 2.05 * SIZE


async def test_the_others_read_a_download_that_is_under_way(s3: S3Server, tmp_path: Path) -> None:
    """Before the first in rank can say which revision it is, they have what has come so far."""
    async with running(s3, tmp_path) as (pool, proxy):
        go_on = asyncio.Event()
        proxy.fault = lambda asked: Fault(after=SIZE // 2, wait=go_on) if "safetensors" in asked.path else None
        pool.apply("big", "s3://adapters/big")

        async def others_have_some() -> bool:
            return await received(pool, "peer") >= 2 * CHUNK

        await eventually(others_have_some, 20, "chunks of a download under way")
        assert holders(pool, "big") == set()
        go_on.set()
        await pool.until(lambda: len(holders(pool, "big")) == 3, "three copies")
        assert SIZE <= read_from(proxy) < 1.05 * SIZE


async def test_what_one_worker_holds_outlives_the_origin(s3: S3Server, tmp_path: Path) -> None:
    async with running(s3, tmp_path) as (pool, proxy):
        pool.apply("big", "s3://adapters/big", distribution={"strategy": "fixed", "replicas": 1})
        await pool.until(lambda: len(holders(pool, "big")) == 1, "one copy")
        proxy.fault = lambda asked: Fault(status=503)
        before = read_from(proxy)
        pool.apply("big", "s3://adapters/big", distribution={"strategy": "fixed", "replicas": 3})
        await pool.until(lambda: len(holders(pool, "big")) == 3, "three copies")
        assert read_from(proxy) == before
        assert await received(pool, "peer") >= 2 * SIZE
