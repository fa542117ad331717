"""Unfinished downloads: a directory each, kept over a restart, with the room that was promised to it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Collection
from pathlib import Path

from sidecar.edges.filesystem import FileSystem, StoreFailed, remove_tree, walk

# A download that nobody has resumed for this long belongs to an adapter that is gone.
STALE_SECONDS = 24 * 3600.0

_PLAIN_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Staging:
    """The directories below tmp/staging. Not safe for several threads at once: `AdapterStore` sees to that.

    An area is *active* once this process has asked for it; others are what an earlier one left.
    """

    def __init__(self, root: Path, fs: FileSystem) -> None:
        self.root = root
        self._fs = fs
        self._reserved: dict[str, int] = {}
        self._active: set[str] = set()

    def name(self, key: str) -> str:
        """The directory's name for a key: the key itself if it is a plain name."""
        return key if _PLAIN_KEY.fullmatch(key) else f"k-{hashlib.sha256(key.encode()).hexdigest()}"

    def open(self, key: str) -> Path:
        """The directory for `key`; made if it isn't there."""
        path = self.root / self.name(key)
        self._active.add(path.name)
        if not path.is_dir():
            self._fs.mkdir(path)
        return path

    def reserve(self, key: str, size: int) -> None:
        """Count the download as `size` bytes from now on, or as what is there if that is more."""
        self._active.add(self.name(key))
        self._reserved[self.name(key)] = size

    def release(self, name: str) -> None:
        """The download that used an area has ended: it counts as what is there, and as abandoned."""
        self._reserved.pop(name, None)
        self._active.discard(name)

    def drop(self, name: str) -> None:
        """Remove an area by its directory's name."""
        self.release(name)
        remove_tree(self._fs, self.root / name)

    def drop_stale(self) -> None:
        """Remove what nobody has written to for a day, by the wall clock as the files' times are."""
        oldest = time.time() - STALE_SECONDS
        for area in list(self.root.iterdir()):
            latest = max((found.st_mtime for _, found in walk(area)), default=0.0) if area.is_dir() else 0.0
            if latest < oldest:
                self.drop(area.name)

    def abandoned(self) -> list[str]:
        """Names of areas that no download of this process uses."""
        return [area.name for area in self.root.iterdir() if area.name not in self._active]

    def counted(self, without: Collection[str] = ()) -> int:
        """Bytes of the areas: what is there, or what was promised if that is more."""
        names = {area.name for area in self.root.iterdir()} | self._reserved.keys()
        return sum(max(self.size(name), self._reserved.get(name, 0)) for name in names.difference(without))

    def outstanding(self, without: str = "") -> int:
        """Bytes that were promised to areas but one, and aren't on the disk yet."""
        return sum(max(0, size - self.allocated(name)) for name, size in self._reserved.items() if name != without)

    def size(self, name: str) -> int:
        """Bytes of an area's files by their length; what is a blob as well is counted there."""
        path = self.root / name
        return sum(found.st_size for _, found in walk(path) if found.st_nlink == 1) if path.is_dir() else 0

    def allocated(self, name: str) -> int:
        """Bytes that an area takes on the disk: a file made at full length first takes none."""
        path = self.root / name
        return sum(min(found.st_size, found.st_blocks * 512) for _, found in walk(path)) if path.is_dir() else 0

    def area_of(self, path: Path) -> str:
        """The name of the area that `path` is or lies in. Raises ValueError (in none), StoreFailed (through a link)."""
        if path == self.root or self.root not in path.parents:
            raise ValueError(f"{path} is not below {self.root}")
        check_inside(path, self.root)
        return path.relative_to(self.root).parts[0]


def check_inside(path: Path, root: Path) -> None:
    """Raises StoreFailed if a symbolic link on the way from `root` leads elsewhere."""
    real = os.path.realpath(root)
    if os.path.realpath(path) != os.path.join(real, path.relative_to(root)):
        raise StoreFailed(f"{path} leads out of {root}: links are not followed")
