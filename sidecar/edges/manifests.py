"""Manifest files on disk: which there are, whether they changed, what they hold. Blocking calls.

A directory's own files count, not those of its subdirectories. Hidden names are left out, symbolic links are followed:
so a mounted ConfigMap (`a.yaml -> ..data/a.yaml`, `..data -> ..2026_01_31/`) is read through its links.
"""

from __future__ import annotations

import os
import stat

from sidecar.core.documents import MAX_BYTES, SUFFIXES
from sidecar.core.folder import Stamp

_NOT_A_FILE = "is no regular file"


def list_manifests(directory: str) -> dict[str, Stamp]:
    """The manifests in a directory by file name. Raises OSError if it can't be listed."""
    found: dict[str, Stamp] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if not is_manifest(entry.name):
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue  # removed meanwhile, or a link whose target was
            except OSError as error:
                found[entry.name] = Stamp(error=reason(error))
                continue
            if not stat.S_ISDIR(status.st_mode):
                found[entry.name] = _stamp(status)
    return found


def is_manifest(name: str) -> bool:
    """Whether a file of that name is one in a directory of manifests."""
    return not name.startswith(".") and name.lower().endswith(SUFFIXES)


def looks_like_json(name: str, data: bytes) -> bool:
    """Whether a manifest is JSON, by its name; stdin (`-`) by how it begins."""
    return name.lower().endswith(".json") or (name == "-" and data.lstrip().startswith(b"{"))


def read_manifest(path: str) -> tuple[Stamp, bytes]:
    """The file's stamp and its bytes, cut one byte beyond what a manifest may have.

    The stamp holds an error if the file can't be read, or changes while it is.
    """
    try:
        # Not blocking: opening a named pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            before = _stamp(os.fstat(file.fileno()))
            if before.error:
                return before, b""
            data = _read(file.fileno())
            after = _stamp(os.fstat(file.fileno()))
    except OSError as error:
        return Stamp(error=reason(error)), b""
    return (after, data) if before == after else (after._replace(error="changes while it is being read"), b"")


def reason(error: OSError) -> str:
    """What went wrong, in lower-case words, without the path."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


def _read(descriptor: int) -> bytes:
    chunks: list[bytes] = []
    left = MAX_BYTES + 1
    while left > 0 and (chunk := os.read(descriptor, left)):
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        modified=status.st_mtime_ns,
        changed=status.st_ctime_ns,
        error="" if stat.S_ISREG(status.st_mode) else _NOT_A_FILE,
    )
