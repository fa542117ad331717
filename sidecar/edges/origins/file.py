"""Origin `file://`: a directory or an archive on this machine. It is copied like any other, so it may change later."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sidecar.core.sources import FileSource, is_archive
from sidecar.edges.origins import BLOCK, Sink, listing_of, too_many
from sidecar.edges.threads import in_thread
from sidecar.model import MAX_FILES, Listing, RemoteFile
from sidecar.ports import AdapterRejected, OriginChanged, OriginDenied, OriginError


class FileOrigin:
    """See Origin. A file's ETag is its inode, size and time of change: a rewrite under the same name is seen."""

    def __init__(self, source: FileSource) -> None:
        self._root = Path(source.path)
        self._where = str(source)

    async def listing(self) -> Listing:
        """See Origin."""
        return await in_thread(self._list)

    async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        """See Origin."""
        await in_thread(lambda: self._read(file, start, stop, sink))

    def _list(self) -> Listing:
        try:
            status = self._root.stat()
            if stat.S_ISDIR(status.st_mode):
                files = list(self._walk(self._root.resolve()))
                if not files:
                    raise OriginDenied(f"{self._where} is an empty directory")
                return listing_of(files, self._where)
        except OSError as error:
            raise self._failure(error) from None
        if not stat.S_ISREG(status.st_mode) or not is_archive(self._root.name):
            raise OriginDenied(f"{self._where} is neither a directory nor a .tar.gz, .tgz, .tar or .zip archive")
        return listing_of([_remote(self._root.name, status)], self._where, archive=True)

    def _walk(self, root: Path) -> Iterator[RemoteFile]:
        allowed = [root]
        if root.parent.name == "snapshots":  # the hub client's cache: snapshots/<commit>/x -> ../../blobs/<hash>
            allowed.append(root.parent.parent / "blobs")
        count = 0
        for directory, subdirectories, names in os.walk(root, onerror=_raise):
            # A ConfigMap's volume keeps its versions in directories named ..2026_…, with links to the present one.
            subdirectories[:] = [name for name in subdirectories if not name.startswith("..")]
            here = Path(directory)
            for name in subdirectories:
                if (here / name).is_symlink():
                    raise AdapterRejected(f"{self._where}: {here / name} is a link to a directory; put the files there")
            for name in names:
                count += 1
                if count > MAX_FILES:
                    raise AdapterRejected(too_many(self._where, f"more than {MAX_FILES}"))
                yield self._file(root, here / name, allowed)

    def _file(self, root: Path, path: Path, allowed: list[Path]) -> RemoteFile:
        real = path.resolve(strict=True)
        if not any(real.is_relative_to(directory) for directory in allowed):
            raise AdapterRejected(f"{self._where}: {path} is a link to {real}, outside of the adapter's directory")
        status = real.stat()
        if not stat.S_ISREG(status.st_mode):
            raise AdapterRejected(f"{self._where}: {path} is not an ordinary file")
        return _remote(str(path.relative_to(root)), status)

    def _read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        root = self._root
        path = root if is_archive(root.name) and root.is_file() else root.joinpath(file.path)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise OriginChanged(f"{self._where}: {file.path} is gone") from None
        except OSError as error:
            raise self._failure(error) from None
        try:
            self._same(file, handle)
            position = start
            while position < stop:
                block = self._block(handle, min(BLOCK, stop - position), position)
                if not block:
                    raise OriginChanged(f"{self._where}: {file.path} ends at {position} of {file.size} bytes")
                sink(block)
                position += len(block)
            self._same(file, handle)
        finally:
            os.close(handle)

    def _block(self, handle: int, size: int, position: int) -> bytes:
        try:
            return os.pread(handle, size, position)
        except OSError as error:
            raise self._failure(error) from None

    def _same(self, file: RemoteFile, handle: int) -> None:
        now = _remote(file.path, os.fstat(handle))
        if now != file:
            raise OriginChanged(
                f"{self._where}: {file.path} was changed since it was listed ({file.size} bytes then, {now.size} now)"
            )

    def _failure(self, error: OSError) -> OriginError:
        reason = f"{self._where}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            return OriginDenied(f"{reason} on this machine: mount it at the same path beside every worker")
        if isinstance(error, PermissionError | NotADirectoryError):
            return OriginDenied(f"{reason} (as user {os.getuid()})")
        return OriginError(reason)


def _remote(path: str, status: os.stat_result) -> RemoteFile:
    etag = f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"'
    return RemoteFile(path=path, size=status.st_size, etag=etag)


def _raise(error: OSError) -> None:
    raise error
