"""Servers that answer what a test tells them to: over HTTP, and below it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

Answer = tuple[int, bytes] | Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Scripted:
    """`answers`: "METHOD /path" -> (status, body), or a function of the request. Anything else is 404."""

    answers: dict[str, Answer]
    url: str = ""
    seen: list[web.Request] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Note the request, then answer it."""
        self.seen.append(request)
        self.connections.add(request.transport)
        answer = self.answers.get(f"{request.method} {request.path}", (404, b'{"detail":"Not Found"}'))
        if callable(answer):
            return await answer(request)
        status, body = answer
        return web.Response(status=status, body=body)


@asynccontextmanager
async def scripted(answers: Mapping[str, Answer]) -> AsyncIterator[Scripted]:
    """An HTTP server on a free port."""
    server = Scripted(dict(answers))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw(reply: bytes | None) -> AsyncIterator[str]:
    """A TCP server that reads a request, writes `reply` and closes; with None it never writes. Yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        if reply is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until `condition()` is true. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - state of a server that has no event for it
            await asyncio.sleep(0.005)
