"""The standalone backend: a directory of manifests, and a list of seeds.

The directory is polled: a look costs one `scandir` and one `stat` a file, works on every file system and mount (file
events don't cross network mounts), and sees a ConfigMap's swapped links like any other change.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
import structlog

from sidecar.core.folder import Folder, FolderView, Stamp, read_content, unusable
from sidecar.edges.manifests import list_manifests, read_manifest, reason
from sidecar.edges.seeds import Seeds, join_address, split_address
from sidecar.edges.threads import in_thread
from sidecar.model import Adapter, Frozen, Member, Problem
from sidecar.ports import BackendView, Clock, EdgeError, Report

log = structlog.get_logger()

S = TypeVar("S", bound=msgspec.Struct)

STATE_ADAPTERS = "adapters.json"
STATE_SEEDS = "seeds.json"


class Pace(Frozen, frozen=True, kw_only=True):
    """How often the directory is looked at, in seconds."""

    interval: float = 0.25
    # The second look at a file that has just changed.
    soon: float = 0.05
    # With thousands of files a look takes a while: it then gets `rest` times as long a rest, up to `longest`.
    rest: float = 200.0
    longest: float = 3.0
    # A directory that doesn't answer for so long (a dead network mount) is unknown.
    patience: float = 10.0
    # Between two attempts to save the state after one failed.
    save_again: float = 30.0


class State(Protocol):
    """Where the backend remembers over a restart; the adapters directory's `state/`."""

    def save(self, name: str, data: bytes) -> None:
        """Keep `data` durably. Raises EdgeError."""

    def read(self, name: str) -> bytes | None:
        """What was saved last, or None. Raises EdgeError."""


class _SavedAdapters(msgspec.Struct):
    """state/adapters.json: by file name, so that a file which is wrong after the restart has its last good version."""

    files: dict[str, tuple[Adapter, ...]]


class _SavedSeeds(msgspec.Struct):
    names: dict[str, tuple[str, ...]]


class _Seen(Frozen, frozen=True):
    """What a look ended with: the view, whether a second look is due, and how long the listing took."""

    view: FolderView
    soon: bool
    seconds: float


