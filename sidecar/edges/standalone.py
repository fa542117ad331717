"""The standalone backend: a directory of manifests, and a list of seeds.

The directory is polled: a look costs one `scandir` and one `stat` a file, works on every file system and mount (file
events don't cross network mounts), and sees a ConfigMap's swapped links like any other change.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from sidecar.core.folder import Folder, FolderView, Stamp, read_content, unusable
from sidecar.edges.manifests import list_manifests, read_manifest, reason
from sidecar.edges.problems import log_changes
from sidecar.edges.remembered import remembered
from sidecar.edges.seeds import Seeds, join_address, split_address
from sidecar.edges.threads import in_thread
from sidecar.model import Adapter, Frozen, Member, Problem
from sidecar.ports import BackendView, Clock, EdgeError, Report

log = structlog.get_logger()

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
        lister: Callable[[str], dict[str, Stamp]] = list_manifests,
    ) -> None:
        """`name` and `address` (host:port) are this worker's own. Raises ValueError for a seed that is no address.

        `lister` lists the manifests of a directory on a thread, or raises OSError.
        """
        self._directory = manifests
        self._own = Member(name=name or address, address=join_address(*split_address(address)), zone=zone)
        self._state = state
        self._clock = clock
        self._pace = pace or Pace()
        self._lister = lister
        names = remembered(self._state, STATE_SEEDS, _SavedSeeds)
        self._seeds = Seeds(seeds, address, names.names if names else None)
        adapters = remembered(self._state, STATE_ADAPTERS, _SavedAdapters)
        self._saved = adapters.files if adapters else None
        self._save_after = 0.0
        self._folder = Folder(manifests, self._saved)
        self._folder_view = self._folder.view()
        self._hung = False
        # When the look that is under way began, on the monotonic clock.
        self._look_began = math.inf
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

    async def publish(self, report: Report) -> bool:
        """Keep the report: there is no platform that could show it."""
        changed, self.report = report != self.report, report
        return changed

    async def run(self, changed: Callable[[], None]) -> None:
        """Watch the directory and resolve the seeds for ever. Never raises but CancelledError."""

        def tell() -> None:
            self._view = None
            self._told = log_changes(self._told, self.view().problems)
            changed()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(tell), name="manifests")
            tasks.create_task(
                self._seeds.run(tell, lambda names: self._save(STATE_SEEDS, _SavedSeeds(names=dict(names)))),
                name="seeds",
            )

    async def _watch(self, tell: Callable[[], None]) -> None:
        """Take the views of the polling thread, and notice when the directory doesn't answer."""
        loop, stop = asyncio.get_running_loop(), threading.Event()

        def deliver(view: FolderView) -> None:
            self._folder_view, self._hung = view, False
            tell()

        polling = asyncio.ensure_future(
            in_thread(lambda: self._poll(stop, lambda view: loop.call_soon_threadsafe(deliver, view)))
        )
        try:
            while not (await asyncio.wait((polling,), timeout=self._pace.patience / 4))[0]:
                hung = time.monotonic() - self._look_began > self._pace.patience
                if hung != self._hung:
                    self._hung = hung
                    tell()
            polling.result()  # it never ends by itself: this raises
        finally:
            stop.set()
            polling.cancel()

    def _poll(self, stop: threading.Event, deliver: Callable[[FolderView], object]) -> None:
        """Look for ever, on a thread: a look that finds nothing new costs the event loop nothing."""
        shown: FolderView | None = None
        while not stop.is_set():
            self._look_began = time.monotonic()
            view, rest = self._look()
            self._look_began = math.inf
            if view is not shown:
                shown = view
                try:
                    deliver(view)
                except RuntimeError:  # the event loop was closed under us
                    return
            if view.fresh and view.files is not self._saved:
                self._keep(view.files)
            stop.wait(rest)

    def _look(self) -> tuple[FolderView, float]:
        """One look at the directory: what is in force now, and the seconds until the next look."""
        folder, started = self._folder, time.monotonic()
        try:
            listing = self._list()
        except OSError as error:
            folder.missed(f"{reason(error)}; create the directory, or correct --manifests")
            return folder.view(), self._pace.interval
        wanted = folder.look(listing, self._clock())
        seconds = time.monotonic() - started
        for name in wanted:
            self._take(name, listing[name])
        rest = min(self._pace.longest, max(self._pace.interval, self._pace.rest * seconds))
        return folder.view(), self._pace.soon if folder.soon else rest

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
        return self._lister(self._directory)

    def _take(self, name: str, listed: Stamp) -> None:
        stamp, data = read_manifest(os.path.join(self._directory, name))
        if stamp.error:
            self._folder.took(name, stamp, unusable(stamp.error), self._clock())
        elif stamp == listed or self._folder.first:
            content = read_content(data, is_json=name.lower().endswith(".json"))
            self._folder.took(name, stamp, content, self._clock())
        # Else it has changed since the listing: the next look sees that, and the one after reads it.

    def _save(self, name: str, value: msgspec.Struct) -> bool:
        try:
            self._state.save(name, msgspec.json.encode(value))
        except EdgeError as error:
            log.warning("state_unsaved", name=name, error=str(error))
            return False
        return True
