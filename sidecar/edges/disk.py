"""The adapters directory: what was downloaded, by content, and what the agent remembers.

revisions/<hex>/            one directory a revision, read-only; the path that the engine is given
blobs/sha256/<hex>          the content of its files, hard-linked: counted once however many revisions share it
state/<name>                what the agent saves; state/lock: one agent a directory
state/revisions/<hex>.json  the list of the revision's files; its time of change is the revision's last use
tmp/staging/<key>/          downloads, kept over a restart; everything else in tmp/ is debris, removed at the start
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from sidecar.edges.adapters_dir import claim
from sidecar.edges.filesystem import FileSystem, mib, regular_size, replace_file, translated
from sidecar.edges.revisions import Revisions, checked
from sidecar.edges.staging import Staging
from sidecar.model import StoredFile, revision_of
from sidecar.ports import DiskFull

log = structlog.get_logger()

# Kept free for state/: an agent that can't save what it knows forgets it with its next restart.
HEADROOM_BYTES = 8 * 1024**2

_STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NO_STATE_NAMES = frozenset({"lock", "revisions"})


class AdapterStore:
    """`ports.Store` on a disk, and what a fetcher needs of it.

    Calls block for the disk (use a thread) but for `revisions`, `revisions_dir`, `files` and `touch`. Safe to call from
    several threads. What writes raises DiskFull (no room) or StoreFailed (anything else that the disk says).
    """

    def __init__(self, root: Path, lock: int, *, quota: int, fs: FileSystem) -> None:
        """For `open`, which see."""
        self._root = root
        self._lock_descriptor = lock
        self._quota = quota
        self._fs = fs
        self._revisions = Revisions(root, fs)
        self._staging = Staging(root / "tmp/staging", fs)
        self._mutex = threading.RLock()
        # Revisions that `need` must leave alone: the last that `evict` was told (None: nobody has said yet), and what
        # was published since, which that could not know.
        self._keep: frozenset[str] | None = None
        self._published: set[str] = set()

    @classmethod
    def open(cls, root: str, *, quota: int = 0, holder: str = "", fs: FileSystem | None = None) -> AdapterStore:
        """Claim `root` for this process, clear what a crash left, and see what is there.

        `quota` is in bytes, 0 for none; `holder` names this agent to another one that tries the same directory. The
        revisions' sizes are checked, not their hashes (`verify` does that). Raises StoreUnusable, StoreFailed.
        """
        path = Path(os.path.abspath(root))
        filesystem = fs or FileSystem()
        store = cls(path, claim(path, holder, filesystem), quota=quota, fs=filesystem)
        try:
            with translated(f"reading {path}"):
                store._recover()
        except BaseException:
            store.close()
            raise
        return store

    def _recover(self) -> None:
        for directory in (self._root / "state", self._root / "state/revisions"):
            for path in list(directory.glob(".*.new")):
                self._fs.unlink(path)
        self._staging.drop_stale()
        self._revisions.recover()

    def close(self) -> None:
        """Give the directory back."""
        descriptor, self._lock_descriptor = self._lock_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # -- what is there ------------------------------------------------------------------------------------------

    @property
    def revisions_dir(self) -> str:
        """Absolute path under which every revision's directory lies, as the engine sees it (links not resolved)."""
        return str(self._revisions.directory)

    def revisions(self) -> Mapping[str, str]:
        """Revision -> absolute path of its published, sound directory. A snapshot that doesn't change."""
        return self._revisions.offered

    def files(self, revision: str) -> tuple[StoredFile, ...]:
        """The files of a published revision; empty if it isn't there."""
        return self._revisions.files(revision)

    def blob(self, sha256: str) -> Path | None:
        """The path of the content with this hash (64 hex digits), None if it isn't there whole. Only for reading."""
        return self._revisions.blob(sha256)

    def usage(self) -> int:
        """Bytes that count against the quota: each blob once, and downloads (what is there, or what they asked for)."""
        with self._mutex, translated(f"reading {self._root}"):
            return self._revisions.size + self._staging.counted()

    def verify(self, revision: str) -> bool:
        """Whether the revision's files are, byte for byte, what its hash says. Reads all of it.

        A revision that isn't is no longer offered, and its damaged blobs are gone; its directory stays for the engine.
        """
        with translated(f"verifying {revision}"):
            if revision not in self._revisions.offered:
                return False
            wrong = self._revisions.damaged_files(revision)
            with self._mutex:
                # Looked at without the mutex, since it takes long: the revision may have been evicted meanwhile.
                if wrong and revision in self._revisions.offered:
                    self._revisions.condemn(revision, wrong)
            return not wrong

    # -- downloads ----------------------------------------------------------------------------------------------

    def staging(self, key: str) -> Path:
        """A directory for the download of one content, the same for the same `key` after a restart. It exists."""
        with self._mutex, translated(f"making room for the download {key}"):
            return self._staging.open(key)

    def discard(self, key: str) -> None:
        """Drop a download and what was promised to it."""
        with self._mutex, translated(f"dropping the download {key}"):
            self._staging.drop(self._staging.name(key))

    def release(self, key: str) -> None:
        """Keep what a download has brought, until its room is needed, but not what was promised to it."""
        with self._mutex:
            self._staging.release(self._staging.name(key))

    def reuse(self, sha256: str, target: Path) -> bool:
        """Link the content with this hash to `target`, below a staging directory; False if it isn't here.

        The file there must never be written to: it is the very one that the engine reads.
        """
        with self._mutex, translated(f"linking {target}"):
            self._staging.area_of(target.parent)
            blob = self._revisions.blob(sha256)
            if blob is None:
                return False
            self._fs.unlink(target)
            self._fs.link(blob, target)
            return True

    def need(self, size: int, key: str = "") -> None:
        """Make room for `size` bytes more; with `key`, for `size` bytes that this download will have in all, and keep
        that room for it until it is published or discarded.

        With a quota, abandoned downloads go first, then the least recently used revisions outside the last `keep` that
        `evict` was told (before the first, none goes). Raises DiskFull with the numbers.
        """
        with self._mutex, translated(f"making room in {self._root}"):
            name = self._staging.name(key) if key else ""
            self._need_of_quota(size, name)
            self._need_of_disk(size, name)
            if key:
                self._staging.reserve(key, size)

    def publish(self, staged: Path, files: Sequence[StoredFile]) -> tuple[str, Path]:
        """Make a revision of `files`, which lie below `staged` (or are blobs already); returns it and its directory.

        The caller has verified the hashes; sizes are checked here. Complete or not there, at whatever point the machine
        stops, and then `staged` is still whole. Published already: nothing changes. The download that `staged` belongs
        to is removed. Raises DiskFull, StoreFailed (a file is missing or has another size).
        """
        revision = revision_of(list(files))
        with translated(f"publishing {revision}"):
            ordered = checked(files)
            area = self._staging.area_of(staged)
            for file in ordered:
                # Without the mutex: of a big file this takes seconds. Once more inside costs nothing then.
                if regular_size(staged / file.path) is not None:
                    self._fs.sync(staged / file.path)
            with self._mutex:
                path = self._revisions.put(revision, staged, ordered)
                self._published.add(revision)
                self._revisions.touch(revision)
                self._staging.drop(area)
        log.info("revision_published", revision=revision, files=len(ordered), size=sum(f.size for f in ordered))
        return revision, path

    # -- room ---------------------------------------------------------------------------------------------------

    def touch(self, revision: str) -> None:
        """Note a use, for LRU. Outlives the process."""
        self._revisions.touch(revision)

    def evict(self, keep: frozenset[str]) -> tuple[str, ...]:
        """Delete least recently used revisions outside `keep` until the quota is met; returns those deleted.

        Until the next call, `need` spares `keep` too. Without a quota nothing goes.
        """
        with self._mutex, translated(f"making room in {self._root}"):
            self._keep = keep
            self._published.clear()
            self._revisions.clear_debris()
            if not self._quota:
                return ()
            return self._reclaim(lambda: self._counted() <= self._quota)

    def _need_of_quota(self, size: int, name: str) -> None:
        if not self._quota or self._counted(name) + size <= self._quota:
            return
        least = self._revisions.size_without(self._evictable()) + self._staging.counted(
            without=[name, *self._staging.abandoned()]
        )
        # Nothing goes for what won't fit anyway.
        if least + size > self._quota:
            raise DiskFull(
                f"{mib(size)} do not fit: of --disk-quota {mib(self._quota)}, {mib(least)} are in use by adapters on"
                " this worker and by downloads. Raise the quota, or remove adapters"
            )
        self._reclaim(lambda: self._counted(name) + size <= self._quota, name)

    def _need_of_disk(self, size: int, name: str) -> None:
        more = size - (self._staging.allocated(name) if name else 0) + self._staging.outstanding(without=name)
        if more > 0 and self._short_of_disk(more) > 0 and self._quota:
            self._reclaim(lambda: self._short_of_disk(more) <= 0, name)
        if more > 0 and self._short_of_disk(more) > 0:
            found = os.statvfs(self._root)
            raise DiskFull(
                f"{mib(size)} do not fit: {mib(found.f_bavail * found.f_frsize)} are free on the file system of"
                f" {self._root}. Free some room there, or "
                + ("remove adapters" if self._quota else "set --disk-quota, so that unused adapters are let go")
            )

    def _short_of_disk(self, size: int) -> int:
        found = os.statvfs(self._root)
        headroom = min(HEADROOM_BYTES, found.f_blocks * found.f_frsize // 50)
        return size + headroom - found.f_bavail * found.f_frsize

    def _counted(self, without: str = "") -> int:
        return self._revisions.size + self._staging.counted(without=[without])

    def _evictable(self) -> list[str]:
        """Least recently used first."""
        if self._keep is None:
            return []
        spared = self._keep | self._published
        return [revision for revision in self._revisions.oldest_first() if revision not in spared]

    def _reclaim(self, enough: Callable[[], bool], spare: str = "") -> tuple[str, ...]:
        """Let go of abandoned downloads, then of revisions, until it is `enough`; returns those revisions."""
        for name in self._staging.abandoned():
            if enough():
                return ()
            if name != spare:
                log.info("abandoned_download_dropped", key=name)
                self._staging.drop(name)
        gone = []
        for revision in self._evictable():
            if enough():
                break
            self._revisions.remove(revision)
            log.info("revision_evicted", revision=revision)
            gone.append(revision)
        return tuple(gone)

    # -- what the agent remembers ---------------------------------------------------------------------------------

    def save(self, name: str, data: bytes) -> None:
        """Keep `data` as state/<name>, durably and atomically. Raises DiskFull, StoreFailed."""
        path = self._state_path(name)
        with self._mutex, translated(f"saving {path}"):
            replace_file(self._fs, path, data)

    def read(self, name: str) -> bytes | None:
        """state/<name> as saved last, None if there is none. Raises StoreFailed."""
        path = self._state_path(name)
        with translated(f"reading {path}"):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def _state_path(self, name: str) -> Path:
        if not _STATE_NAME.fullmatch(name) or name in _NO_STATE_NAMES:
            raise ValueError(f"no name for a state file: {name!r}")
        return self._root / "state" / name
