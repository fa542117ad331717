"""One list kept current: list, watch from there, resume, and list anew when the API server has forgotten the version.

Bookmarks come about every minute, so a watch on which nothing comes for longer is dead without having said so (a
connection that a firewall forgot): it is opened anew. Whatever goes wrong is told to the sink, and tried again with a
jittered backoff.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec
import structlog

from sidecar.core.retry import Backoff
from sidecar.edges.kubernetes.api import LIST_TIMEOUT, Api, ApiError
from sidecar.model import Frozen

log = structlog.get_logger()

GONE = 410
PAGE = 500

EventType = Literal["ADDED", "MODIFIED", "DELETED"]


class Pace(Frozen, frozen=True, kw_only=True):
    """Waits in seconds. `silence` must be longer than the minute between two bookmarks."""

    retry: Backoff = Backoff(first=0.5, cap=8.0)
    silence: float = 90.0
    # How long one watch may last: the API server ends it, so that load spreads again after its restarts.
    shortest_watch: int = 300
    longest_watch: int = 600


class Sink(Protocol):
    """Who is told."""

    async def listed(self, items: Sequence[msgspec.Raw]) -> None:
        """The complete list, as of now."""

    def event(self, kind: EventType, item: msgspec.Raw) -> None:
        """One object changed."""

    def current(self) -> None:
        """The API server answers: what was told is up to date from now on."""

    def failed(self, error: ApiError) -> None:
        """The list can't be kept current now."""

    def doubtful(self) -> bool:
        """Whether a watch that has just ended is a reason to list anew, instead of going on from where it was."""


class _Meta(Frozen, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(Frozen, frozen=True):
    metadata: _Meta = _Meta()
    items: list[msgspec.Raw] = []


class _Event(Frozen, frozen=True):
    type: str
    object: msgspec.Raw


class _Object(Frozen, frozen=True):
    metadata: _Meta = _Meta()
    code: int = 0
    message: str = ""


_lists = msgspec.json.Decoder(_List)
_events = msgspec.json.Decoder(_Event)
_objects = msgspec.json.Decoder(_Object)


class Watch:
    """`path` is the list's, `query` its selectors."""

    def __init__(
        self,
        api: Api,
        path: str,
        sink: Sink,
        *,
        query: Mapping[str, str] | None = None,
        pace: Pace | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._path, self._sink = api, path, sink
        self._query = dict(query or {})
        self._pace = pace or Pace()
        self._rng = rng or random.Random()
        self._version = ""
        self._failures = 0
        self._heard = False
        # When the watch that is open, or has just ended, was opened; None if there is none.
        self._opened: float | None = None

    async def run(self) -> None:
        """Keep the list current for ever. Raises nothing but CancelledError."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                await self._ended()
            except ApiError as error:
                if error.code == GONE and self._version:
                    self._version = ""
                    continue
                await self._wait(error)
            except msgspec.MsgspecError as error:
                self._version = ""
                await self._wait(ApiError(0, f"{self._path}: the answer can't be read: {error}"))

    async def _ended(self) -> None:
        """A watch that came to its end. One that ended without a word is not opened again at once."""
        if self._sink.doubtful():
            self._version = ""
        if self._heard:
            self._failures = 0
        else:
            await self._pause()

    async def _wait(self, error: ApiError) -> None:
        if (error.code not in (0, 429) and error.code < 500) or self._sink.doubtful():
            # The list that was watched is no more, or no longer ours to see: begin anew.
            self._version = ""
        self._sink.failed(error)
        await self._pause()

    async def _pause(self) -> None:
        """Wait after a failure: longer after each in a row. A watch that lasted longer than any wait ends the row,
        whether anything came on it or not: else who sits behind a proxy that ends idle connections waits ever longer.
        """
        opened, self._opened = self._opened, None
        if opened is not None and asyncio.get_running_loop().time() - opened > self._pace.retry.cap:
            self._failures = 0
        self._failures += 1
        await asyncio.sleep(self._pace.retry.delay(self._failures, self._rng.random()))

    async def _list(self) -> None:
        items: list[msgspec.Raw] = []
        following = ""
        while True:
            query = self._query | {"limit": str(PAGE)} | ({"continue": following} if following else {})
            page = _lists.decode(await self._api.request("GET", self._path, query=query, timeout=LIST_TIMEOUT))
            items += page.items
            following = page.metadata.continue_
            if not following:
                break
        await self._sink.listed(items)
        self._version = page.metadata.resource_version
        self._sink.current()

    async def _watch(self) -> None:
        query = self._query | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(self._rng.randint(self._pace.shortest_watch, self._pace.longest_watch)),
        }
        self._heard, self._opened = False, None
        async with self._api.lines(self._path, query, self._pace.silence) as lines:
            self._opened = asyncio.get_running_loop().time()
            self._sink.current()
            async for line in lines:
                self._take(_events.decode(line))
                self._heard, self._failures = True, 0

    def _take(self, event: _Event) -> None:
        about = _objects.decode(event.object)
        if event.type == "ERROR":
            raise ApiError(about.code, about.message or "the watch failed")
        if event.type != "BOOKMARK":
            self._sink.event(event.type, event.object)  # type: ignore[arg-type]  # the API knows no other types
        self._version = about.metadata.resource_version or self._version
