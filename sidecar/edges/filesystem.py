"""The few changes that the store makes to a disk, each one step between two of which a crash may lie.

Everything that changes the adapters directory goes through here, so that a test can put its own in the place and end
the process, fill the disk or cut the power at every single step.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sidecar.ports import DiskFull, EdgeError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# File systems without these (some network and FUSE volumes) still keep what they are given.
_UNSUPPORTED = frozenset({errno.EPERM, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


class StoreFailed(EdgeError):
    """The adapters directory can't be read or written, for another reason than room."""


class FileSystem:
    """Thin wrappers, so that what is durable is said in one place. All raise OSError."""

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        """A directory with exactly this mode, whatever the umask: the engine runs as another user."""
        path.mkdir()
        self.chmod(path, mode)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file."""
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces a file, or nothing."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Take a name away; no error if it is gone."""
        path.unlink(missing_ok=True)

    def rmdir(self, path: Path) -> None:
        """Take an empty directory away."""
        path.rmdir()

    def chmod(self, path: Path, mode: int) -> None:
        """Permission bits, where the file system has them."""
        try:
            path.chmod(mode)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise

    def create(self, path: Path, data: bytes) -> None:
        """A new file with this content, on the disk when this returns."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """A file's content, or a directory's list of names, on the disk when this returns."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(fs: FileSystem, path: Path, data: bytes) -> None:
    """`path` has the content `data` or its old one, whenever the machine stops. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fs.create(fresh, data)
        fs.rename(fresh, path)
    except OSError:
        # On a full disk the half of a new file would take the room that the next attempt needs.
        with suppress(OSError):
            fs.unlink(fresh)
        raise
    fs.sync(path.parent)


def remove_tree(fs: FileSystem, path: Path) -> None:
    """Delete a directory and what is in it, read-only or not, without following a link. No error if it is gone."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        fs.unlink(path)
        return
    if mode & 0o700 != 0o700:
        fs.chmod(path, 0o755)
    for child in list(path.iterdir()):
        remove_tree(fs, child)
    fs.rmdir(path)


def regular_size(path: Path) -> int | None:
    """The size in bytes of a regular file (not of what a link points to), None if there is none."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """(relative path with `/`, lstat) of everything below `root` that is no directory; links are not followed."""
    pending = [(root, "")]
    while pending:
        directory, prefix = pending.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((directory / entry.name, f"{prefix}{entry.name}/"))
                else:
                    yield prefix + entry.name, entry.stat(follow_symlinks=False)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """OSError as DiskFull or StoreFailed, with what was being done."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        text = f"{doing}: {error.strerror or error}{where}"
        if error.errno in _FULL:
            raise DiskFull(f"{text}: free some room there, or lower --disk-quota") from error
        raise StoreFailed(text) from error


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size:,} bytes" if size < 1024**2 else f"{size / 1024**2:,.1f} MiB"
