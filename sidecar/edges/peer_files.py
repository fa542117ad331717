"""Files for other workers: published content by its hash, and chunks of downloads under way. Nothing else of the disk.

    GET /peer/revisions/<hex>             the list of a published revision's files
    GET /peer/blobs/sha256/<hex>          a published file's content; takes one range
    GET /peer/flight/<id>/<file>/<chunk>  one chunk, waited for if it comes soon; 202 if it doesn't
    GET /peer/flight/<id>/<file>/hashes   the hashes of the chunks that are whole

Every request is authenticated, every answer signed; bodies of files are covered by their hashes, so that the kernel can
send them from the page cache.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
from aiohttp import web

from sidecar.core.flight import chunks, span
from sidecar.core.speaker import Outcome
from sidecar.core.wire import AUTH_HEADER, UNCOVERED, HttpAnswer, HttpRequest, Opened, body_hash
from sidecar.edges.flights import Flight, Flights
from sidecar.edges.peer_sync import refused
from sidecar.edges.threads import in_thread
from sidecar.model import StoredFile

# Bodies under way at once: a tree of fan-out 2 with 4 streams each, twice.
MAX_BODIES = 16
# How long a request waits for a chunk that isn't whole yet. Well below the patience of who asks: the answer that it
# isn't is a sign of life.
HOLD_SECONDS = 1.0

CHUNK_HEADER = "X-Lora-Sidecar-Chunk"
PROGRESS_HEADER = "X-Lora-Sidecar-Progress"

_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{1,15})")
_HEX = re.compile(r"[0-9a-f]{64}")


class PeerGate(Protocol):
    """What checks requests of peers and signs the answers."""

    def admit(self, header: str, request: HttpRequest) -> Opened | Outcome:
        """Who sent it, or the answer that refuses it."""

    def sign_answer(self, opened: Opened, answer: HttpAnswer, digest: bytes) -> str:
        """The authentication header of the answer."""


class PublishedFiles(Protocol):
    """What may be read of the adapters directory."""

    def files(self, revision: str) -> tuple[StoredFile, ...]:
        """The files of a published revision; empty if it isn't there."""

    def blob(self, sha256: str) -> Path | None:
        """The path of the content with this hash, None if it isn't there whole."""


def routes(gate: PeerGate, store: PublishedFiles, flights: Flights) -> list[web.RouteDef]:
    """What the agent's HTTP server serves to the downloads of its peers."""
    files = _Files(gate, store, flights)
    return [
        web.get("/peer/revisions/{hex}", files.revision, allow_head=False),
        web.get("/peer/blobs/sha256/{hex}", files.blob, allow_head=False),
        web.get(r"/peer/flight/{id}/{file:\d{1,4}}/{chunk:\d{1,8}}", files.chunk, allow_head=False),
        web.get(r"/peer/flight/{id}/{file:\d{1,4}}/hashes", files.hashes, allow_head=False),
    ]


