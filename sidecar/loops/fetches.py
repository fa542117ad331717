"""Brings content onto the disk as the planner asks for it, and notes what came of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from sidecar.core import outcome
from sidecar.core.decide import same_content, same_files
from sidecar.core.memory import FOREVER, Memory, trial
from sidecar.core.world import Fetch
from sidecar.model import Adapter, Decision, Listing, RemoteFile
from sidecar.ports import (
    AdapterRejected,
    Clock,
    DiskFull,
    EdgeError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    Fetcher,
    Meter,
    OriginChanged,
    OriginDenied,
    Result,
)

log = structlog.get_logger()

# Seconds until reading ahead is tried again: the decision may come meanwhile, and then it is read in any case.
AHEAD_AGAIN = 30.0

_RESULTS: tuple[tuple[type[EdgeError], Result], ...] = (
    (EngineRefused, "refused"),
    (EngineTimeout, "timeout"),
    (EngineUnavailable, "unavailable"),
    (OriginDenied, "denied"),
    (OriginChanged, "changed"),
    (DiskFull, "disk_full"),
)


def result_of(error: EdgeError | None) -> Result:
    """The word for the metrics."""
    return next((word for kind, word in _RESULTS if isinstance(error, kind)), "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Acting:
    """What it takes to act and to note what came of it: `save` keeps the memory on the disk, `changed` makes the agent
    think again."""

    memory: Memory
    clock: Clock
    meter: Meter
    save: Callable[[], Coroutine[Any, Any, None]]
    changed: Callable[[], None]
    rng: random.Random


class Fetches:
    """The downloads under way, one an adapter at a time.

    `fetching` maps an adapter's key to its bytes here and in all; `coming`, to the decision that a download of this
    worker leads to, whose revision isn't known yet.
    """

    def __init__(self, acting: Acting, fetcher: Fetcher, *, concurrency: int, tell_above: int | None) -> None:
        """`tell_above`: what this worker decides on for the pool is shown in `coming` if it is of more bytes."""
        self._acting = acting
        self._fetcher = fetcher
        self._memory = acting.memory
        self._clock = acting.clock
        self._meter = acting.meter
        self._rng = acting.rng
        self._slots = asyncio.Semaphore(concurrency)
        self._tell_above = tell_above
        # What was read ahead of a decision, and when it may be tried again.
        self._ahead: dict[str, tuple[tuple[RemoteFile, ...], float]] = {}
        self.fetching: dict[str, tuple[int, int]] = {}
        self.coming: dict[str, Decision] = {}

    def take(self, action: Fetch) -> bool:
        """Whether `run` is to be called now; False if this adapter is being fetched already."""
        if action.key in self.fetching or (action.ahead and not self._may_read_ahead(action)):
            return False
        self.fetching[action.key] = (0, 0)
        return True

    async def run(self, action: Fetch, adapter: Adapter) -> None:
        """Carry out what `take` has taken."""
        try:
            async with self._slots:
                await (self._read_ahead if action.ahead else self._fetch_once)(action, adapter)
            await self._acting.save()
        except Exception as error:
            # A fault of this program: said by who runs this, and not run into again at once.
            revision = action.expected or ""
            outcome.failed(
                self._memory, adapter, revision, repr(error), outcome.FETCH, self._clock(), self._rng.random()
            )
            raise
        finally:
            self.fetching.pop(action.key, None)
            self.coming.pop(action.key, None)

    def _may_read_ahead(self, action: Fetch) -> bool:
        files, again = self._ahead.get(action.key, ((), 0.0))
        return action.listing is not None and (files != action.listing.files or self._clock() >= again)

    async def _read_ahead(self, action: Fetch, adapter: Adapter) -> None:
        """Bring what the pool may decide on; whatever comes of it, nothing is concluded from it."""
        assert action.listing is not None, "what is read ahead has been listed by who decides"
        began = self._clock()
        again = FOREVER
        try:
            fetched = await self._fetcher.fetch(adapter, action.listing, None, self._progress(action.key))
        except EdgeError as error:
            again = self._clock() + AHEAD_AGAIN
            self._meter.fetched(
                "rejected" if isinstance(error, AdapterRejected) else result_of(error), self._clock() - began
            )
            log.info("fetch_ahead_failed", adapter=adapter.key, error=str(error))
        else:
            self._meter.fetched("ok", self._clock() - began)
            outcome.doubted(self._memory, fetched.revision, fetched.warnings)
            log.info("adapter_fetched_ahead", adapter=adapter.key, revision=fetched.revision)
        self._ahead[action.key] = (action.listing.files, again)

    async def _fetch_once(self, action: Fetch, adapter: Adapter) -> None:
        began = self._clock()
        listing = action.listing
        try:
            listing = listing or await self._fetcher.listing(adapter)
            if self._settled_already(action, adapter, listing):
                return
            self._show_coming(action, adapter, listing)
            fetched = await self._fetcher.fetch(adapter, listing, action.expected, self._progress(action.key))
        except AdapterRejected as error:
            self._meter.fetched("rejected", self._clock() - began)
            log.warning("adapter_rejected", adapter=adapter.key, error=str(error))
            self._content_rejected(action, adapter, str(error), listing)
        except EdgeError as error:
            self._meter.fetched(result_of(error), self._clock() - began)
            self._fetch_failed(action, adapter, error)
        else:
            self._meter.fetched("ok", self._clock() - began)
            for warning in fetched.warnings:
                log.warning("adapter_suspicious", adapter=adapter.key, warning=warning)
            outcome.doubted(self._memory, fetched.revision, fetched.warnings)
            decision = self._decision(action, adapter, listing, fetched.revision)
            outcome.fetched(self._memory, adapter, decision, self._clock())

    def _settled_already(self, action: Fetch, adapter: Adapter, listing: Listing) -> bool:
        """No download needed: the refresh found nothing new, or the content is big and another decides about it."""
        if action.compare is not None and same_content(listing, action.compare):
            outcome.nothing_new(self._memory, adapter, self._clock())
            return True
        looked = trial(self._memory, adapter) if action.trial else None
        if looked is not None and looked.listing is not None and same_files(listing.files, looked.listing.files):
            outcome.trial_failed(self._memory, adapter, looked.message, listing, self._clock(), self._rng.random())
            return True
        if action.limit is not None and listing.size > action.limit:
            self._memory.large[adapter.key] = listing.size
            return True
        return False

    def _show_coming(self, action: Fetch, adapter: Adapter, listing: Listing) -> None:
        """Let the others know what this worker will decide on, so that they read it from here meanwhile."""
        decides = action.expected is None and action.limit is None and not action.trial
        if decides and self._tell_above is not None and listing.size > self._tell_above:
            self.coming[action.key] = self._decision(action, adapter, listing, "")
            self._acting.changed()

    def _decision(self, action: Fetch, adapter: Adapter, listing: Listing, revision: str) -> Decision:
        """New content, or the same behind other ETags: then the new list is the one to compare with next time."""
        old = action.compare
        same = old is not None and (old.revision, old.listing) == (revision, listing.files)
        refresh = old.refresh if old is not None and same else action.refresh
        return Decision(
            source_id=adapter.source_id,
            refresh=refresh,
            revision=revision,
            listing=listing.files,
            archive=listing.archive,
        )

    def _progress(self, key: str) -> Callable[[int, int], None]:
        def note(done: int, total: int) -> None:
            if key in self.fetching:
                self.fetching[key] = (done, total)

        return note

    def _content_rejected(self, action: Fetch, adapter: Adapter, message: str, listing: Listing | None) -> None:
        """New content that is no adapter says nothing against what is decided on."""
        if not action.trial:
            outcome.rejected(self._memory, adapter, action.expected or "", message)
        if action.expected is None:
            outcome.trial_failed(self._memory, adapter, message, listing, self._clock(), self._rng.random())

    def _fetch_failed(self, action: Fetch, adapter: Adapter, error: EdgeError) -> None:
        log.warning("adapter_fetch_failed", adapter=adapter.key, uri=adapter.source.uri, error=str(error))
        if action.trial:
            outcome.trial_failed(self._memory, adapter, str(error), None, self._clock(), self._rng.random())
            return
        if isinstance(error, OriginChanged):
            self._memory.gone[adapter.key] = action.refresh
        backoff = outcome.denied(adapter) if isinstance(error, OriginDenied) else outcome.FETCH
        revision = action.expected or ""
        outcome.failed(self._memory, adapter, revision, str(error), backoff, self._clock(), self._rng.random())
