"""The network between simulated agents: bytes in, bytes out, made bad in every way.

Datagrams are lost, late, doubled and overtake each other; HTTP is reliable, or fails, or hangs. It knows addresses
alone: whoever listens at one gets what was sent to it, be it the one who was meant or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec

from sidecar.core.speaker import SYNC, Outcome
from sidecar.core.wire import MAX_DATAGRAM, Opened
from sidecar.loops.gossip import GossipPeers
from sidecar.model import Record
from sidecar.ports import PeerUnreachable

from .loop import NOWHERE, Process

T = TypeVar("T")

_json = msgspec.json.Encoder().encode


class Host:
    """One agent process at its address: what the HTTP server and the UDP socket of an agent do."""

    def __init__(self, address: str, process: Process) -> None:
        self.address, self.process = address, process
        self.record: Callable[[], Record] | None = None
        self.gossip: GossipPeers | None = None
        self.received: Callable[[bytes, str], None] | None = None
        self._served: tuple[Record, bytes] | None = None
        self._tag = 0

    def sync(self, header: str, body: bytes) -> Outcome:
        """POST /peer/sync."""
        if self.gossip is None:
            return Outcome(status=404)
        opened = self.gossip.admit(header, SYNC)
        return self.gossip.answer(opened, body) if isinstance(opened, Opened) else opened

    def own_record(self, etag: str) -> tuple[bytes | None, str]:
        """GET /v1/record: no body when it has not changed."""
        assert self.record is not None, "a host listens when it has a record"
        record = self.record()
        if self._served is None or self._served[0] is not record:
            self._served = (record, _json(record))
            self._tag += 1
        tag = f"{id(self):x}-{self._tag}"
        return (None if etag == tag else self._served[1]), tag


class Air:
    """All bytes under way. `cut` holds ordered pairs of addresses from the one to the other; `deaf` lacks datagrams."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.hosts: dict[str, Host] = {}
        self.loss = 0.0
        self.duplicate = 0.0
        self.delay = (0.0005, 0.005)
        self.cut: set[tuple[str, str]] = set()
        self.deaf: set[str] = set()
        # Addresses at which nothing answers at all, not even to say that nobody listens.
        self.dark: set[str] = set()
        self.crashes: list[BaseException] = []
        self.oversized: list[int] = []
        self.datagrams = 0
        self.requests = 0

    def calm(self) -> None:
        """A good network again."""
        self.loss = self.duplicate = 0.0
        self.delay = (0.0005, 0.005)
        self.cut.clear()
        self.deaf.clear()

    def send(self, source: str, target: str, data: bytes) -> None:
        """A datagram, or its loss."""
        self.datagrams += 1
        if len(data) > MAX_DATAGRAM:
            self.oversized.append(len(data))
        rng = self.rng
        if (source, target) in self.cut or source in self.deaf or target in self.deaf:
            return
        for _ in range(1 + (rng.random() < self.duplicate)):
            if rng.random() >= self.loss:
                wait = rng.uniform(*self.delay)
                asyncio.get_running_loop().call_later(wait, self._deliver, source, target, data, context=NOWHERE)

    def _deliver(self, source: str, target: str, data: bytes) -> None:
        host = self.hosts.get(target)
        if host is not None and host.received is not None:
            host.received(data, source)

    async def request(self, source: str, target: str, ask: Callable[[Host], T]) -> T:
        """What the host at `target` answers; hangs for ever where bytes get lost. Raises ConnectionError."""
        self.requests += 1
        if (source, target) in self.cut or (target, source) in self.cut:
            await asyncio.Event().wait()
        await asyncio.sleep(3 * self.rng.uniform(*self.delay))
        host = self.hosts.get(target)
        if host is None:
            if target in self.dark:
                await asyncio.Event().wait()
            raise ConnectionRefusedError(target)
        answer = await host.process.turn(lambda: self._noting(ask, host))
        if (target, source) in self.cut:
            await asyncio.Event().wait()
        return answer

    def _noting(self, ask: Callable[[Host], T], host: Host) -> T:
        try:
            return ask(host)
        except Exception as error:
            self.crashes.append(error)
            raise


class AirDatagrams:
    """An agent's UDP socket: `loops.gossip.Datagrams`."""

    def __init__(self, air: Air, host: Host) -> None:
        self._air, self._host = air, host

    async def open(self, received: Callable[[bytes, str], None]) -> None:
        self._host.received = received

    def send(self, address: str, data: bytes) -> None:
        self._air.send(self._host.address, address, data)

    async def close(self) -> None:
        self._host.received = None


class AirSync:
    """An agent's client for syncs: `loops.gossip.SyncClient`."""

    def __init__(self, air: Air, host: Host) -> None:
        self._air, self._host = air, host

    async def post(self, address: str, header: str, body: bytes, timeout: float) -> Outcome:
        try:
            async with asyncio.timeout(timeout):
                return await self._air.request(self._host.address, address, lambda host: host.sync(header, body))
        except (TimeoutError, ConnectionError):
            return Outcome(status=0)

    async def close(self) -> None:
        pass


class AirAsking:
    """How an agent asks others for their records: `edges.peers_http.Asking`."""

    def __init__(self, air: Air, host: Host) -> None:
        self._air, self._host = air, host

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        yield

    async def get(self, address: str, etag: str, timeout: float) -> tuple[bytes | None, str]:
        try:
            async with asyncio.timeout(timeout):
                return await self._air.request(self._host.address, address, lambda host: host.own_record(etag))
        except (TimeoutError, ConnectionError) as error:
            raise PeerUnreachable(f"{address} does not answer {self._host.address}") from error
