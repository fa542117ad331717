"""What the pool writes about adapters: their status by server-side apply, and Events."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict

import msgspec
import structlog

from sidecar.core.annotations import moment
from sidecar.core.status import AdapterStatus, Happening
from sidecar.edges.kubernetes.adapters import GROUP
from sidecar.edges.kubernetes.api import APPLY_PATCH, MERGE_PATCH, Api, ApiError, PodIdentity
from sidecar.edges.kubernetes.trouble import problem
from sidecar.model import Adapter, Frozen, Problem
from sidecar.ports import Clock, StatusConflict

log = structlog.get_logger()

CONFLICT = 409
_MANAGER = re.compile(r'conflict with "([^"]+)"')
# A burst of so many Events, and then one in so many seconds.
BURST = 25
REFILL_SECONDS = 10.0
# A repetition within so long is shown by the count of the first one, and that at most once in so long.
SAME_WITHIN = 3600.0
COUNT_EVERY = 60.0
_REMEMBERED = 512


class _Applied(Frozen, frozen=True, omit_defaults=False):
    apiVersion: str
    kind: str
    metadata: dict[str, str]
    status: AdapterStatus


class _Event(Frozen, frozen=True, omit_defaults=False):
    metadata: dict[str, str]
    involvedObject: dict[str, str]
    reason: str
    message: str
    type: str
    source: dict[str, str]
    firstTimestamp: str
    lastTimestamp: str
    count: int
    apiVersion: str = "v1"
    kind: str = "Event"


class _Sent(msgspec.Struct):
    name: str
    at: float
    count: int
    # When the count was shown last.
    shown: float


def manager(pool: str) -> str:
    """The field manager of a pool: one for all its workers."""
    return f"lora-sidecar-{pool}"[:128]


class Board:
    """Writes with the own pod's token. Field managers: one a pool."""

    def __init__(self, api: Api, me: PodIdentity, pool: str, clock: Clock) -> None:
        self._api, self._me, self._clock = api, me, clock
        self._manager = manager(pool)
        self._sent: OrderedDict[str, _Sent] = OrderedDict()
        self._tokens, self._filled = float(BURST), clock()
        self._problems: dict[str, Problem] = {}

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What keeps us from writing."""
        return tuple(self._problems.values())

    async def write_status(self, adapter: Adapter, status: AdapterStatus, *, force: bool) -> None:
        """See ports.StatusBoard. Taken by force from itself alone unless `force`."""
        path = f"/apis/{GROUP}/namespaces/{adapter.namespace}/adapters/{adapter.name}/status"
        metadata = {"name": adapter.name, "namespace": adapter.namespace}
        body = msgspec.json.encode(_Applied(GROUP, "Adapter", metadata, status))
        try:
            await self._apply(path, body, force=force)
        except ApiError as error:
            managers = tuple(sorted({m for cause in error.causes for m in _MANAGER.findall(cause)}))
            if error.code != CONFLICT or not managers:
                self._note("adapters/status", error, adapter.namespace)
                raise
            if set(managers) != {self._manager}:
                raise StatusConflict(str(error), managers) from error
            await self._apply(path, body, force=True)
        self._problems.pop("adapters/status", None)

    async def _apply(self, path: str, body: bytes, *, force: bool) -> None:
        query = {"fieldManager": self._manager, "force": "true" if force else "false"}
        await self._api.request("PATCH", path, query=query, body=body, media=APPLY_PATCH)

    async def tell(self, adapter: Adapter, happening: Happening) -> None:
        """See ports.StatusBoard. Beyond the rate Events are dropped: the status says it all the same."""
        now = self._clock()
        text = "\0".join((adapter.uid or adapter.key, happening.reason, happening.message))
        sent = self._sent.get(text)
        try:
            if sent is not None and now - sent.at < SAME_WITHIN:
                sent.count += 1
                if now - sent.shown >= COUNT_EVERY and self._may(now):
                    await self._count(adapter.namespace, sent, now)
                return
            if not self._may(now):
                log.info("event_dropped", adapter=adapter.key, reason=happening.reason)
                return
            name = f"{adapter.name}.{hashlib.blake2b(f'{text}{now}{self._me.uid}'.encode(), digest_size=8).hexdigest()}"
            await self._create(adapter, happening, name, now)
        except ApiError as error:
            self._note("events", error, adapter.namespace)
            raise
        self._problems.pop("events", None)
        self._sent[text] = _Sent(name, now, 1, now)
        if len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)

    async def _create(self, adapter: Adapter, happening: Happening, name: str, now: float) -> None:
        about = {"apiVersion": GROUP, "kind": "Adapter", "namespace": adapter.namespace, "name": adapter.name}
        event = _Event(
            metadata={"name": name, "namespace": adapter.namespace},
            involvedObject=about | ({"uid": adapter.uid} if adapter.uid else {}),
            reason=happening.reason,
            message=happening.message[:1024],
            type="Warning" if happening.warning else "Normal",
            source={"component": "lora-sidecar", "host": self._me.node},
            firstTimestamp=moment(now),
            lastTimestamp=moment(now),
            count=1,
        )
        await self._api.request(
            "POST", f"/api/v1/namespaces/{adapter.namespace}/events", body=msgspec.json.encode(event)
        )

    async def _count(self, namespace: str, sent: _Sent, now: float) -> None:
        sent.shown = now
        body = msgspec.json.encode({"count": sent.count, "lastTimestamp": moment(now)})
        path = f"/api/v1/namespaces/{namespace}/events/{sent.name}"
        await self._api.request("PATCH", path, body=body, media=MERGE_PATCH)

    def _may(self, now: float) -> bool:
        self._tokens = min(float(BURST), self._tokens + (now - self._filled) / REFILL_SECONDS)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _note(self, where: str, error: ApiError, namespace: str) -> None:
        if error.code == 403:
            self._problems[where] = problem(where, error, self._me, namespace)
