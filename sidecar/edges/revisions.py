"""Published revisions: immutable directories of links to blobs, each with its list of files kept beside them.

A revision appears by one rename, after everything in it is on the disk, and is never changed: the engine reads its
files again at any time, and ends itself if they are gone. One that is found damaged is therefore left where it is, but
no longer offered; putting it again sets its content right, file by file, each by one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import structlog

from sidecar.core.preflight import Refused, contained_paths
from sidecar.edges.filesystem import FileSystem, StoreFailed, regular_size, remove_tree, replace_file, walk
from sidecar.edges.staging import check_inside
from sidecar.model import StoredFile, revision_of

log = structlog.get_logger()

PREFIX = "sha256:"
HEX = re.compile(r"[0-9a-f]{64}")

_CHUNK = 1024**2
_READ_ONLY = 0o444


class _Manifest(msgspec.Struct, frozen=True):
    files: tuple[StoredFile, ...]


class _Entry:
    """One directory below revisions/. With its list lost, `files` is empty and `unlisted` are the bytes that it has."""

    def __init__(self, files: tuple[StoredFile, ...], used: int, *, sound: bool, unlisted: int = 0) -> None:
        self.files = files
        self.used = used
        self.sound = sound
        self.unlisted = unlisted


class Revisions:
    """revisions/, blobs/sha256/ and state/revisions/ of one adapters directory.

    What changes something is not safe for several threads at once: `AdapterStore` sees to that. All raise OSError.
    """

    def __init__(self, root: Path, fs: FileSystem) -> None:
        self.directory = root / "revisions"
        self._blobs = root / "blobs/sha256"
        self._manifests = root / "state/revisions"
        self._tmp = root / "tmp"
        self._fs = fs
        self._entries: dict[str, _Entry] = {}
        self._last_use = 0
        self._serial = 0
        self.offered: Mapping[str, str] = {}
        self._sizes: dict[str, int] = {}

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of all blobs, each once, and of damaged directories whose files aren't known."""
        return sum(self._sizes.values()) + sum(entry.unlisted for entry in list(self._entries.values()))

    @property
    def count(self) -> int:
        """Directories there, damaged ones included."""
        return len(self._entries)

    def size_without(self, revisions: Collection[str]) -> int:
        """What `size` would be without some of them."""
        left = [entry for name, entry in self._entries.items() if PREFIX + name not in revisions]
        blobs = {file.sha256: file.size for entry in left for file in entry.files}
        return sum(blobs.values()) + sum(entry.unlisted for entry in left)

    def files(self, revision: str) -> tuple[StoredFile, ...]:
        """The files of a revision; empty if it isn't offered."""
        entry = self._entries.get(revision.removeprefix(PREFIX))
        return entry.files if entry is not None and entry.sound else ()

    def blob(self, sha256: str) -> Path | None:
        """The path of a content, None if it isn't there whole."""
        expected = self._sizes.get(sha256)
        path = self._blobs / sha256
        return path if expected is not None and regular_size(path) == expected else None

    def oldest_first(self) -> list[str]:
        """Revisions (damaged ones too) by their last use."""
        return [PREFIX + name for name, _ in sorted(self._entries.items(), key=lambda item: item[1].used)]

    def damaged_files(self, revision: str) -> list[StoredFile]:
        """Files whose content isn't what their hash says. Reads all of it; changes nothing."""
        path = self._path(revision)
        return [file for file in self.files(revision) if hash_file(path / file.path) != file.sha256]

    # -- changing -----------------------------------------------------------------------------------------------

    def touch(self, revision: str) -> None:
        """Note a use: in memory, and as the time of its list of files, so that it outlives the process."""
        entry = self._entries.get(revision.removeprefix(PREFIX))
        if entry is None:
            return
        # Rising even if the clock is set back: only the order counts.
        self._last_use = entry.used = max(time.time_ns(), self._last_use + 1)
        try:
            os.utime(self._manifest(revision), ns=(entry.used, entry.used))
        except OSError as error:
            log.debug("touch_failed", revision=revision, error=str(error))

    def put(self, revision: str, staged: Path, files: tuple[StoredFile, ...]) -> Path:
        """Publish `files` as `revision`, from `staged` or blobs that are there. Complete or not at all."""
        path = self._path(revision)
        entry = self._entries.get(path.name)
        if entry is not None and entry.sound:
            return path
        try:
            self._keep_blobs(staged, files)
            if path.is_dir() and not path.is_symlink():
                # Its list last: with it there, a directory whose sizes are right counts as sound after a restart.
                self._repair(path, files)
                self._list(revision, files)
            else:
                self._fs.unlink(path)
                self._list(revision, files)
                self._build(path, files)
        except (OSError, StoreFailed):
            with contextlib.suppress(OSError):
                self.clear_debris()
                self._forget_blobs(file.sha256 for file in files)
            raise
        self._entries[path.name] = _Entry(files, 0, sound=True)
        self._changed()
        return path

    def remove(self, revision: str) -> None:
        """Take a revision away: first its name, in one step, then what it alone holds."""
        self.clear_debris()
        path, grave = self._path(revision), self._debris("gone")
        entry = self._entries[path.name]
        entry.sound = False
        self._changed()
        if os.path.lexists(path):
            if not path.is_symlink():
                # Moving a directory to another parent changes its "..", for which it must be writable.
                self._fs.chmod(path, 0o755)
            self._fs.rename(path, grave)
            self._fs.sync(self.directory)
        del self._entries[path.name]
        self._changed()
        self._fs.unlink(self._manifest(revision))
        self._forget_blobs(file.sha256 for file in entry.files)
        remove_tree(self._fs, grave)

    def condemn(self, revision: str, wrong: Sequence[StoredFile]) -> None:
        """Offer a damaged revision no longer, after a restart neither, nor blobs that share the damage."""
        log.error("revision_damaged", revision=revision, files=[file.path for file in wrong[:5]])
        self._entries[revision.removeprefix(PREFIX)].sound = False
        self._changed()
        self._fs.unlink(self._manifest(revision))
        self._fs.sync(self._manifests)
        for file in wrong:
            if hash_file(self._blobs / file.sha256) != file.sha256:
                self._fs.unlink(self._blobs / file.sha256)

    def clear_debris(self) -> None:
        """Remove what steps that came to no end have left in tmp/."""
        for path in list(self._tmp.iterdir()):
            if path.name != "staging":
                remove_tree(self._fs, path)

    def recover(self) -> None:
        """See what is there after a start: sizes are checked, hashes are not."""
        self.clear_debris()
        for path in sorted(self.directory.iterdir()):
            if HEX.fullmatch(path.name):
                self._entries[path.name] = self._examine(path)
        for manifest in list(self._manifests.iterdir()):
            if manifest.stem not in self._entries:
                self._fs.unlink(manifest)
        self._last_use = max((entry.used for entry in self._entries.values()), default=0)
        self._changed()
        self._recover_blobs()

    # -- steps --------------------------------------------------------------------------------------------------

    def _keep_blobs(self, staged: Path, files: tuple[StoredFile, ...]) -> None:
        for file in files:
            blob, source = self._blobs / file.sha256, staged / file.path
            if self._sizes.get(file.sha256) == regular_size(blob) == file.size:
                continue
            found = regular_size(source)
            if found != file.size:
                raise StoreFailed(f"publishing: {source} has {found} bytes, not {file.size}; download it again")
            check_inside(source, staged)
            self._fs.sync(source)
            self._fs.chmod(source, _READ_ONLY)
            self._fs.unlink(blob)
            # Not synced: after a crash, missing blobs are linked again from the revisions.
            self._fs.link(source, blob)

    def _list(self, revision: str, files: tuple[StoredFile, ...]) -> None:
        replace_file(self._fs, self._manifest(revision), msgspec.json.encode(_Manifest(files)))

    def _build(self, path: Path, files: tuple[StoredFile, ...]) -> None:
        fresh = self._debris("new")
        folders = ["", *sorted({str(parent) for file in files for parent in Path(file.path).parents} - {"."})]
        for folder in folders:
            self._fs.mkdir(fresh / folder)
        for file in files:
            self._fs.link(self._blobs / file.sha256, fresh / file.path)
        for folder in reversed(folders):
            self._fs.sync(fresh / folder)
        self._fs.rename(fresh, path)
        self._fs.sync(self.directory)
        self._seal(path)

    def _repair(self, path: Path, files: tuple[StoredFile, ...]) -> None:
        wanted = {file.path: file for file in files}
        for folder in _directories(path):
            self._fs.chmod(folder, 0o755)
        for name, found in list(walk(path)):
            if name not in wanted:
                self._fs.unlink(path / name)
            elif os.path.samestat(found, (self._blobs / wanted[name].sha256).lstat()):
                del wanted[name]
        for name, file in wanted.items():
            self._replace(path, name, self._blobs / file.sha256)
        self._seal(path)

    def _replace(self, path: Path, name: str, blob: Path) -> None:
        for folder in reversed(Path(name).parents):
            if not (path / folder).is_dir():
                self._fs.mkdir(path / folder)
        if (path / name).is_dir():
            remove_tree(self._fs, path / name)
        fresh = self._debris("fix")
        self._fs.link(blob, fresh)
        self._fs.rename(fresh, path / name)
        self._fs.sync((path / name).parent)

    def _examine(self, path: Path) -> _Entry:
        found = dict(walk(path)) if path.is_dir() and not path.is_symlink() else {}
        manifest = self._manifest(path.name)
        try:
            files = checked(msgspec.json.decode(manifest.read_bytes(), type=_Manifest).files)
            used = manifest.stat().st_mtime_ns
        except (FileNotFoundError, msgspec.MsgspecError, StoreFailed) as error:
            log.error("revision_damaged", revision=PREFIX + path.name, error=str(error))
            return _Entry((), 0, sound=False, unlisted=sum(one.st_size for one in found.values()))
        wanted = {file.path: file.size for file in files}
        # lstat's size of a link is that of its text: only regular files count.
        sizes = {name: regular_size(path / name) for name in found}
        sound = wanted == sizes and revision_of(files) == PREFIX + path.name
        if not sound:
            wrong = sorted(name for name in wanted.keys() | sizes.keys() if wanted.get(name) != sizes.get(name))
            log.error("revision_damaged", revision=PREFIX + path.name, files=wrong[:5])
        elif path.stat().st_mode & 0o222:
            self._seal(path)
        return _Entry(files, used, sound=sound)

    def _recover_blobs(self) -> None:
        for blob in list(self._blobs.iterdir()):
            if regular_size(blob) != self._sizes.get(blob.name, -1):
                self._fs.unlink(blob)
        for name, entry in self._entries.items():
            for file in entry.files if entry.sound else ():
                if not os.path.lexists(self._blobs / file.sha256):
                    self._fs.link(self.directory / name / file.path, self._blobs / file.sha256)

    def _forget_blobs(self, hashes: Iterable[str]) -> None:
        for sha256 in set(hashes) - self._sizes.keys():
            self._fs.unlink(self._blobs / sha256)

    def _changed(self) -> None:
        # New mappings instead of changed ones: readers on other threads keep a consistent view without a lock.
        entries = dict(self._entries)
        self._sizes = {file.sha256: file.size for entry in entries.values() for file in entry.files}
        offered = {PREFIX + name: str(self.directory / name) for name, entry in entries.items() if entry.sound}
        self.offered = MappingProxyType(offered)

    def _seal(self, path: Path) -> None:
        for folder in _directories(path):
            self._fs.chmod(folder, 0o555)

    def _debris(self, kind: str) -> Path:
        """A name in tmp/ that nothing has: what stays there after a crash is removed at the next start."""
        self._serial += 1
        return self._tmp / f"{kind}-{self._serial}"

    def _path(self, revision: str) -> Path:
        return self.directory / revision.removeprefix(PREFIX)

    def _manifest(self, revision: str) -> Path:
        return self._manifests / f"{revision.removeprefix(PREFIX)}.json"


def checked(files: Sequence[StoredFile]) -> tuple[StoredFile, ...]:
    """The files in the order of their paths. Raises StoreFailed if a path leaves the revision or a hash is none."""
    try:
        contained_paths(file.path for file in files)
    except Refused as refused:
        raise StoreFailed(f"publishing: {refused}") from None
    for file in files:
        if not HEX.fullmatch(file.sha256):
            raise StoreFailed(f"publishing: the sha256 of {file.path} is {file.sha256!r}, not 64 hex digits")
    return tuple(sorted(files, key=lambda file: file.path.encode()))


def hash_file(path: Path) -> str:
    """sha256 of a regular file as 64 hex digits, "" if there is none. Raises OSError."""
    if regular_size(path) is None:
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _directories(path: Path) -> list[Path]:
    return [path, *(child for child in path.rglob("*") if child.is_dir() and not child.is_symlink())]
