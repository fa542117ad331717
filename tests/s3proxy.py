"""A reverse proxy before an S3 (or any HTTP) server that records what was asked for, and breaks answers on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL


@dataclass
class Asked:
    """One request that came through: `sent` counts the body bytes of its answer that went out."""

    method: str
    path: str
    range: str
    if_match: str
    sent: int = 0


@dataclass(frozen=True)
class Fault:
    """What happens to an answer after `after` bytes of its body: the connection breaks, or waits for an event.

    With a status that is the answer.
    """

    after: int = 0
    wait: asyncio.Event | None = None
    status: int = 0
    then: Callable[[], None] | None = None


Choose = Callable[[Asked], Fault | None]


@dataclass
class Proxy:
    """`async with Proxy(server.endpoint) as proxy: … proxy.endpoint`; set `fault` to choose faults by request."""

    target: str
    fault: Choose = lambda _: None
    asked: list[Asked] = field(default_factory=list)
    endpoint: str = ""
    _runner: web.AppRunner | None = None
    _session: aiohttp.ClientSession | None = None

    def gets(self, part: str = "") -> list[Asked]:
        """GETs of objects whose path holds `part`; listings are not among them."""
        return [one for one in self.asked if one.method == "GET" and part in one.path and "list-type" not in one.path]

    async def __aenter__(self) -> Proxy:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.endpoint = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        assert self._session is not None
        await self._session.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        asked = Asked(request.method, request.raw_path, headers.get("Range", ""), headers.get("If-Match", ""))
        self.asked.append(asked)
        fault = self.fault(asked)
        if fault is not None and fault.status:
            if fault.wait is not None:
                await fault.wait.wait()
            return web.Response(status=fault.status, text="<Error><Code>Scripted</Code></Error>")
        assert self._session is not None
        url = URL(self.target + request.raw_path, encoded=True)
        # The signature covers the Host header as the client sent it.
        async with self._session.request(
            request.method, url, headers=headers, data=await request.read(), allow_redirects=False
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=answer.headers)
            await response.prepare(request)
            async for block in answer.content.iter_chunked(64 * 1024):
                if fault is not None and asked.sent + len(block) > fault.after:
                    allowed = fault.after - asked.sent
                    await self._send(response, asked, block[:allowed])
                    if fault.then is not None:
                        fault.then()
                    if fault.wait is None:
                        if request.transport is not None:
                            request.transport.abort()
                        return response
                    await fault.wait.wait()
                    await self._send(response, asked, block[allowed:])
                    fault = None
                else:
                    await self._send(response, asked, block)
            await response.write_eof()
            return response

    async def _send(self, response: web.StreamResponse, asked: Asked, block: bytes) -> None:
        await response.write(block)
        asked.sent += len(block)
