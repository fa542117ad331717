"""The namespace's Adapters: what is in force (see core.deletions), and what their status shows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog

from sidecar.core import deletions
from sidecar.core.manifest import InvalidManifest, parse_adapter
from sidecar.core.retry import Backoff
from sidecar.core.status import NO_CANDIDATES, Transition, digest_of
from sidecar.edges.kubernetes.api import Api, ApiError
from sidecar.edges.kubernetes.objects import AdapterHead, Condition
from sidecar.edges.kubernetes.watch import EventType
from sidecar.model import Adapter, Frozen, Problem
from sidecar.ports import Clock, StatusSeen

log = structlog.get_logger()

GROUP = "lora-sidecar.io/v1alpha1"
# Decoded in one go without giving way to others: half a millisecond each.
_BATCH = 20
_AGAIN = Backoff(first=1.0, cap=15.0)

_heads = msgspec.json.Decoder(AdapterHead)


class _Told(Frozen, frozen=True, rename="camel"):
    observed_generation: int | None = None
    revision: str | None = None
    conditions: list[Condition] = []


_statuses = msgspec.json.Decoder(_Told | None)


class AdapterList:
    """Told by a Watch; `changed` is called when what is in force, or whether it is current, changed."""

    def __init__(
        self,
        *,
        path: str,
        allow_http: bool,
        grace: float,
        saved: Sequence[Adapter] | None,
        clock: Clock,
        changed: Callable[[], None],
        trouble: Callable[[ApiError], Problem],
    ) -> None:
        self.path = path
        self._allow_http = allow_http
        self._clock, self._changed, self._trouble = clock, changed, trouble
        self._believed = deletions.Believed(grace=grace)
        if saved is not None:
            deletions.remembered(self._believed, {a.key: a for a in saved})
        self._known = saved is not None
        self._current = False
        self._error: Problem | None = None
        self._broken: dict[str, Problem] = {}
        self._statuses: dict[str, StatusSeen] = {}
        self._doubt = asyncio.Event()
        self._in_force: tuple[Adapter, ...] | None = None

    @property
    def adapters(self) -> tuple[Adapter, ...] | None:
        """What is in force; None while nothing was ever known. The same object until something changes."""
        if self._in_force is None and self._known:
            self._in_force = deletions.in_force(self._believed)
        return self._in_force

    @property
    def fresh(self) -> bool:
        """Whether the API server answers, and may take something away."""
        return self._current and not self._believed.missing

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The list's own trouble, and the resources that can't be read."""
        own = (self._error,) if self._error else ()
        return (*own, *(self._broken[key] for key in sorted(self._broken)))

    def status_seen(self, key: str) -> StatusSeen | None:
        """See ports.StatusBoard."""
        return self._statuses.get(key)

    # Told by the watch

    async def listed(self, items: Sequence[msgspec.Raw]) -> None:
        """See watch.Sink."""
        self._broken = {}
        read: list[Adapter] = []
        keys: set[str] = set()
        for number, item in enumerate(items):
            if number % _BATCH == _BATCH - 1:
                await asyncio.sleep(0)
            key, adapter = self._read(item)
            keys.add(key)
            if adapter is not None:
                read.append(adapter)
        self._statuses = {k: v for k, v in self._statuses.items() if k in keys}
        first = not self._known
        self._known = True
        changed = deletions.listed(self._believed, read, self._broken, self._clock())
        self._after(changed or first)

    def event(self, kind: EventType, item: msgspec.Raw) -> None:
        """See watch.Sink."""
        if kind == "DELETED":
            head = _heads.decode(item).metadata
            key = f"{head.namespace}/{head.name}"
            self._broken.pop(key, None)
            self._statuses.pop(key, None)
            deletions.deleted(self._believed, key, self._clock())
            self._after(False)
            return
        if self._only_status(item):
            return
        broken = dict(self._broken)
        key, adapter = self._read(item)
        changed = self._broken != broken
        if adapter is not None:
            changed |= deletions.seen(self._believed, adapter)
        self._after(changed)

    def _only_status(self, item: msgspec.Raw) -> bool:
        """Whether that was an event about an adapter whose spec is the one in force; nobody is woken by it.

        The API server counts a change of the spec in the generation, and of nothing else. Most events are of statuses
        that workers write while adapters come, so these are read without the spec.
        """
        head = _heads.decode(item)
        meta = head.metadata
        key = f"{meta.namespace}/{meta.name}"
        old = self._believed.adapters.get(key)
        if old is None or not meta.generation or (old.uid, old.generation) != (meta.uid, meta.generation):
            return False
        told = _told(head)
        if key in self._broken or key in self._believed.doubted or told is None:
            return False
        self._statuses[key] = _seen(head, told)
        revision = told.revision or None if told.observed_generation == meta.generation else None
        if revision != old.status_revision and deletions.seen(
            self._believed, msgspec.structs.replace(old, status_revision=revision)
        ):
            self._in_force = None
        return True

    def current(self) -> None:
        """See watch.Sink."""
        if not self._current or self._error:
            self._current, self._error = True, None
            self._changed()

    def failed(self, error: ApiError) -> None:
        """See watch.Sink."""
        changed = error.code == 404 and self._not_found()
        trouble = self._trouble(error)
        if changed or self._current or trouble != self._error:
            self._current, self._error = False, trouble
            self._after(True)

    def doubtful(self) -> bool:
        """See watch.Sink."""
        return deletions.doubtful(self._believed, self._clock())

    def _not_found(self) -> bool:
        return deletions.not_found(self._believed, self._clock())

    def _after(self, changed: bool) -> None:
        if self._believed.doubted:
            self._doubt.set()
        if changed:
            self._in_force = None
            self._changed()

    def _read(self, item: msgspec.Raw) -> tuple[str, Adapter | None]:
        """Key, and the adapter if it can be read; else its problem is noted."""
        head = _heads.decode(item)
        key = f"{head.metadata.namespace}/{head.metadata.name}"
        self._statuses[key] = _seen(head, _told(head))
        try:
            adapter = parse_adapter(msgspec.json.decode(item), strict=False, allow_http=self._allow_http)
        except InvalidManifest as error:
            kept = "; its last good version stays in force" if key in self._believed.adapters else ""
            self._broken[key] = Problem(where=f"adapter {key}", message=f"{error}{kept}")
            return key, None
        self._broken.pop(key, None)
        return key, adapter

    # Asking whether deletions are true

    async def ask_for_ever(self, api: Api, rng: random.Random) -> None:
        """Confirm deletions by a look at the list, when they are due. Without any it asks nothing."""
        failures = 0
        while True:
            due = deletions.due(self._believed)
            if due is None:
                self._doubt.clear()
                await self._doubt.wait()
                continue
            wait = due - self._clock()
            if wait > 0:
                await asyncio.sleep(min(wait, 1.0))
                continue
            try:
                await self._ask(api)
                failures = 0
            except ApiError as error:
                failures += 1
                if error.code == 404:
                    self.failed(error)
            # A deletion that is due and not confirmed: the watch lags, or the server gave no answer.
            await asyncio.sleep(_AGAIN.delay(max(1, failures), rng.random()))

    async def _ask(self, api: Api) -> None:
        body = await api.request("GET", self.path, query={"limit": "1"})
        items = msgspec.json.decode(body, type=_Items).items
        gone = deletions.confirmed(self._believed, self._clock(), empty=not items)
        if gone:
            log.info("adapters_deleted", adapters=sorted(gone))
            self._after(True)


class _Items(Frozen, frozen=True):
    items: list[msgspec.Raw] = []


def _told(head: AdapterHead) -> _Told | None:
    """The status; None for one that can't be read."""
    try:
        return _statuses.decode(head.status) or _Told()
    except msgspec.MsgspecError:
        return None


def _seen(head: AdapterHead, told: _Told | None) -> StatusSeen:
    managers = {m.manager for m in head.metadata.managed_fields or () if m.subresource == "status"}
    conditions: Iterable[Condition] = told.conditions if told else ()
    return StatusSeen(
        digest=digest_of(head.status),
        managers=tuple(sorted(managers)),
        conditions={c.type: Transition(c.status, c.last_transition_time) for c in conditions},
        unplaced=any(c.type == "Placed" and c.reason == NO_CANDIDATES for c in conditions),
    )
