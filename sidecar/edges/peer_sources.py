"""One source of one file's bytes, piece by piece: what a peer has published, chunks of its download, or the origin."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from sidecar.core.flight import CHUNK, span
from sidecar.edges.download import ReadRange
from sidecar.edges.flights import Tee
from sidecar.edges.origins import BLOCK, Sink
from sidecar.edges.peer_files import CHUNK_HEADER, PROGRESS_HEADER
from sidecar.edges.peer_http import Body, Headers, PeerFault, Take
from sidecar.model import MAX_FILES, Listing, RemoteFile, StoredFile, revision_of
from sidecar.ports import OriginError

log = structlog.get_logger()

# How long a source that failed is passed over.
AWAY_SECONDS = 20.0
# Between two questions for something that isn't there yet.
LOOK_SECONDS = 0.25
# What another opinion about a chunk's hash may take.
HASHES_SECONDS = 1.0
# So many bytes of a body are a sign of life; a trickle is none.
LIVELY_BYTES = 256 * 1024
# Buffers that are kept for the next pieces: as many as one content's streams fill, and some of another's.
MAX_SPARE = 8

_stored = msgspec.json.Decoder(tuple[StoredFile, ...])
_hashes = msgspec.json.Decoder(dict[int, str])

Fields = Callable[[int, Headers], tuple[str, ...]]
"""The header values that an answer of that status is signed with."""


class SourceEnds(Exception):
    """This source gives nothing (more): try the next one."""


class SourceBusy(SourceEnds):
    """It has too many readers now."""


class Peer(msgspec.Struct, frozen=True):
    """An agent that can be asked."""

    uid: str
    name: str
    address: str


class Content:
    """What is known about one content's sources. Times are the event loop's."""

    def __init__(self, name: str) -> None:
        self.name = name
        # The revision that this is for sure; "" if that has to be looked up.
        self.revision = ""
        self.struck: set[str] = set()
        self.away: dict[str, float] = {}
        self.alone_until = 0.0
        self.served: set[str] = set()
        self.published: dict[str, StoredFile] | None = None
        # Hashes of chunks by file, as the first worker in rank says; when it may be asked again.
        self.hashes: dict[int, dict[int, str]] = {}
        self.ask_at = 0.0

    def usable(self, uid: str, now: float) -> bool:
        """Whether it is worth asking that agent."""
        return uid not in self.struck and self.away.get(uid, 0.0) <= now


class Buffers:
    """Room for chunks, used again: fresh memory costs as much as the bytes that come into it."""

    def __init__(self) -> None:
        self._spare: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """At least `size` bytes, no more than a chunk."""
        if self._spare:
            return self._spare.pop()
        return bytearray(CHUNK if size > CHUNK // 2 else size)

    def give(self, buffer: bytearray) -> None:
        """Nobody uses it any more."""
        if len(buffer) == CHUNK and len(self._spare) < MAX_SPARE:
            self._spare.append(buffer)


class Piece:
    """Bytes [start, stop) of a file, no more than a chunk, hashed as they come into a buffer. See peer_http.Filling."""

    def __init__(self, data: bytearray, start: int, stop: int, lively: Callable[[], None] = lambda: None) -> None:
        """`lively` is called, on the reader's thread, whenever a good many bytes more have come."""
        self.data, self.start, self.stop = data, start, stop
        self.size = 0
        self._lively, self._lively_at = lively, LIVELY_BYTES
        self.digest = hashlib.sha256()

    @property
    def whole(self) -> bool:
        """Whether all of it has come."""
        return self.size == self.stop - self.start

    def room(self, size: int) -> memoryview:
        """Raises PeerFault for more bytes than were asked for."""
        left = self.stop - self.start - self.size
        if left <= 0:
            raise PeerFault("more bytes than were asked for")
        return memoryview(self.data)[self.size : self.size + min(size, BLOCK, left)]

    def __call__(self, block: memoryview) -> None:
        self.digest.update(block)
        self.size += len(block)
        if self.size >= self._lively_at:
            self._lively_at = self.size + LIVELY_BYTES
            self._lively()

    def pass_on(self, position: int, stop: int, sink: Sink) -> int:
        """Give `sink` what lies in [position, stop); returns how far that is. Blocking."""
        end = min(self.stop, stop)
        with memoryview(self.data) as view:
            exact = (position, end) == (self.start, self.stop)
            if isinstance(sink, Tee) and exact and sink.is_chunk(self.start, self.stop):
                sink.chunk(self.start // CHUNK, view[: self.size], self.digest.digest())
                return end
            while position < end:
                block = bytes(view[position - self.start : min(position - self.start + BLOCK, end - self.start)])
                sink(block)
                position += len(block)
        return end


class Asking(Protocol):
    """What readers ask through."""

    buffers: Buffers

    async def get(self, peer: Peer, path: str, fields: Fields, take: Take, span: str = "") -> tuple[int, Headers]:
        """One authentic answer; its body has gone to `take`. Raises SourceEnds, PeerFault, and what `take` raises."""

    def strike(self, content: Content, uid: str, reason: str) -> None:
        """Ask that agent for nothing of this content any more."""


class Reader(Protocol):
    """One source of one file."""

    @property
    def peer(self) -> Peer:
        """Who it is."""

    @property
    def heard(self) -> float:
        """When there was last a sign that waiting is worth it, by the event loop's clock."""

    async def piece(self, position: int, stop: int) -> Piece:
        """What comes next from `position` on: to the end of its chunk, or to `stop`; whole. Waits until it is there.

        Raises SourceEnds, PeerFault.
        """


class _Heard:
    """When a peer last showed that it goes on."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.heard = peer, 0.0
        self._loop = asyncio.get_running_loop()

    def _hear(self) -> None:
        """May be called on any thread."""
        self.heard = self._loop.time()


class BlobReader(_Heard):
    """Reads a published file. The whole file's hash is checked by whoever publishes it."""

    def __init__(self, asking: Asking, content: Content, peer: Peer, file: RemoteFile, revision: str) -> None:
        super().__init__(peer)
        self._asking, self._content, self._file, self._revision = asking, content, file, revision

    async def piece(self, position: int, stop: int) -> Piece:
        """See Reader."""
        if self._content.published is None:
            self._content.published = await files_of(self._asking, self._content, self.peer, self._revision)
        stored = self._content.published.get(self._file.path)
        if stored is None or stored.size != self._file.size:
            raise SourceEnds("the revision is made of other files")
        end = min(stop, (position // CHUNK + 1) * CHUNK)
        found = Piece(self._asking.buffers.take(end - position), position, end, self._hear)
        path, wanted = f"/peer/blobs/sha256/{stored.sha256}", f"bytes={position}-{end - 1}"
        status, headers = await self._asking.get(self.peer, path, _content_range, found, wanted)
        if status == 503:
            raise SourceBusy("busy")
        given = headers.get("Content-Range", "no range")
        if status != 206 or not found.whole or given != f"bytes {position}-{end - 1}/{stored.size}":
            raise SourceEnds(f"HTTP {status}, {given}, {found.size} bytes")
        return found


async def files_of(asking: Asking, content: Content, peer: Peer, revision: str) -> dict[str, StoredFile]:
    """A published revision's files by path; only a list that hashes to the revision counts.

    Raises SourceEnds, PeerFault.
    """
    body = Body()
    status, _ = await asking.get(peer, f"/peer/revisions/{revision.removeprefix('sha256:')}", _nothing, body)
    if status != 200:
        raise SourceEnds(f"HTTP {status} for the revision's list of files")
    try:
        files = _stored.decode(bytes(body.data))
    except msgspec.DecodeError as error:
        raise SourceEnds(f"its list of files can't be read: {error}") from error
    if len(files) > MAX_FILES or revision_of(files) != revision:
        asking.strike(content, peer.uid, "its list of files has another hash than the revision")
        raise SourceEnds("a wrong list of files")
    return {file.path: file for file in files}


class FlightReader(_Heard):
    """Reads chunks of a download under way, each verified before it is passed on."""

    def __init__(
        self, asking: Asking, content: Content, peer: Peer, listing: Listing, file: RemoteFile, root: Peer | None
    ) -> None:
        """`root` is the first worker in rank, if it shall be asked for its hashes."""
        super().__init__(peer)
        self._asking, self._content, self._file = asking, content, file
        self._index = listing.files.index(file)
        self._base = f"/peer/flight/{content.name}/{self._index}"
        self._root = root
        self._progress = -1

    async def piece(self, position: int, stop: int) -> Piece:
        """See Reader. The piece is the whole chunk, wherever in it `position` lies."""
        chunk = position // CHUNK
        start, end = span(self._file.size, chunk)
        buffer = self._asking.buffers.take(end - start)
        looks = 0
        while True:
            found = Piece(buffer, start, end, self._hear)
            status, headers = await self._asking.get(self.peer, f"{self._base}/{chunk}", _chunk_fields, found)
            if status == 200:
                await self._verify(chunk, found, headers)
                return found
            if status not in (202, 404, 503):
                raise SourceEnds(f"HTTP {status}")
            if status == 202:
                self._note_progress(headers.get(PROGRESS_HEADER, ""))
            else:
                looks += 1
                await asyncio.sleep(min(LOOK_SECONDS, 0.02 * looks))

    def _note_progress(self, said: str) -> None:
        if not (said.isascii() and said.isdecimal() and len(said) < 20):
            raise SourceEnds("a progress that is no number")
        if int(said) > self._progress:
            self._progress = int(said)
            self._hear()

    async def _verify(self, chunk: int, found: Piece, headers: Headers) -> None:
        hexdigest, what = found.digest.hexdigest(), f"chunk {chunk} of {self._file.path}"
        if not found.whole:
            raise SourceEnds(f"{found.size} bytes for {what}")
        if hexdigest != headers.get(CHUNK_HEADER, ""):
            self._asking.strike(self._content, self.peer.uid, f"{what} has another hash than it said")
            raise SourceEnds("a wrong chunk")
        said = await self._said_by_root(chunk)
        if said and said != hexdigest:
            self._asking.strike(self._content, self.peer.uid, f"{what} isn't what the first in rank has")
            raise SourceEnds("a wrong chunk")

    async def _said_by_root(self, chunk: int) -> str:
        """The chunk's hash by the first worker in rank, "" if it doesn't say."""
        known = self._content.hashes.setdefault(self._index, {})
        now = asyncio.get_running_loop().time()
        root = self._root
        if chunk in known or root is None or root.uid == self.peer.uid or now < self._content.ask_at:
            return known.get(chunk, "")
        body = Body()
        try:
            async with asyncio.timeout(HASHES_SECONDS):
                status, _ = await self._asking.get(root, f"{self._base}/hashes", _nothing, body)
            if status == 200:
                known.update(_hashes.decode(bytes(body.data)))
        except (SourceEnds, PeerFault, TimeoutError, msgspec.DecodeError) as error:
            self._content.ask_at = now + AWAY_SECONDS
            log.debug("no_hashes_of_the_first", peer=root.name, reason=str(error))
        return known.get(chunk, "")


class OriginReader:
    """The origin as one more source of a piece, for when peers keep one waiting."""

    def __init__(self, read: ReadRange, buffers: Buffers, file: RemoteFile) -> None:
        self.peer, self.heard = Peer("", "origin", ""), 0.0
        self._read, self._buffers, self._file = read, buffers, file

    async def piece(self, position: int, stop: int) -> Piece:
        """See Reader."""
        end = min(stop, (position // CHUNK + 1) * CHUNK)
        found = Piece(self._buffers.take(end - position), position, end)

        def sink(block: bytes) -> None:
            view = memoryview(block)
            if len(view) > end - position - found.size:
                raise OriginError(f"{self._file.path}: more bytes than were asked for")
            while view:
                room = found.room(len(view))
                room[:] = view[: len(room)]
                found(room)
                view = view[len(room) :]

        try:
            await self._read(self._file, position, end, sink)
        except OriginError as error:
            raise SourceEnds(str(error)) from error
        if not found.whole:
            raise SourceEnds("the origin's answer ended early")
        return found


def _nothing(status: int, headers: Headers) -> tuple[str, ...]:
    return ()


def _content_range(status: int, headers: Headers) -> tuple[str, ...]:
    return (headers.get("Content-Range", ""),) if status == 206 else ()


def _chunk_fields(status: int, headers: Headers) -> tuple[str, ...]:
    if status == 202:
        return (headers.get(PROGRESS_HEADER, ""),)
    return (headers.get(CHUNK_HEADER, ""), headers.get("Content-Length", "")) if status == 200 else ()
