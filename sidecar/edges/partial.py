"""A download in its staging directory, in a form that survives being killed at any moment.

    <staging>/journal    one JSON line for the listing, then one for each part and file that is whole
    <staging>/files/…    the files, at their own relative paths

A part is written, synced to the disk and only then noted; the journal's end that a crash tore off is cut away. Small
files aren't synced: their note holds their hash, which is compared when a later process finds them.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from sidecar.edges.filesystem import translated
from sidecar.model import Frozen, Listing, RemoteFile, StoredFile
from sidecar.settings import MIB

PART = 32 * MIB
"""Bytes of a part: what one request fetches, and what a crash loses. Smaller ones cost requests, larger ones time."""

BLOCK = MIB

FILES = "files"
"""Name of the subdirectory that holds the downloaded files at their own relative paths."""

Reuse = Callable[[str, Path], bool]
"""Links the content with this sha256 to this path, if it is on the disk already, and says whether it was."""

_KNOWN_SHA256 = re.compile(r"sha256:([0-9a-f]{64})(@[^@]*)?")


def known_sha256(file: RemoteFile) -> str:
    """The file's hash, where its origin tells it (as an ETag without quotes); "" elsewhere."""
    known = _KNOWN_SHA256.fullmatch(file.etag)
    return known[1] if known else ""


class _Note(Frozen, frozen=True, kw_only=True):
    """One line of the journal: part `part` of file number `file` is whole, or with `sha256` all of it."""

    file: int
    part: int = -1
    sha256: str = ""


class _Header(Frozen, frozen=True, kw_only=True):
    """The journal's first line: notes under any other one are about something else."""

    listing: Listing
    part_bytes: int


class Journal:
    """Append-only notes about what is whole. Its lines are written one at a time, from any thread. Raises OSError."""

    def __init__(self, path: Path, listing: Listing, part_bytes: int) -> None:
        self._lock = threading.Lock()
        self.parts: dict[int, set[int]] = {}
        self.whole: dict[int, str] = {}
        header = msgspec.json.encode(_Header(listing=listing, part_bytes=part_bytes)) + b"\n"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(self._file, "rb", closefd=False) as reader:
            valid = self._replay(reader.read(), header)
        os.ftruncate(self._file, valid)
        if not valid:
            self._append(header)

    def note_part(self, file: int, part: int) -> None:
        """Part number `part` of this file is on the disk."""
        self._append(msgspec.json.encode(_Note(file=file, part=part)) + b"\n", sync=True)

    def note_whole(self, file: int, sha256: str) -> None:
        """All of this file is written and has this hash."""
        self._append(msgspec.json.encode(_Note(file=file, sha256=sha256)) + b"\n")

    def close(self) -> None:
        """No more notes: one that comes later, from a thread that nobody waits for, raises."""
        with self._lock:
            os.close(self._file)
            self._file = -1

    def _append(self, line: bytes, *, sync: bool = False) -> None:
        with self._lock:
            os.write(self._file, line)
            if sync:
                os.fdatasync(self._file)

    def _replay(self, data: bytes, header: bytes) -> int:
        """Take over the notes; returns how many bytes of the journal are valid."""
        if not data.startswith(header):
            return 0
        valid = len(header)
        for line in data[valid:].splitlines(keepends=True):
            try:
                note = msgspec.json.decode(line, type=_Note)
            except msgspec.DecodeError:
                break
            if not line.endswith(b"\n"):
                break
            if note.sha256:
                self.whole[note.file] = note.sha256
            else:
                self.parts.setdefault(note.file, set()).add(note.part)
            valid += len(line)
        return valid


