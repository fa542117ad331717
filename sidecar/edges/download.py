"""The transfer of one content's bytes into its staging directory: files and parts in parallel, faults retried."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Protocol

from sidecar.core.retry import Backoff
from sidecar.edges.origins import BLOCK, Sink
from sidecar.edges.partial import PartialContent, PartialFile
from sidecar.edges.slots import Slots
from sidecar.edges.threads import in_thread, uninterrupted
from sidecar.model import RemoteFile, StoredFile
from sidecar.ports import OriginChanged, OriginDenied, OriginError

ATTEMPTS = 5
"""In a row without progress, for one part. The caller's own retries are slower and go on for ever."""

BACKOFF = Backoff(first=0.2, cap=3.0)

STREAMS = 4
"""Parts of one content under way at a time: origins limit a single stream to 50 or 100 MB/s."""


class ReadRange(Protocol):
    """As Origin.read, from wherever the bytes are best had."""

    def __call__(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> Coroutine[Any, Any, None]: ...


Pause = Callable[[float], Awaitable[None]]
"""Waits so many seconds before a part is tried again."""


class Download:
    """Brings everything in `content` that is missing. `run` is called once."""

    def __init__(
        self,
        content: PartialContent,
        read: ReadRange,
        slots: Slots,
        *,
        where: str = "origin",
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._content = content
        self._read = read
        self._slots = slots
        self._where = where
        self._pause = pause
        self._under_way: set[_Part] = set()

    @property
    def bytes_done(self) -> int:
        """Bytes that are here, parts under way included."""
        return sum(file.bytes_done for file in self._content.files) + sum(part.received for part in self._under_way)

    async def run(self) -> tuple[StoredFile, ...]:
        """Returns all files with their hashes. What is whole stays, whatever happens.

        Raises OriginError and its subclasses, DiskFull, StoreFailed.
        """
        # Small files first: if they are not as expected, that shows before the large ones are read.
        files = sorted(self._content.files, key=lambda file: file.remote.size)
        work = ((file, part) for file in files for part in range(file.parts) if part not in file.done)
        streams = [asyncio.create_task(self._stream(work)) for _ in range(STREAMS)]
        try:
            await asyncio.gather(*streams)
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return await in_thread(lambda: tuple(file.finish() for file in self._content.files))

    async def _stream(self, work: Iterator[tuple[PartialFile, int]]) -> None:
        for file, number in work:
            part = _Part(file, number)
            self._under_way.add(part)
            try:
                await self._fill(part)
                # Also when another part has just failed: what is here should stay.
                await uninterrupted(in_thread(partial(file.finish_part, number)))
                file.done.add(number)
            finally:
                part.attempt.close()
                self._under_way.discard(part)
            if len(file.done) == file.parts and not file.sha256:
                await uninterrupted(in_thread(file.finish))

    async def _fill(self, part: _Part) -> None:
        """Read until the part is whole, going on where a fault came."""
        failures = 0
        while part.attempt.position < part.stop:
            attempt = part.next_attempt()
            start = attempt.position
            try:
                await self._attempt(part.file.remote, attempt)
            except (OriginChanged, OriginDenied):
                raise
            except OriginError:
                failures = 1 if attempt.position - start >= BLOCK else failures + 1
                if failures >= ATTEMPTS:
                    raise
                await self._pause(BACKOFF.delay(failures, random.random()))

    async def _attempt(self, remote: RemoteFile, attempt: _Attempt) -> None:
        start = attempt.position
        what = f"{self._where}: {remote.path}"
        try:
            await self._slots.run(
                lambda: self._read(remote, start, attempt.stop, attempt), lambda: attempt.position, what
            )
        finally:
            attempt.close()
        if attempt.position < attempt.stop:
            raise OriginError(f"{what}: {attempt.stop - attempt.position} bytes are missing from the answer")


class Closed(Exception):
    """Ends a read that nobody waits for any more."""


class _Attempt:
    """Writes what one reader brings to where it belongs. See Sink.

    Each attempt has its own position: a reader that was given up may still be about to write its last block, which does
    no harm where it belongs, but must not shift what its successor brings.
    """

    def __init__(self, file: PartialFile, position: int, stop: int) -> None:
        self.position = position
        self.stop = stop
        self._file = file
        self._closed = False

    def __call__(self, block: bytes) -> None:
        """Runs on the reader's thread."""
        if self._closed:
            raise Closed
        if self.position + len(block) > self.stop:
            raise OriginChanged(f"{self._file.remote.path}: more bytes than were asked for")
        self._file.write(self.position, block)
        self.position += len(block)

    def close(self) -> None:
        """Take nothing more."""
        self._closed = True


class _Part:
    """One part under way: its present attempt goes on where the last one stopped."""

    def __init__(self, file: PartialFile, number: int) -> None:
        self.file = file
        self.start, self.stop = file.span(number)
        self.attempt = _Attempt(file, self.start, self.stop)

    @property
    def received(self) -> int:
        """Bytes so far."""
        return self.attempt.position - self.start

    def next_attempt(self) -> _Attempt:
        """For the rest of the part."""
        self.attempt = _Attempt(self.file, self.attempt.position, self.stop)
        return self.attempt
