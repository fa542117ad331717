"""One peer as a source of one file's bytes: what it has published, or chunks of its download under way."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
import structlog

from sidecar.core.flight import CHUNK, span
from sidecar.edges.flights import Tee
from sidecar.edges.origins import BLOCK, Sink
from sidecar.edges.peer_files import CHUNK_HEADER, PROGRESS_HEADER
from sidecar.edges.peer_http import Body, Headers, PeerFault, Take
from sidecar.edges.threads import in_thread
from sidecar.model import MAX_FILES, Listing, RemoteFile, StoredFile, revision_of
from sidecar.ports import Observed

log = structlog.get_logger()

# A source that trickles, or waits for one that does, is given up after so long without a chunk.
STALL = 15.0
# How long a source that failed is passed over.
AWAY_SECONDS = 20.0
# Between two questions for something that isn't there yet.
LOOK_SECONDS = 0.25

_stored = msgspec.json.Decoder(tuple[StoredFile, ...])
_hashes = msgspec.json.Decoder(dict[int, str])

Fields = Callable[[int, Headers], tuple[str, ...]]
"""The header values that an answer of that status is signed with."""


class SourceEnds(Exception):
    """This source gives nothing (more): try the next one."""


class SourceBusy(SourceEnds):
    """It has too many readers now."""


class Content:
    """What is known about one content's sources. Times are the event loop's."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.last_good = now
        self.struck: set[str] = set()
        self.away: dict[str, float] = {}
        self.served: set[str] = set()
        self.published: dict[str, StoredFile] | None = None
        # Hashes of chunks by file, as the first worker in rank says; when it may be asked again.
        self.hashes: dict[int, dict[int, str]] = {}
        self.ask_at = 0.0

    def usable(self, uid: str, now: float) -> bool:
        """Whether it is worth asking that agent."""
        return uid not in self.struck and self.away.get(uid, 0.0) <= now


class Asking(Protocol):
    """What readers ask through."""

    patience: float
    received: Callable[[int], None]

    async def get(self, source: Reader, path: str, fields: Fields, take: Take, span: str = "") -> tuple[int, Headers]:
        """One authentic answer; its body has gone to `take`. Raises SourceEnds, PeerFault, and what `take` raises."""

    def strike(self, content: Content, uid: str, reason: str) -> None:
        """Ask that agent for nothing of this content any more."""


class Reader:
    """One source of one range of one file; `position` is how far it has come."""

    def __init__(self, transfer: Asking, content: Content, seen: Observed, listing: Listing, file: RemoteFile) -> None:
        head = seen.record.head
        self.uid, self.name, self.address = head.uid, head.name, head.address
        self.position = 0
        self.transfer, self.content, self.listing, self.file = transfer, content, listing, file

    async def read(self, stop: int, sink: Sink) -> None:
        """Give `sink` what comes. Raises SourceEnds, PeerFault, and what `sink` raises."""
        raise NotImplementedError


class BlobReader(Reader):
    """Reads a published file."""

    def __init__(
        self,
        transfer: Asking,
        content: Content,
        seen: Observed,
        listing: Listing,
        file: RemoteFile,
        revision: str,
    ) -> None:
        super().__init__(transfer, content, seen, listing, file)
        self._revision = revision

    async def read(self, stop: int, sink: Sink) -> None:
        """See Reader. The whole file's hash is checked by whoever publishes it."""
        if self.content.published is None:
            self.content.published = await self._list()
        stored = self.content.published.get(self.file.path)
        if stored is None or stored.size != self.file.size:
            raise SourceEnds("the revision is made of other files")

        def take(block: memoryview) -> None:
            sink(bytes(block))
            self.position += len(block)
            self.transfer.received(len(block))

        wanted = f"bytes={self.position}-{stop - 1}"
        path = f"/peer/blobs/sha256/{stored.sha256}"
        status, headers = await self.transfer.get(self, path, _content_range, take, wanted)
        if status == 503:
            raise SourceBusy("busy")
        if status != 206 or self.position != stop:
            raise SourceEnds(f"HTTP {status}, {headers.get('Content-Range', 'no range')}")
        self.content.last_good = asyncio.get_running_loop().time()

    async def _list(self) -> dict[str, StoredFile]:
        """The revision's files by path; only a list that hashes to the revision counts."""
        body = Body()
        path = f"/peer/revisions/{self._revision.removeprefix('sha256:')}"
        status, _ = await self.transfer.get(self, path, _nothing, body)
        if status != 200:
            raise SourceEnds(f"HTTP {status} for the revision's list of files")
        try:
            files = _stored.decode(bytes(body.data))
        except msgspec.DecodeError as error:
            raise SourceEnds(f"its list of files can't be read: {error}") from error
        if len(files) > MAX_FILES or revision_of(files) != self._revision:
            self.transfer.strike(self.content, self.uid, "its list of files has another hash than the revision")
            raise SourceEnds("a wrong list of files")
        return {file.path: file for file in files}


