"""Unpacking of archives that hold an adapter: tar, tar.gz and zip, told apart by their first bytes.

Nothing of an archive is believed: names must stay inside, links and devices are refused, and what counts against the
limits are the bytes that come out, not those that a header announces.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from sidecar.core.preflight import CONFIG_FILE, Limits, Refused, contained_path, contained_paths
from sidecar.core.refusal import show
from sidecar.edges.filesystem import FileSystem, remove_tree, translated
from sidecar.edges.tar import Member, TarError, members
from sidecar.model import StoredFile
from sidecar.ports import AdapterRejected, EdgeError

_CHUNK = 1024**2
# A zip's list of members is read in one piece; 256 entries with long names take less than half of this.
_MAX_READ = 1024**2
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1


class Interrupted(EdgeError):
    """Unpacking was asked to stop."""


def unpack(
    archive: Path, target: Path, limits: Limits, *, name: str = "", stop: threading.Event | None = None
) -> tuple[StoredFile, ...]:
    """Unpack `archive` into the directory `target`, which is made anew; returns the files with their hashes.

    `name` is what messages call the archive. A single top-level folder is left out if adapter_config.json lies in it;
    what macOS adds to archives is left out, too. Setting `stop` ends it early. Raises AdapterRejected (the archive is
    damaged, leaves its directory, or is beyond the limits), DiskFull, StoreFailed, Interrupted.
    """
    label = name or archive.name
    with translated(f"unpacking {label}"):
        fs = FileSystem()
        remove_tree(fs, target)
        fs.mkdir(target)
        try:
            with archive.open("rb") as file:
                writer = _Writer(target, limits, label, stop)
                for member in _members(file, limits):
                    writer.take(member)
        except Refused as refused:
            raise AdapterRejected(f"{label}: {refused}") from None
        except (TarError, EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError) as error:
            what = "is cut off" if isinstance(error, EOFError) else show(str(error))[1:-1]
            raise AdapterRejected(f"{label}: {what}; a whole .tar, .tar.gz or .zip is needed; pack it again") from None
        return _strip(target, writer.files)


class _Writer:
    """Writes members one after another, and counts."""

    def __init__(self, target: Path, limits: Limits, label: str, stop: threading.Event | None) -> None:
        self.files: dict[str, StoredFile] = {}
        self._folders: set[str] = set()
        self._target = target
        self._limits = limits
        self._label = label
        self._stop = stop
        self._size = 0
        self._count = 0

    def take(self, member: Member) -> None:
        path = "" if member.directory else contained_path(_plain(member.name))
        wanted = bool(path) and not _of_macos(path)
        self._count += 1
        # Folders and what is left out are bounded too: an archive could be made of those alone.
        if len(self.files) + wanted > self._limits.max_files or self._count > 4 * self._limits.max_files:
            raise self._too_much(f"holds more than {self._limits.max_files} files")
        if wanted:
            self._make_room(path)
            self._write(path, member)
        else:
            for _ in self._counted(member):
                pass

    def _make_room(self, path: str) -> None:
        folders = {str(folder) for folder in PurePosixPath(path).parents} - {"."}
        if path in self.files or path in self._folders or folders & self.files.keys():
            contained_paths([*self.files, path])
        self._folders |= folders
        (self._target / path).parent.mkdir(parents=True, exist_ok=True)

    def _write(self, path: str, member: Member) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        digest = hashlib.sha256()
        size = 0
        with os.fdopen(os.open(self._target / path, flags, 0o644), "wb") as out:
            for chunk in self._counted(member):
                digest.update(chunk)
                out.write(chunk)
                size += len(chunk)
        self.files[path] = StoredFile(path=path, size=size, sha256=digest.hexdigest())

    def _counted(self, member: Member) -> Iterator[bytes]:
        for chunk in member.chunks():
            if self._stop is not None and self._stop.is_set():
                raise Interrupted(f"{self._label}: unpacking was interrupted")
            self._size += len(chunk)
            if self._size > self._limits.max_bytes:
                raise self._too_much(f"unpacks to more than {self._limits.max_bytes} bytes")
            yield chunk

    def _too_much(self, what: str) -> AdapterRejected:
        return AdapterRejected(f"{self._label}: {what}, the limit for an adapter; pack one adapter and no more")


def _members(file: BinaryIO, limits: Limits) -> Iterator[Member]:
    magic = file.read(4)
    file.seek(0)
    if magic[:2] == b"\x1f\x8b":
        with gzip.GzipFile(fileobj=file) as plain:
            yield from members(plain, 4 * limits.max_files)
    elif magic[:2] == b"PK":
        yield from _zip_members(file)
    else:
        yield from members(file, 4 * limits.max_files)


class _Bounded(io.RawIOBase):
    """A file of which little is read at once: `zipfile` reads the list of members in one piece, whatever its size."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = -1 if size is None else size
        if wanted > _MAX_READ:
            raise zipfile.BadZipFile(f"has a list of members of {wanted} bytes, more than {_MAX_READ}")
        return self._file.read(wanted)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_SET and offset < 0:
            raise zipfile.BadZipFile(f"points to the place {offset}")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


def _zip_members(file: BinaryIO) -> Iterator[Member]:
    try:
        archive = zipfile.ZipFile(_Bounded(file))
    except (ValueError, struct.error) as error:
        # Names that are no UTF-8, and other things in the list of members that zipfile doesn't expect.
        raise TarError(f"has a damaged list of members ({error})") from None
    with archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise TarError(f"{info.filename!r} is {'a symbolic link' if kind == stat.S_IFLNK else 'no plain file'}")
            if info.flag_bits & _ENCRYPTED:
                raise TarError(f"{info.filename!r} is encrypted")
            if info.compress_type not in _METHODS:
                raise TarError(f"{info.filename!r} is compressed by method {info.compress_type}, not by deflate")
            yield Member(
                info.filename, info.file_size, info.filename.endswith("/"), partial(_zip_chunks, archive, info)
            )


def _zip_chunks(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    try:
        with archive.open(info) as member:
            while chunk := member.read(_CHUNK):
                yield chunk
    except (ValueError, struct.error) as error:
        raise TarError(f"{info.filename!r} is damaged ({error})") from None


def _plain(name: str) -> str:
    """`tar -C adapter .` names its members `./x`."""
    while name.startswith("./"):
        name = name[2:]
    return name


def _of_macos(path: str) -> bool:
    parts = path.split("/")
    return parts[0] == "__MACOSX" or parts[-1].startswith("._") or parts[-1] == ".DS_Store"


def _strip(target: Path, files: dict[str, StoredFile]) -> tuple[StoredFile, ...]:
    """Leave out a single top-level folder that holds the adapter."""
    tops = {path.partition("/")[0] for path in files}
    top = next(iter(tops)) if len(tops) == 1 else ""
    if CONFIG_FILE in files or f"{top}/{CONFIG_FILE}" not in files:
        return tuple(files.values())
    # By a detour: the folder may hold something of its own name.
    aside = target.with_name(f"{target.name}.stripped")
    remove_tree(FileSystem(), aside)
    (target / top).rename(aside)
    target.rmdir()
    aside.rename(target)
    return tuple(
        StoredFile(path=file.path.removeprefix(f"{top}/"), size=file.size, sha256=file.sha256)
        for file in files.values()
    )