class RunningHash:
    """sha256 of a file whose bytes come in any order: of the bytes as they are written where they come in order, else
    read back from the page cache."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._position = 0
        self._lock = threading.Lock()

    def wrote(self, offset: int, block: bytes) -> None:
        """`block` has been written at `offset`."""
        if offset != self._position:
            return
        with self._lock:
            if offset == self._position:
                self._digest.update(block)
                self._position += len(block)

    def catch_up(self, handle: int, stop: int) -> None:
        """Read everything before `stop`, all of which is whole. Several threads may do so at once."""
        while True:
            with self._lock:
                left = stop - self._position
                if left <= 0:
                    return
                block = os.pread(handle, min(BLOCK, left), self._position)
                if not block:
                    raise OSError(f"it ends at byte {self._position}, not {stop}: somebody else shortened it")
                self._digest.update(block)
                self._position += len(block)

    def hexdigest(self) -> str:
        """Of all bytes so far."""
        return self._digest.hexdigest()


class PartialFile:
    """One file of a download. Writing and finishing block and may run on any thread, each part on one at a time.

    All methods raise DiskFull and StoreFailed.
    """

    def __init__(
        self, number: int, remote: RemoteFile, path: Path, journal: Journal, reuse: Reuse, part_bytes: int
    ) -> None:
        self.remote = remote
        self.sha256 = ""
        self.parts = max(1, -(-remote.size // part_bytes))
        self.done: set[int] = set()
        self._part_bytes = part_bytes
        self._number = number
        self._path = path
        self._journal = journal
        self._hash = RunningHash()
        self._doing = f"writing {path}"
        self._writing = threading.Lock()
        with translated(self._doing):
            path.parent.mkdir(parents=True, exist_ok=True)
            known = known_sha256(remote)
            if known and reuse(known, path) and path.lstat().st_size == remote.size:
                self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                self.sha256, self.done = known, set(range(self.parts))
            else:
                self._handle = self._open()

    def span(self, part: int) -> tuple[int, int]:
        """First byte of a part, and the one behind it."""
        return part * self._part_bytes, min((part + 1) * self._part_bytes, self.remote.size)

    @property
    def bytes_done(self) -> int:
        """Bytes in the parts that are whole."""
        return sum(stop - start for start, stop in map(self.span, tuple(self.done)))

    def write(self, offset: int, block: bytes) -> None:
        """Put `block` at `offset`."""
        view = memoryview(block)
        written = 0
        with translated(self._doing), self._writing:
            while written < len(view):
                written += os.pwrite(self._handle, view[written:], offset + written)
        self._hash.wrote(offset, block)

    def finish_part(self, part: int) -> None:
        """Note that a part is whole, and hash what can be."""
        if self.parts == 1:
            self.finish()
            return
        with translated(self._doing):
            os.fdatasync(self._handle)
            self._journal.note_part(self._number, part)
            whole = self.done | {part}
            first_missing = next((number for number in range(self.parts) if number not in whole), self.parts)
            self._hash.catch_up(self._handle, min(first_missing * self._part_bytes, self.remote.size))

    def finish(self) -> StoredFile:
        """The file's identity, when all its parts are whole."""
        if not self.sha256:
            with translated(self._doing):
                self._hash.catch_up(self._handle, self.remote.size)
                self.sha256 = self._hash.hexdigest()
                self._journal.note_whole(self._number, self.sha256)
        return StoredFile(path=self.remote.path, size=self.remote.size, sha256=self.sha256)

    def close(self) -> None:
        """Let go of the file. A write that comes later, from a thread that nobody waits for, raises; without that it
        could go to whatever file has the same descriptor by then."""
        with self._writing:
            os.close(self._handle)
            self._handle = -1

    def _open(self) -> int:
        """A handle to what an earlier process left, or to a new file.

        A file that is whole may already be linked to a blob, which the engine reads: then it is never written to.
        """
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(FileNotFoundError):
            found = self._path.lstat()
            own = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_mode & stat.S_IWUSR
            handle = os.open(self._path, flags | (os.O_RDWR if own else os.O_RDONLY))
            self._recover(handle)
            if own or len(self.done) == self.parts:
                return handle
            os.close(handle)
            self._path.unlink()
        self.done, self._hash = set(), RunningHash()
        return os.open(self._path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)

    def _recover(self, handle: int) -> None:
        """Believe no more than the journal and the file's length both vouch for."""
        size = os.fstat(handle).st_size
        if size > self.remote.size:
            return
        sha256 = self._journal.whole.get(self._number, "")
        if self.parts > 1:
            noted = self._journal.parts.get(self._number, set())
            self.done = {part for part in noted if 0 <= part < self.parts and self.span(part)[1] <= size}
            self.sha256 = sha256 if len(self.done) == self.parts else ""
        elif sha256 and size == self.remote.size:
            self._hash.catch_up(handle, size)
            if self._hash.hexdigest() == sha256:
                self.done = {0}
            else:
                self._hash = RunningHash()


class PartialContent:
    """All files of a listing in one staging directory. Making one blocks. Raises DiskFull, StoreFailed."""

    def __init__(self, directory: Path, listing: Listing, reuse: Reuse, part_bytes: int = PART) -> None:
        self.root = directory / FILES
        self.files: list[PartialFile] = []
        with translated(f"writing {directory}"):
            self._journal = Journal(directory / "journal", listing, part_bytes)
        try:
            for number, remote in enumerate(listing.files):
                path = self.root / remote.path
                self.files.append(PartialFile(number, remote, path, self._journal, reuse, part_bytes))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of all files; what is noted stays."""
        # First, so that nothing is noted that can't be synced any more.
        self._journal.close()
        for file in self.files:
            file.close()
