"""What a directory of manifests puts in force, look after look: the memory that a bare listing lacks.

The rules, all for one end, that no accident takes an adapter away:

- A changed file counts once it looked the same twice, so that most half-written ones are never read.
- A document that can't be understood leaves its last good version in force, and so does a file for all of its own.
- What is gone from the directory is gone `LEAVE_SECONDS` later: editors and copying tools remove and write again.
- A directory that is suddenly empty is unknown for `EMPTY_SECONDS`, one that can't be listed for ever.

Only a first look that finds manifests takes absence at face value: what was deleted while no agent ran is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sidecar.core.documents import Unreadable, decode
from sidecar.core.manifest import InvalidManifest, key_of, parse_adapter
from sidecar.model import Adapter, Frozen, Problem

LEAVE_SECONDS = 2.0
EMPTY_SECONDS = 30.0
# Files changed this shortly before they were read at once are read again: their clock may not have ticked in between.
RACY_SECONDS = 2.0


class Stamp(NamedTuple):
    """What tells one state of a file from another, by stat; `error` if even that failed. Times in nanoseconds."""

    device: int = 0
    inode: int = 0
    size: int = 0
    modified: int = 0
    changed: int = 0
    error: str = ""


class Content(Frozen, frozen=True, kw_only=True):
    """What one reading of a file gave: (where, adapter) and (where, fault) by document.

    `wrong` are the keys of documents with faults, None if a fault may concern any document.
    """

    adapters: tuple[tuple[str, Adapter], ...] = ()
    faults: tuple[tuple[str, str], ...] = ()
    wrong: frozenset[str] | None = frozenset()


class FolderView(Frozen, frozen=True, kw_only=True):
    """`adapters` by key, None while nothing is known; `files` is what to remember over a restart."""

    adapters: tuple[Adapter, ...] | None
    fresh: bool
    problems: tuple[Problem, ...]
    files: dict[str, tuple[Adapter, ...]]


def unusable(message: str) -> Content:
    """The content of a file that can't be read."""
    return Content(faults=(("", message),), wrong=None)


def read_content(data: bytes, *, is_json: bool, allow_http: bool = True) -> Content:
    """Everything that a manifest file says. Faults are part of the answer, nothing is raised."""
    try:
        documents = decode(data, is_json=is_json)
    except Unreadable as error:
        return unusable(str(error))
    adapters: dict[str, tuple[str, Adapter]] = {}
    faults: list[tuple[str, str]] = []
    wrong: set[str] = set()
    nameless = False
    for document in documents:
        try:
            adapter = parse_adapter(document.value, strict=True, allow_http=allow_http)
        except InvalidManifest as error:
            faults += ((document.where, fault) for fault in error.faults)
            key = key_of(document.value)
            wrong.add(key)
            nameless = nameless or not key
            continue
        first = adapters.setdefault(adapter.key, (document.where, adapter))
        if first[1] is not adapter:
            faults.append((document.where, f"Adapter {adapter.key} stands in {first[0]} already; take one out"))
    return Content(
        adapters=tuple(adapters.values()), faults=tuple(faults), wrong=None if nameless else frozenset(wrong)
    )


class _File:
    """One file's stamps, faults and what it has in force; `leaving` maps keys that are gone from it to since when."""

    def __init__(self, in_force: Mapping[str, Adapter]) -> None:
        self.stamp: Stamp | None = None
        self.pending: Stamp | None = None
        self.in_force = dict(in_force)
        self.where: dict[str, str] = {}
        self.held: set[str] = set()
        self.leaving: dict[str, float] = {}
        self.faults: tuple[tuple[str, str], ...] = ()


