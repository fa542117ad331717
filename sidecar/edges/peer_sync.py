"""The gossip's sync over HTTP: one authenticated POST, on the agent's own port."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp
import structlog
from aiohttp import web

from sidecar.core.speaker import MAX_SYNC_BODY, SYNC_PATH, Outcome
from sidecar.core.wire import AUTH_HEADER, HttpRequest, Opened

log = structlog.get_logger()

# Bodies that are read and answered at once: each may be some MiB.
MAX_ANSWERS = 8
READ_SECONDS = 10.0
MAX_CONNECTIONS = 32
KEEPALIVE_SECONDS = 10.0
_TYPE = "application/msgpack"


class SyncSide(Protocol):
    """What answers sync requests."""

    def admit(self, header: str, request: HttpRequest) -> Opened | Outcome:
        """Check a request before its body is read: who sent it, or the answer that refuses it."""

    def answer(self, opened: Opened, body: bytes) -> Outcome:
        """The signed answer to an admitted request."""


def routes(gossip: SyncSide) -> list[web.RouteDef]:
    """What the agent's HTTP server serves to the gossip of its peers."""
    gate = asyncio.Semaphore(MAX_ANSWERS)

    async def sync(request: web.Request) -> web.Response:
        asked = HttpRequest(
            method=request.method,
            path=request.rel_url.raw_path,
            query=request.rel_url.raw_query_string,
            range=request.headers.get("Range", ""),
        )
        opened = gossip.admit(request.headers.get(AUTH_HEADER, ""), asked)
        if isinstance(opened, Outcome):
            return refused(opened)
        async with gate:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    body = await read_bounded(request.content, MAX_SYNC_BODY)
            except TimeoutError:
                return refused(Outcome(status=408))
            if body is None:
                return refused(Outcome(status=413))
            outcome = gossip.answer(opened, body)
        headers = {AUTH_HEADER: outcome.header, "Content-Type": _TYPE}
        return web.Response(body=outcome.body, status=outcome.status, headers=headers)

    return [web.post(SYNC_PATH, sync)]


class HttpSync:
    """Sends sync requests. Close it after use."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def post(self, address: str, header: str, body: bytes, timeout: float) -> Outcome:
        """What the agent at host:port answered; status 0 if nothing, whatever the reason. Never raises."""
        try:
            async with (
                asyncio.timeout(timeout),
                self._opened().post(
                    f"http://{address}{SYNC_PATH}",
                    data=body,
                    headers={AUTH_HEADER: header, "Content-Type": _TYPE},
                    allow_redirects=False,
                ) as response,
            ):
                answer = await read_bounded(response.content, MAX_SYNC_BODY)
                if answer is None:
                    return Outcome(status=0)
                return Outcome(status=response.status, header=response.headers.get(AUTH_HEADER, ""), body=answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.debug("sync_failed", peer=address, reason=str(error) or type(error).__name__)
            return Outcome(status=0)

    async def close(self) -> None:
        """Close the connections. Harmless when there are none."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": "lora-sidecar"},
            )
        return self._session


async def read_bounded(content: aiohttp.StreamReader, limit: int) -> bytes | None:
    """All that comes, None if that is more than `limit` bytes. Nothing beyond is read."""
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_any():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)


def refused(outcome: Outcome) -> web.Response:
    """Whoever isn't let in learns nothing, and its body stays unread."""
    response = web.Response(status=outcome.status, body=outcome.body, headers={AUTH_HEADER: outcome.header})
    response.force_close()
    return response