class _Files:
    """The handlers."""

    def __init__(self, gate: PeerGate, store: PublishedFiles, flights: Flights) -> None:
        self._gate, self._store, self._flights = gate, store, flights
        self._bodies = 0

    async def revision(self, request: web.Request) -> web.StreamResponse:
        opened = self._admit(request)
        if isinstance(opened, web.Response):
            return opened
        name = request.match_info["hex"]
        found: Sequence[StoredFile] = self._store.files(f"sha256:{name}") if _HEX.fullmatch(name) else ()
        if not found:
            return self._plain(opened, 404)
        return self._plain(opened, 200, msgspec.json.encode(found))

    async def blob(self, request: web.Request) -> web.StreamResponse:
        opened = self._admit(request)
        if isinstance(opened, web.Response):
            return opened
        name = request.match_info["hex"]
        path = await in_thread(lambda: self._store.blob(name)) if _HEX.fullmatch(name) else None
        if path is None:
            return self._plain(opened, 404)
        try:
            file = await in_thread(lambda: _opened(path))
        except OSError:
            return self._plain(opened, 404)
        with file:
            size = os.fstat(file.fileno()).st_size
            asked = _RANGE.fullmatch(request.headers.get("Range", f"bytes=0-{max(size - 1, 0)}"))
            start, stop = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (size, size)
            if start >= stop:
                return self._plain(opened, 416)
            content_range = f"bytes {start}-{stop - 1}/{size}"
            response = web.StreamResponse(status=206, headers={"Content-Range": content_range})
            return await self._send(request, opened, response, (content_range,), (file, start, stop))

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        opened = self._admit(request)
        if isinstance(opened, web.Response):
            return opened
        flight, number = self._flight(request)
        chunk = int(request.match_info["chunk"])
        if flight is None or chunk >= chunks(flight.files[number].size):
            return self._plain(opened, 404)
        try:
            found = await flight.wait_for(number, chunk, HOLD_SECONDS)
            if found is None:
                return self._not_yet(opened, flight)
            file = flight.files[number]
            with os.fdopen(os.dup(file.handle()), "rb") as handle:
                start, stop = span(file.size, chunk)
                response = web.StreamResponse(headers={CHUNK_HEADER: found.hex()})
                fields = (found.hex(), str(stop - start))
                return await self._send(request, opened, response, fields, (handle, start, stop))
        except (OSError, ValueError):
            return self._plain(opened, 404)

    async def hashes(self, request: web.Request) -> web.StreamResponse:
        opened = self._admit(request)
        if isinstance(opened, web.Response):
            return opened
        flight, number = self._flight(request)
        if flight is None:
            return self._plain(opened, 404)
        known = {str(chunk): digest.hex() for chunk, digest in flight.files[number].hashes.items() if digest}
        return self._plain(opened, 200, msgspec.json.encode(known))

    def _flight(self, request: web.Request) -> tuple[Flight | None, int]:
        flight = self._flights.find(request.match_info["id"])
        number = int(request.match_info["file"])
        if flight is None or flight.over or number >= len(flight.files):
            return None, 0
        return flight, number

    def _admit(self, request: web.Request) -> Opened | web.Response:
        asked = HttpRequest(
            method=request.method,
            path=request.rel_url.raw_path,
            query=request.rel_url.raw_query_string,
            range=request.headers.get("Range", ""),
        )
        opened = self._gate.admit(request.headers.get(AUTH_HEADER, ""), asked)
        return refused(opened) if isinstance(opened, Outcome) else opened

    def _not_yet(self, opened: Opened, flight: Flight) -> web.Response:
        progress = str(flight.progress)
        header = self._gate.sign_answer(opened, HttpAnswer(status=202, fields=(progress,)), body_hash(b""))
        return web.Response(status=202, headers={AUTH_HEADER: header, PROGRESS_HEADER: progress})

    def _plain(self, opened: Opened, status: int, body: bytes = b"") -> web.Response:
        header = self._gate.sign_answer(opened, HttpAnswer(status=status), body_hash(body))
        return web.Response(status=status, body=body, headers={AUTH_HEADER: header})

    async def _send(
        self,
        request: web.Request,
        opened: Opened,
        response: web.StreamResponse,
        fields: tuple[str, ...],
        part: tuple[BinaryIO, int, int],
    ) -> web.StreamResponse:
        """Have the kernel send a part of an open file, all of it at once."""
        if self._bodies >= MAX_BODIES or request.transport is None:
            return self._plain(opened, 503)
        file, start, stop = part
        answer = HttpAnswer(status=response.status, fields=fields)
        response.headers[AUTH_HEADER] = self._gate.sign_answer(opened, answer, UNCOVERED)
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        self._bodies += 1
        try:
            await response.prepare(request)
            await asyncio.get_running_loop().sendfile(request.transport, file, start, stop - start)
            await response.write_eof()
        except (ConnectionError, RuntimeError):
            # The reader has gone away, before or while it was sent to; asyncio says so with either.
            response.force_close()
        finally:
            self._bodies -= 1
        return response


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")