class Folder:
    """The memory of one directory. Give it each look with the time, read what it asks for, and take its view."""

    def __init__(self, directory: str, saved: Mapping[str, tuple[Adapter, ...]] | None) -> None:
        """`saved` is a former view's `files`, None if there is none."""
        self._directory = directory
        self._files = {name: _File({a.key: a for a in adapters}) for name, adapters in (saved or {}).items()}
        self._known = saved is not None
        self._attempted = False
        self._listed = False
        self.first = False
        """Whether the last look was the first that found the directory."""
        self._empty_since: float | None = None
        self._unlisted = "it was not listed yet"
        self._view: FolderView | None = None
        self.soon = False
        """Whether a second look is due at once, for files that have just changed."""

    def missed(self, reason: str) -> None:
        """The directory can't be listed: whatever is in force stays."""
        self._attempted = True
        self._empty_since = None
        self._set_unlisted(reason)

    def look(self, listing: Mapping[str, Stamp], now: float) -> tuple[str, ...]:
        """Take a listing of manifests by name. Returns the names to read now; give each to `took`."""
        self.soon = False
        at_face_value, self._attempted = not self._attempted, True
        if not listing and self._any_in_force() and self._is_doubtful(now):
            return ()
        if not listing and self._empty_since is not None:
            self._files.clear()
            self._changed()
        self._empty_since = None
        self._set_unlisted("")
        self.first, self._listed, self._known = not self._listed, True, True
        for name in self._files.keys() - listing.keys():
            self._vanished(name, now, at_face_value)
        wanted = tuple(name for name, stamp in listing.items() if self._wants(name, stamp, now))
        self._expire(now)
        return wanted

    def took(self, name: str, stamp: Stamp, content: Content, now: float) -> None:
        """What a file that `look` asked for holds. One with `stamp.error` is asked for again at the next."""
        file = self._files[name]
        is_racy = self.first and now - max(stamp.modified, stamp.changed) / 1e9 < RACY_SECONDS
        file.pending = stamp._replace(error="")
        file.stamp = None if is_racy or stamp.error else stamp
        self.soon = self.soon or is_racy
        new = {adapter.key: adapter for _, adapter in content.adapters}
        gone = file.in_force.keys() - new.keys()
        file.held = {key for key in gone if content.wrong is None or key in content.wrong}
        leaving = {} if self.first else {key: file.leaving.get(key, now) for key in gone - file.held}
        stays = {key: a for key, a in file.in_force.items() if key in file.held or key in leaving}
        where = {adapter.key: place for place, adapter in content.adapters}
        before = (file.in_force, file.faults, file.where, file.leaving)
        file.in_force, file.faults, file.where, file.leaving = new | stays, content.faults, where, leaving
        if before != (file.in_force, file.faults, file.where, file.leaving):
            self._changed()

    def view(self) -> FolderView:
        """What is in force now; the same object until something changes."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def _changed(self) -> None:
        self._view = None

    def _set_unlisted(self, reason: str) -> None:
        if reason != self._unlisted:
            self._unlisted = reason
            self._changed()

    def _any_in_force(self) -> bool:
        return any(file.in_force for file in self._files.values())

    def _is_doubtful(self, now: float) -> bool:
        """Whether the empty directory may still be an accident."""
        if self._empty_since is None:
            self._empty_since = now
        if now - self._empty_since >= EMPTY_SECONDS:
            return False
        self._set_unlisted(f"it is suddenly empty, which is believed after {EMPTY_SECONDS:.0f} s")
        return True

    def _vanished(self, name: str, now: float, at_face_value: bool) -> None:
        file = self._files[name]
        if at_face_value or not file.in_force:
            del self._files[name]
            self._changed()
            return
        file.stamp, file.pending = None, None
        if len(file.leaving) < len(file.in_force) or file.faults:
            file.leaving = {key: file.leaving.get(key, now) for key in file.in_force}
            file.faults, file.held = (), set()
            self._changed()

    def _wants(self, name: str, stamp: Stamp, now: float) -> bool:
        file = self._files.setdefault(name, _File({}))
        if stamp.error:
            self.took(name, stamp, unusable(stamp.error), now)
            return False
        if stamp == file.stamp:
            return False
        if self.first or stamp == file.pending:
            return True
        file.pending = stamp
        self.soon = True
        return False

    def _expire(self, now: float) -> None:
        for file in self._files.values():
            if file.pending is not None and file.pending != file.stamp:
                continue  # it is there, and not read yet: what it says decides
            for key in [key for key, since in file.leaving.items() if now - since >= LEAVE_SECONDS]:
                del file.leaving[key], file.in_force[key]
                self._changed()

    def _make_view(self) -> FolderView:
        chosen: dict[str, tuple[Adapter, str]] = {}
        problems: list[Problem] = []
        if self._unlisted:
            problems.append(Problem(where=self._directory, message=f"the manifests are unknown: {self._unlisted}"))
        ordered = sorted(self._files.items())
        for name, file in ordered:
            problems += self._problems(name, file)
            for key, adapter in file.in_force.items():
                if key in file.leaving:
                    continue
                _, owner = chosen.setdefault(key, (adapter, name))
                if owner != name and key in file.where:
                    problems.append(self._duplicate(name, file.where[key], key, owner))
        for name, file in ordered:
            for key in file.leaving:
                chosen.setdefault(key, (file.in_force[key], name))
        return FolderView(
            adapters=tuple(chosen[key][0] for key in sorted(chosen)) if self._known else None,
            fresh=not self._unlisted,
            problems=tuple(problems),
            files={
                name: tuple(a for key, a in file.in_force.items() if key not in file.leaving)
                for name, file in ordered
                if len(file.leaving) < len(file.in_force)
            },
        )

    def _problems(self, name: str, file: _File) -> list[Problem]:
        stays = "; the last good version stays in force" if file.held else ""
        return [
            Problem(where=f"{self._directory}/{name}" + (f", {place}" if place else ""), message=message + stays)
            for place, message in file.faults
        ]

    def _duplicate(self, name: str, place: str, key: str, owner: str) -> Problem:
        return Problem(
            where=f"{self._directory}/{name}, {place}",
            message=f"Adapter {key} stands in {owner} as well, which comes first by name and is in force;"
            f" delete it there or in {name}",
        )
