"""What of the downloads under way can be read already: whole chunks with their hashes, for other workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sidecar.core.flight import CHUNK, chunks, flight_id, span
from sidecar.edges.origins import BLOCK, Sink
from sidecar.edges.threads import in_thread
from sidecar.model import Adapter, Listing, RemoteFile

# A finished download is still read by those who are a little behind, from the open files, whatever their names become.
LINGER_SECONDS = 60.0
MAX_FLIGHTS = 64
# Adapters have two files or a few more; what has many is not worth so many open files.
MAX_OPEN_FILES = 16

Present = Callable[[RemoteFile], Iterable[tuple[int, int]]]
"""The spans of a file that are on the disk already."""


class FlightFile:
    """One file of a download. `wrote` runs on readers' threads, each chunk on one at a time; the rest on the loop."""

    def __init__(self, path: Path, size: int, present: Iterable[tuple[int, int]], news: Callable[[], None]) -> None:
        """`present` are spans that an earlier process brought; `news` may be called from any thread."""
        self.size = size
        self.received = 0
        # Hash of each whole chunk; b"" while nobody has asked for it yet.
        self.hashes: dict[int, bytes] = {}
        self._path = path
        self._news = news
        self._growing: dict[int, tuple[int, hashlib._Hash]] = {}
        self._handle = -1
        self._closed = False
        for start, stop in present:
            for chunk in range(start // CHUNK, chunks(stop)):
                if start <= chunk * CHUNK and span(size, chunk)[1] <= stop:
                    self.hashes[chunk] = b""

    def wrote(self, offset: int, block: bytes) -> None:
        """`block` is on the disk at `offset`."""
        self.received += len(block)
        view = memoryview(block)
        while view:
            chunk = offset // CHUNK
            stop = span(self.size, chunk)[1]
            part, view = view[: stop - offset], view[stop - offset :]
            self._grow(chunk, offset, stop, part)
            offset = stop

    def verified(self, chunk: int, digest: bytes) -> None:
        """A whole chunk is on the disk, and its hash is known already."""
        start, stop = span(self.size, chunk)
        self.received += stop - start
        self.hashes[chunk] = digest
        self._news()

    def handle(self) -> int:
        """A descriptor for reading. Raises OSError, ValueError when the download is over."""
        if self._closed:
            raise ValueError("closed")
        if self._handle < 0:
            self._handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._handle

    async def hash_of(self, chunk: int) -> bytes | None:
        """The hash of a chunk, None if it isn't whole."""
        found = self.hashes.get(chunk)
        if found == b"":
            start, stop = span(self.size, chunk)
            handle = self.handle()
            data = await in_thread(lambda: os.pread(handle, stop - start, start))
            found = self.hashes[chunk] = hashlib.sha256(data).digest()
        return found

    def close(self) -> None:
        """Nothing can be read any more."""
        handle, self._handle, self._closed = self._handle, -1, True
        if handle >= 0:
            os.close(handle)

    def _grow(self, chunk: int, offset: int, stop: int, part: memoryview) -> None:
        position, digest = self._growing.get(chunk, (chunk * CHUNK, None))
        if position != offset or chunk in self.hashes:
            return
        digest = digest or hashlib.sha256()
        digest.update(part)
        if offset + len(part) < stop:
            self._growing[chunk] = (offset + len(part), digest)
            return
        self._growing.pop(chunk, None)
        self.hashes[chunk] = digest.digest()
        self._news()


class Tee:
    """A sink that notes what another one has written."""

    def __init__(self, file: FlightFile, position: int, sink: Sink) -> None:
        self._file, self._position, self._sink = file, position, sink

    def __call__(self, block: bytes) -> None:
        """See Sink."""
        self._sink(block)
        self._file.wrote(self._position, block)
        self._position += len(block)

    def is_chunk(self, start: int, stop: int) -> bool:
        """Whether these bytes are exactly one chunk of the file."""
        return span(self._file.size, start // CHUNK) == (start, stop)

    def chunk(self, number: int, data: memoryview, digest: bytes) -> None:
        """A whole chunk that was verified already: it isn't hashed again. It begins where the last block ended."""
        for at in range(0, len(data), BLOCK):
            self._sink(data[at : at + BLOCK])  # type: ignore[arg-type]  # whatever has bytes inside will do
        self._file.verified(number, digest)
        self._position += len(data)


class Flight:
    """One download. Its files are those of the listing, in that order."""

    def __init__(
        self, listing: Listing, root: Path, present: Callable[[RemoteFile], Iterable[tuple[int, int]]]
    ) -> None:
        """`present` gives the spans of a file that an earlier process brought."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._indices = {file.path: n for n, file in enumerate(listing.files)}
        self.files = [FlightFile(root / file.path, file.size, present(file), self._tell) for file in listing.files]
        self.over = False
        self.readers = 0

    @property
    def progress(self) -> int:
        """Bytes received by this process: grows as long as it is worth waiting."""
        return sum(file.received for file in self.files)

    def tee(self, file: RemoteFile, start: int, sink: Sink) -> Tee:
        """A sink that passes on to `sink`, and notes what that has written from `start` on."""
        return Tee(self.files[self._indices[file.path]], start, sink)

    async def wait_for(self, file: int, chunk: int, seconds: float) -> bytes | None:
        """The hash of a chunk as soon as it is whole; None if it isn't by then, or if the download ended."""
        until = self._loop.time() + seconds
        while True:
            found = await self.files[file].hash_of(chunk)
            left = until - self._loop.time()
            if found is not None or self.over or left <= 0:
                return found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def keep_open(self) -> None:
        """Open what nobody has read yet: the files are about to get other names."""
        for file in self.files if len(self.files) <= MAX_OPEN_FILES else ():
            with contextlib.suppress(OSError, ValueError):
                file.handle()

    def close(self) -> None:
        """Let go of the files. Whoever waits goes away empty."""
        self.over = True
        self._wake()
        for file in self.files:
            file.close()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Flights:
    """The downloads that can be read from. Only for the event loop's thread."""

    def __init__(self, *, linger: float = LINGER_SECONDS) -> None:
        self._flights: dict[str, Flight] = {}
        self._linger = linger
        self._timers: dict[Flight, asyncio.TimerHandle] = {}

    def find(self, name: str) -> Flight | None:
        """The download of that `flight_id`."""
        return self._flights.get(name)

    @contextlib.contextmanager
    def share(
        self,
        adapter: Adapter,
        listing: Listing,
        root: Path,
        present: Present = lambda file: (),
    ) -> Iterator[Flight]:
        """Let others read a download while this context lasts, and a while longer if it ends well."""
        name = flight_id(adapter.source_id, listing)
        flight = Flight(listing, root, present)
        before = self._flights.pop(name, None)
        if before is not None:
            self._drop(before)
        self._flights[name] = flight
        if len(self._flights) > MAX_FLIGHTS:
            self._drop(self._flights.pop(next(iter(self._flights))))
        try:
            yield flight
        except BaseException:
            self._end(name, flight)
            raise
        flight.keep_open()
        timer = asyncio.get_running_loop().call_later(self._linger, self._end, name, flight)
        self._timers[flight] = timer

    def close(self) -> None:
        """Let go of everything."""
        for flight in self._flights.values():
            self._drop(flight)
        self._flights.clear()

    def _end(self, name: str, flight: Flight) -> None:
        if self._flights.get(name) is flight:
            del self._flights[name]
        self._drop(flight)

    def _drop(self, flight: Flight) -> None:
        timer = self._timers.pop(flight, None)
        if timer is not None:
            timer.cancel()
        flight.close()
