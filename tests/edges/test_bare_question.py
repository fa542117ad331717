"""The cheap question, against servers that answer this and that."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from sidecar.edges.bare_question import still_the_same
from sidecar.edges.peers_http import Timing
from tests.edges.peer_servers import Watch, answering, at, record


@contextlib.asynccontextmanager
async def saying(*parts: bytes) -> AsyncIterator[str]:
    """A server that reads a request and says `parts`, one by one."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # who has read enough is gone
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        done.set()

    done = asyncio.Event()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await done.wait()


@pytest.mark.parametrize(
    ("parts", "same"),
    [
        ((b"HTTP/1.1 304 Not Modified\r\n\r\n",), True),
        ((b"HTTP/1.", b"1 304 Not", b" Modified\r\nETag: x\r\n\r\n"), True),
        ((b"HTTP/1.0 304 Not Modified\r\n\r\n",), True),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",), False),
        ((b"HTTP/1.1 3040 What\r\n\r\n",), False),
        ((b"x" * 1000,), False),
        ((b"HTTP/1.1 30",), False),
        ((), False),
    ],
)
async def test_only_304_is_the_same(parts: tuple[bytes, ...], same: bool) -> None:
    async with saying(*parts) as address:
        assert await still_the_same(address, '"t"') is same


async def test_nobody_there_is_an_error_and_a_name_is_asked_in_another_way() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        await still_the_same(f"127.0.0.1:{port}", '"t"')
    assert not await still_the_same(f"localhost:{port}", '"t"')
    assert not await still_the_same(f"127.0.0.1:{port}", '"t"\r\nEvil: yes')


@pytest.mark.parametrize("seldom", [True, False])
async def test_many_peers_are_asked_cheaply_and_news_come_all_the_same(seldom: bool) -> None:
    held, asked = [record("a")], []

    def answer(request: web.Request) -> web.StreamResponse:
        tag = f'"{held[0].version}"'
        asked.append("Accept-Encoding" in request.headers)
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304)
        return web.Response(body=msgspec.json.encode(held[0]), headers={"ETag": tag})

    async with answering(answer) as (address, counter):
        few = 0 if seldom else 20
        timing = Timing(few=few, near_interval=0.03, far_interval=0.03, near_window=20, far_window=20, tick=0.02)
        watch = Watch((at(address),), timing)
        async with watch.running() as peers:
            await watch.until(lambda: watch.alive() == {"a": True})
            await counter.wait(5)
            assert all(asked[1:]) is not seldom
            held[0] = record("a", version=2)
            await watch.until(lambda: peers.view()["a"].record.version == 2)
