"""The preflight of an adapter that lies in a directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sidecar.core.preflight import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Limits,
    Refused,
    check_adapter,
    check_files,
    header_end,
)
from sidecar.edges.filesystem import translated, walk
from sidecar.ports import AdapterRejected


def inspect_adapter(directory: Path, limits: Limits) -> tuple[str, ...]:
    """Check the adapter in `directory` (all files below it); returns the warnings. Blocks for the disk.

    Raises AdapterRejected with the file, the value, the limit and the way out; StoreFailed if it can't be read.
    """
    with translated(f"checking {directory}"):
        try:
            return _inspect(directory, limits)
        except Refused as refused:
            raise AdapterRejected(str(refused)) from None


def _inspect(directory: Path, limits: Limits) -> tuple[str, ...]:
    files = {}
    for name, found in walk(directory):
        if not stat.S_ISREG(found.st_mode):
            raise Refused(name, "is no regular file", "links and devices are not served", "replace it by its content")
        files[name] = found.st_size
    weights = check_files(files, limits)
    # One byte more than is allowed tells that it is too long.
    config = _beginning(directory / CONFIG_FILE, limits.max_config_bytes + 1)
    header = b""
    if weights == WEIGHTS_FILE:
        path = directory / WEIGHTS_FILE
        end = header_end(_beginning(path, 8), files[WEIGHTS_FILE], limits)
        header = _beginning(path, end)
    return check_adapter(files, config, header, limits)


def _beginning(path: Path, size: int) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(size)