class FlightReader(Reader):
    """Reads chunks of a download under way, each verified before it is passed on."""

    def __init__(
        self,
        transfer: Asking,
        content: Content,
        seen: Observed,
        listing: Listing,
        file: RemoteFile,
        root: Observed | None,
    ) -> None:
        super().__init__(transfer, content, seen, listing, file)
        self._index = listing.files.index(file)
        self._base = f"/peer/flight/{content.name}/{self._index}"
        self._root = Reader(transfer, content, root, listing, file) if root and root.alive else None
        self._progress = -1

    async def read(self, stop: int, sink: Sink) -> None:
        """See Reader."""
        loop = asyncio.get_running_loop()
        idle_since = begun = loop.time()
        buffer = bytearray(min(CHUNK, self.file.size))
        while self.position < stop:
            chunk = self.position // CHUNK
            body = _Chunk(buffer)
            status, headers = await self.transfer.get(self, f"{self._base}/{chunk}", _chunk_fields, body)
            now = loop.time()
            if status == 200:
                await self._verify(chunk, body, headers)
                await in_thread(partial(self._pass_on, body, chunk, stop, sink))
                idle_since = begun = self.content.last_good = loop.time()
                continue
            if status not in (202, 404, 503):
                raise SourceEnds(f"HTTP {status}")
            if status == 202 and int(headers.get(PROGRESS_HEADER, "0")) > self._progress:
                self._progress = int(headers.get(PROGRESS_HEADER, "0"))
                idle_since = now
            if now - max(idle_since, self.content.last_good) >= self.transfer.patience or now - begun >= STALL:
                raise SourceEnds("nothing new in good time")
            if status != 202:
                await asyncio.sleep(min(LOOK_SECONDS, max(0.02, now - idle_since)))

    async def _verify(self, chunk: int, body: _Chunk, headers: Headers) -> None:
        start, end = span(self.file.size, chunk)
        found, what = body.digest.hexdigest(), f"chunk {chunk} of {self.file.path}"
        if body.size != end - start or found != headers.get(CHUNK_HEADER, ""):
            self.transfer.strike(self.content, self.uid, f"{what} has another hash than it said")
            raise SourceEnds("a wrong chunk")
        said = await self._said_by_root(chunk)
        if said and said != found:
            self.transfer.strike(self.content, self.uid, f"{what} isn't what the first in rank has")
            raise SourceEnds("a wrong chunk")

    async def _said_by_root(self, chunk: int) -> str:
        """The chunk's hash by the first worker in rank, "" if it doesn't say."""
        known = self.content.hashes.setdefault(self._index, {})
        now = asyncio.get_running_loop().time()
        root = self._root
        if chunk in known or root is None or root.uid == self.uid or now < self.content.ask_at:
            return known.get(chunk, "")
        body = Body()
        try:
            status, _ = await self.transfer.get(root, f"{self._base}/hashes", _nothing, body)
            if status == 200:
                known.update(_hashes.decode(bytes(body.data)))
        except (SourceEnds, PeerFault, msgspec.DecodeError) as error:
            self.content.ask_at = now + AWAY_SECONDS
            log.debug("no_hashes_of_the_first", peer=root.name, reason=str(error))
        return known.get(chunk, "")

    def _pass_on(self, body: _Chunk, chunk: int, stop: int, sink: Sink) -> None:
        """Runs on a thread."""
        start = chunk * CHUNK
        end = min(start + body.size, stop)
        with memoryview(body.data) as view:
            if isinstance(sink, Tee) and (self.position, end) == (start, start + body.size):
                sink.chunk(chunk, view[: body.size], body.digest.digest())
                self._came(end - self.position)
            while self.position < end:
                block = bytes(view[self.position - start : min(self.position - start + BLOCK, end - start)])
                sink(block)
                self._came(len(block))

    def _came(self, size: int) -> None:
        self.position += size
        self.transfer.received(size)


class _Chunk:
    """A chunk's bytes in a buffer that is used again, hashed as they come."""

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.size = 0
        self.digest = hashlib.sha256()

    def room(self, size: int) -> memoryview:
        """See peer_http.Filling."""
        if self.size >= len(self.data):
            raise PeerFault("more bytes than a chunk has")
        return memoryview(self.data)[self.size : self.size + min(size, BLOCK)]

    def __call__(self, block: memoryview) -> None:
        self.size += len(block)
        self.digest.update(block)


def _nothing(status: int, headers: Headers) -> tuple[str, ...]:
    return ()


def _content_range(status: int, headers: Headers) -> tuple[str, ...]:
    return (headers.get("Content-Range", ""),) if status == 206 else ()


def _chunk_fields(status: int, headers: Headers) -> tuple[str, ...]:
    if status == 202:
        return (headers.get(PROGRESS_HEADER, ""),)
    return (headers.get(CHUNK_HEADER, ""), headers.get("Content-Length", "")) if status == 200 else ()
