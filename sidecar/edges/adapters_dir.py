"""Claiming an adapters directory: what is missing is made, what can't work is said at the start, one agent owns it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from sidecar.edges.filesystem import FileSystem
from sidecar.ports import EdgeError

# The engine, another user, reads below revisions/; the rest is the agent's own.
LAYOUT = {
    "revisions": 0o755,
    "blobs": 0o755,
    "blobs/sha256": 0o755,
    "state": 0o755,
    "state/revisions": 0o755,
    "tmp": 0o755,
    "tmp/staging": 0o755,
}
_MAX_HOLDER_BYTES = 512


class StoreUnusable(EdgeError):
    """The adapters directory can't be used as it is; the agent can't start with it."""


def claim(root: Path, holder: str, fs: FileSystem) -> int:
    """Make the layout below `root` and take the exclusive lock on `state/lock`; returns the lock's descriptor.

    The lock goes when the descriptor is closed or the process ends, however it ends. `holder` is what another agent is
    shown. Raises StoreUnusable.
    """
    try:
        _make_root(root, fs)
        _make_layout(root, fs)
        descriptor = _lock(root, holder)
    except PermissionError as error:
        raise _unwritable(root, error) from error
    except OSError as error:
        if error.errno == errno.EROFS:
            raise _unwritable(root, error) from error
        raise StoreUnusable(f"--adapters-dir {root}: {error.strerror} ({error.filename})") from error
    try:
        _probe(root, fs)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _make_root(root: Path, fs: FileSystem) -> None:
    if root.is_dir():
        return
    if os.path.lexists(root):
        raise StoreUnusable(f"--adapters-dir {root} is not a directory: name one, or a path that doesn't exist yet")
    if not root.parent.is_dir():
        raise StoreUnusable(
            f"--adapters-dir {root}: the directory {root.parent} does not exist;"
            " mount the volume that the engine shares there, or make it"
        )
    fs.mkdir(root)


def _make_layout(root: Path, fs: FileSystem) -> None:
    marked = os.path.lexists(root / "state/lock")
    tmp = root / "tmp"
    if not marked and tmp.is_dir() and any(child.name != "staging" for child in tmp.iterdir()):
        # An agent empties tmp/ at its start. Of "/", or "/var", that would be somebody else's.
        raise StoreUnusable(f"--adapters-dir {root} holds a tmp/ that no agent made: name an empty directory")
    for name, mode in LAYOUT.items():
        path = root / name
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):  # another agent starts at the same time: the lock decides
                fs.mkdir(path, mode)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise StoreUnusable(f"--adapters-dir {root}: {path} is not a directory; remove it")
        if found.st_uid == os.geteuid() and found.st_mode & mode != mode:
            fs.chmod(path, mode)


def _lock(root: Path, holder: str) -> int:
    path = root / "state/lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(descriptor, _MAX_HOLDER_BYTES, 0).decode(errors="replace")
        os.close(descriptor)
        raise StoreUnusable(
            f"--adapters-dir {root} is in use by {said or 'another agent'}: two agents would delete files that the"
            " other's engine reads. Give each its own directory or volume, or end the other"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise StoreUnusable(
            f"--adapters-dir {root}: {path} can't be locked ({error.strerror}); use a volume that supports locks"
        ) from error
    # On a full disk the lock holds all the same; that it doesn't say by whom is the least of the troubles then.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        me = f"{holder or 'an agent'} (pid {os.getpid()} on {socket.gethostname()})"
        os.pwrite(descriptor, me.encode()[:_MAX_HOLDER_BYTES], 0)
    return descriptor


def _probe(root: Path, fs: FileSystem) -> None:
    """Whether files can be made, linked and moved everywhere: a volume mounted into the middle breaks that."""
    probe = root / "tmp/probe"
    for name in LAYOUT:
        target = root / name / ".probe"
        try:
            fs.unlink(target)
            # No content: this must work on a full disk too, which is a state of its own and no reason not to start.
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
            fs.link(probe, target)
            fs.unlink(target)
            fs.unlink(probe)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EROFS):
                raise _unwritable(root / name, error) from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return
            raise StoreUnusable(
                f"--adapters-dir {root}: no hard link from tmp/ to {name}/ ({error.strerror});"
                " everything below it must be one file system that supports them, such as an emptyDir or a local disk"
            ) from error


def _unwritable(path: Path, error: OSError) -> StoreUnusable:
    at = Path(error.filename2 or error.filename or path)
    existing = next((one for one in (at, *at.parents) if os.access(one, os.F_OK)), path)
    found = existing.stat()
    return StoreUnusable(
        f"{at} can't be written by uid {os.geteuid()}, gid {os.getegid()} ({error.strerror}): {existing} belongs to uid"
        f" {found.st_uid}, gid {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}. Give the volume to this user"
        " (securityContext.fsGroup, or chown), mount it writable, or name another --adapters-dir"
    )