class StandaloneBackend:
    """Adapters from `manifests`, members from `seeds` and this worker itself. Implements `ports.Backend`."""

    def __init__(
        self,
        *,
        manifests: str,
        seeds: tuple[str, ...],
        name: str,
        address: str,
        zone: str = "",
        state: State,
        clock: Clock,
        pace: Pace | None = None,
    ) -> None:
        """`name` and `address` (host:port) are this worker's own. Raises ValueError for a seed that is no address."""
        self._directory = manifests
        self._own = Member(name=name or address, address=join_address(*split_address(address)), zone=zone)
        self._state = state
        self._clock = clock
        self._pace = pace or Pace()
        names = self._read(STATE_SEEDS, _SavedSeeds)
        self._seeds = Seeds(seeds, address, names.names if names else None)
        adapters = self._read(STATE_ADAPTERS, _SavedAdapters)
        self._saved = adapters.files if adapters else None
        self._save_after = 0.0
        self._folder = Folder(manifests, self._saved)
        self._folder_view = self._folder.view()
        self._hung = False
        self._told: frozenset[Problem] = frozenset()
        self._view: BackendView | None = None
        self.report: Report | None = None
        """The report published last: nothing outside this agent shows it."""

    def view(self) -> BackendView:
        """The present view; the same object until something changes."""
        if self._view is None:
            folder = self._folder_view
            problems = folder.problems + self._seeds.problems
            if self._hung:
                problems += (Problem(where=self._directory, message="the directory does not answer; check its mount"),)
            others = (Member(name=address, address=address) for address in self._seeds.members)
            self._view = BackendView(
                adapters=folder.adapters,
                adapters_fresh=folder.fresh and not self._hung,
                members=(self._own, *others),
                members_fresh=self._seeds.fresh,
                problems=problems,
            )
        return self._view

    async def publish(self, report: Report) -> None:
        """Keep the report: there is no platform that could show it."""
        self.report = report

    async def run(self, changed: Callable[[], None]) -> None:
        """Watch the directory and resolve the seeds for ever. Never raises but CancelledError."""

        def tell() -> None:
            self._view = None
            self._log_problems()
            changed()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(tell), name="manifests")
            tasks.create_task(
                self._seeds.run(tell, lambda names: self._save(STATE_SEEDS, _SavedSeeds(names=dict(names)))),
                name="seeds",
            )

    async def _watch(self, tell: Callable[[], None]) -> None:
        while True:
            look = asyncio.ensure_future(in_thread(self._look))
            done, _ = await asyncio.wait((look,), timeout=self._pace.patience)
            if not done:
                self._hung = True
                tell()
            seen = await look
            if self._hung or seen.view is not self._folder_view:
                self._hung, self._folder_view = False, seen.view
                tell()
            rest = min(self._pace.longest, max(self._pace.interval, self._pace.rest * seen.seconds))
            await asyncio.sleep(self._pace.soon if seen.soon else rest)

    def _look(self) -> _Seen:
        """One look at the directory, on a thread; only one is under way at a time."""
        folder, started = self._folder, time.monotonic()
        try:
            listing = self._list()
        except OSError as error:
            folder.missed(f"{reason(error)}; create the directory, or correct --manifests")
            return _Seen(view=folder.view(), soon=False, seconds=time.monotonic() - started)
        wanted = folder.look(listing, self._clock())
        seconds = time.monotonic() - started
        for name in wanted:
            self._take(name, listing[name])
        view = folder.view()
        if view.fresh and view.files is not self._saved:
            self._keep(view.files)
        return _Seen(view=view, soon=folder.soon, seconds=seconds)

    def _keep(self, files: dict[str, tuple[Adapter, ...]]) -> None:
        """Remember what is in force, unless it is remembered or a failed attempt was just made."""
        if files == self._saved:
            self._saved = files
        elif self._clock() >= self._save_after:
            if self._save(STATE_ADAPTERS, _SavedAdapters(files=files)):
                self._saved = files
            else:
                self._save_after = self._clock() + self._pace.save_again

    def _list(self) -> dict[str, Stamp]:
        if not self._directory:
            raise FileNotFoundError("no directory is given")
        return list_manifests(self._directory)

    def _take(self, name: str, listed: Stamp) -> None:
        stamp, data = read_manifest(os.path.join(self._directory, name))
        if stamp.error:
            self._folder.took(name, stamp, unusable(stamp.error), self._clock())
        elif stamp == listed or self._folder.first:
            content = read_content(data, is_json=name.lower().endswith(".json"))
            self._folder.took(name, stamp, content, self._clock())
        # Else it has changed since the listing: the next look sees that, and the one after reads it.

    def _read(self, name: str, kind: type[S]) -> S | None:
        try:
            data = self._state.read(name)
            return msgspec.json.decode(data, type=kind) if data else None
        except (EdgeError, msgspec.MsgspecError) as error:
            log.warning("state_unreadable", name=name, error=str(error))
            return None

    def _save(self, name: str, value: msgspec.Struct) -> bool:
        try:
            self._state.save(name, msgspec.json.encode(value))
        except EdgeError as error:
            log.warning("state_unsaved", name=name, error=str(error))
            return False
        return True

    def _log_problems(self) -> None:
        """Log what is new, and what is over."""
        problems = frozenset(self.view().problems)
        for problem in sorted(problems - self._told, key=lambda p: (p.where, p.message)):
            log.warning("backend_problem", where=problem.where, message=problem.message)
        for problem in sorted(self._told - problems, key=lambda p: (p.where, p.message)):
            log.info("backend_problem_over", where=problem.where, message=problem.message)
        self._told = problems
