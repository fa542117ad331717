"""Workers that fetch from one origin and from each other: gossip, an HTTP server, a store and a fetcher each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest_asyncio

from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.edges.flights import Flights
from sidecar.edges.peer_fetch import PeerTransfer
from sidecar.edges.peer_files import routes
from sidecar.model import Adapter, Decision, Entry, Listing, State
from sidecar.ports import Fetched
from sidecar.settings import Settings
from tests.edges.gossip_nodes import Node, Nodes, know_each_other, running, until


class Worker:
    """One of them."""

    def __init__(self, node: Node, store: AdapterStore, flights: Flights, transfer: PeerTransfer) -> None:
        self.node, self.store, self.flights, self.transfer = node, store, flights, transfer
        self.fetcher = OriginFetcher(Settings(), store, peers=transfer)
        self.received = 0

    async def fetch(self, adapter: Adapter, listing: Listing | None = None) -> Fetched:
        listing = listing or await self.fetcher.listing(adapter)
        return await self.fetcher.fetch(adapter, listing, None, lambda done, total: None)

    def announce(self, adapter: Adapter, fetched: Fetched) -> None:
        """Say that it is loaded here, and what was decided."""
        decision = Decision(
            source_id=adapter.source_id, refresh=1, revision=fetched.revision, listing=fetched.listing.files
        )
        self.node.announce(Entry(adapter=adapter.key, state=State.LOADED, revision=fetched.revision, decision=decision))

    def flying(self) -> int:
        """Whole chunks of its downloads that others can read."""
        return sum(len(file.hashes) for flight in self.flights._flights.values() for file in flight.files)

    async def close(self) -> None:
        await self.fetcher.close()
        self.transfer.close()
        self.flights.close()
        self.store.close()


class Workers:
    """All of them; `targets` is the rank order that every one of them believes in."""

    def __init__(self, nodes: Nodes, directory: Path) -> None:
        self.nodes, self.directory = nodes, directory
        self.all: list[Worker] = []
        self.targets: Sequence[str] = ()

    async def start(self, count: int, **options: Any) -> None:
        self.targets = [f"worker-{n}" for n in range(count)]
        for name in self.targets:
            await self._one(name, options)
        await until(know_each_other(self.nodes), 10)

    async def _one(self, name: str, options: dict[str, Any]) -> None:
        store = AdapterStore.open(str(self.directory / name))
        flights = Flights()
        more: Callable[[Any], Any] = lambda side: routes(side, store, flights)  # noqa: E731  # one line says it
        node = await self.nodes.start(name, more=more)
        made: list[Worker] = []

        def received(size: int) -> None:
            made[0].received += size

        transfer = PeerTransfer(
            node.peers, flights, me=name, targets=lambda key: self.targets, received=received, **options
        )
        made.append(Worker(node, store, flights, transfer))
        self.all += made


@pytest_asyncio.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    """For tests that import it."""
    async with running() as nodes:
        found = Workers(nodes, tmp_path)
        try:
            yield found
        finally:
            for worker in found.all:
                await worker.close()
