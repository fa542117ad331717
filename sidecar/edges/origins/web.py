"""HTTP as origins need it: ranges, redirects that lead nowhere dangerous, credentials that go to one host only."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from sidecar import __version__
from sidecar.core.sources import refused_address
from sidecar.edges.origins import BLOCK, Sink
from sidecar.edges.threads import in_thread
from sidecar.ports import OriginChanged, OriginDenied, OriginError

MAX_REDIRECTS = 5
CONNECT_SECONDS = 5
READ_SECONDS = 20
_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class RefusedAddress(OSError):
    """A name leads to an address where no adapter comes from."""


class GuardedResolver(AbstractResolver):
    """Resolves names, and refuses link-local and metadata addresses whatever the name, at the moment of connecting.

    On threads that nobody waits for at the end: a dead name server would hold up the exit of the process.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await in_thread(partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM))
        for *_, address in found:
            if refused_address(str(address[0])):
                raise RefusedAddress(f"{host} leads to {address[0]}, a link-local or metadata address")
        return [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=kind, proto=proto, flags=_NUMERIC)
            for kind, _, proto, _, address in found
        ]

    async def close(self) -> None:
        """Nothing is held."""


class Web:
    """One session for all web origins. `where` in the methods below is what errors call the source."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def get(
        self, url: str, where: str, headers: Mapping[str, str], secret: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a GET, at most MAX_REDIRECTS later; its status is below 300, 404, 412 or 416.

        The `secret` headers go to the scheme, host and port of `url` alone. Raises OriginError and OriginDenied, also
        for what goes wrong while the answer is read.
        """
        try:
            response = await self._follow(_url(url), where, headers, secret)
            try:
                yield response
            finally:
                response.close()
        except aiohttp.ClientError as error:
            raise _failure(error, where) from None
        except (TimeoutError, asyncio.IncompleteReadError, ssl.SSLError, OSError) as error:
            raise OriginError(f"{where}: {type(error).__name__}: {error or 'no answer in time'}") from None

    async def close(self) -> None:
        """Drop all connections."""
        if self._session is not None:
            await self._session.close()

    async def _follow(
        self, first: URL, where: str, headers: Mapping[str, str], secret: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        url = first
        for _ in range(MAX_REDIRECTS + 1):
            if refused_address(url.host or ""):
                raise OriginDenied(f"{where} redirects to {url.host}, a link-local or metadata address")
            sent = {**headers, **secret} if url.origin() == first.origin() else headers
            response = await self._open().get(url, headers=sent, allow_redirects=False, proxy=_proxy(url))
            if response.status not in _REDIRECTS or "Location" not in response.headers:
                return await _accepted(response, where)
            response.close()
            url = _next(url, response.headers["Location"], where)
        raise OriginDenied(f"{where} redirects more than {MAX_REDIRECTS} times")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=GuardedResolver(), use_dns_cache=False, ssl=ssl.create_default_context(), limit=32
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": f"lora-sidecar/{__version__}", "Accept-Encoding": "identity"},
                read_bufsize=256 * 1024,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS),
            )
        return self._session


async def pour(response: aiohttp.ClientResponse, start: int, stop: int, where: str, sink: Sink) -> None:
    """Give bytes [start, stop) of the file to `sink`, from an answer to a request for that range, or for all of it.

    Raises OriginError if they don't come, OriginChanged if others do.
    """
    position = _first_byte(response)
    if position > start:
        raise OriginChanged(f"{where}: asked for byte {start}, the answer begins with {position}")
    block = bytearray()
    while position < stop:
        chunk = await response.content.readany()
        if not chunk:
            raise OriginError(f"{where}: the answer ended {stop - position} bytes early")
        # A server that knows no ranges begins with the file's beginning.
        block += chunk[max(0, start - position) : stop - position]
        position += len(chunk)
        if len(block) >= BLOCK or position >= stop:
            await in_thread(partial(_give, bytes(block), sink))
            block.clear()


def _give(data: bytes, sink: Sink) -> None:
    for at in range(0, len(data), BLOCK):
        sink(data[at : at + BLOCK])


def _first_byte(response: aiohttp.ClientResponse) -> int:
    if response.status != 206:
        return 0
    first = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdecimal() else 0


def total_size(response: aiohttp.ClientResponse) -> int | None:
    """Bytes of the whole file that this answer is (a part of), None if it doesn't say."""
    if response.status in (206, 416):
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        return int(total) if total.isdecimal() else None
    return response.content_length


async def _accepted(response: aiohttp.ClientResponse, where: str) -> aiohttp.ClientResponse:
    """The response, unless its status is a refusal."""
    status = response.status
    if status < 300 or status in (404, 412, 416):
        return response
    # A hub says here why; its page of HTML would say it less well.
    said = response.headers.get("X-Error-Message") or response.reason or ""
    response.close()
    text = f"{where}: {status} {said[:200]}"
    if status >= 500 or status in (408, 425, 429):
        raise OriginError(text)
    raise OriginDenied(text)


def _url(text: str) -> URL:
    """As it is if it can be sent like that: a signature may cover every character."""
    return URL(text, encoded=text.isascii() and " " not in text)


def _next(url: URL, location: str, where: str) -> URL:
    try:
        target = url.join(_url(location))
    except ValueError:
        raise OriginDenied(f"{where} redirects to something that is no URL") from None
    if target.scheme not in ("http", "https") or not target.host:
        raise OriginDenied(f"{where} redirects to {target.scheme}://, which is no web address")
    if url.scheme == "https" and target.scheme == "http":
        raise OriginDenied(f"{where} redirects from https:// to plain http://{target.host}, where bytes can be changed")
    return target


def _proxy(url: URL) -> str | None:
    """The proxy of the environment for this URL. Not by aiohttp's trust_env, which would send passwords of ~/.netrc."""
    proxy = getproxies().get(url.scheme)
    return proxy if proxy and not proxy_bypass(url.host or "") else None


def _failure(error: aiohttp.ClientError, where: str) -> OriginError:
    cause: Any = getattr(error, "os_error", None)
    if isinstance(cause, RefusedAddress):
        return OriginDenied(f"{where}: {cause}")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return OriginDenied(f"{where}: the server's certificate is not trusted: {error.certificate_error}")
    if isinstance(error, aiohttp.InvalidURL):
        return OriginDenied(f"{where}: no valid URL")
    # As text, an error of this kind repeats the URL, whose query may be a signature.
    text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return OriginError(f"{where}: {type(error).__name__}: {text}")
