"""Agents' gossip with real sockets on loopback: UDP and HTTP on one port each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from sidecar.core.keyring import INSECURE, Keyring
from sidecar.edges.gossip_keys import KeyFile
from sidecar.edges.peer_sync import HttpSync, routes
from sidecar.edges.udp import UdpEndpoint
from sidecar.loops.gossip import GossipPeers
from sidecar.model import Entry, Head, Member, Record, State


class Wire:
    """A UDP endpoint behind a firewall that can be closed, and that keeps what it let through."""

    def __init__(self, endpoint: UdpEndpoint) -> None:
        self.endpoint = endpoint
        self.blocked = False
        self.received: list[tuple[bytes, str]] = []

    async def open(self, received: Callable[[bytes, str], None]) -> None:
        def arrived(data: bytes, source: str) -> None:
            if not self.blocked:
                self.received.append((data, source))
                received(data, source)

        await self.endpoint.open(arrived)

    def send(self, address: str, data: bytes) -> None:
        if not self.blocked:
            self.endpoint.send(address, data)

    async def close(self) -> None:
        await self.endpoint.close()


class Node:
    """One agent's gossip, running."""

    def __init__(self, name: str, uid: str, address: str, peers: GossipPeers, wire: Wire) -> None:
        self.name, self.uid, self.address, self.peers, self.wire = name, uid, address, peers, wire
        self.changes = 0
        self.entries: tuple[Entry, ...] = ()
        self.task: asyncio.Task[None] | None = None
        self.runner: web.AppRunner | None = None
        self.announce()

    def announce(self, *entries: Entry) -> None:
        self.entries = entries or self.entries
        head = Head(uid=self.uid, name=self.name, pool="pool", address=self.address, engine_up=True)
        self.peers.announce(Record(head=head, entries=self.entries))

    def load(self, adapter: str) -> None:
        self.announce(Entry(adapter=adapter, state=State.LOADED, revision="sha256:" + "0" * 64))

    @property
    def alive(self) -> set[str]:
        return {name for name, observed in self.peers.view().items() if observed.alive}

    def adapters(self, name: str) -> set[str]:
        return {entry.adapter for entry in self.peers.view()[name].record.entries}

    async def kill(self) -> None:
        """End it as a crash would: nobody is told."""
        if self.task is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
        if self.runner is not None:
            await self.runner.cleanup()


class Later:
    """Stands for a GossipPeers that is made when the port of its server is known."""

    peers: GossipPeers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.peers, name)


class Nodes:
    """The nodes of one test. All know the first one's address, but those started `alone`."""

    def __init__(self) -> None:
        self.all: list[Node] = []

    async def start(
        self,
        name: str,
        *,
        uid: str = "",
        keys: Keyring = INSECURE,
        key_file: Path | None = None,
        pool: str = "pool",
        alone: bool = False,
        more: Callable[[Any], list[web.RouteDef]] | None = None,
        **options: object,
    ) -> Node:
        app = web.Application()
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        file = KeyFile(str(key_file)) if key_file else None
        side = Later()
        app.add_routes(routes(side))  # type: ignore[arg-type]  # it is what it stands for
        app.add_routes(more(side) if more else [])
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        wire = Wire(UdpEndpoint("127.0.0.1", port))
        members = tuple(Member(name=node.name, address=node.address) for node in self.all[:1] if not alone)
        fixed: dict[str, object] = {
            "uid": uid or f"uid-of-{name}",
            "generation": int(time.time()),
            "pool": pool,
            "keys": file.load() if file else keys,
            "new_keys": file.changed if file else None,
            "datagrams": wire,
            "client": HttpSync(),
            "members": lambda: members,
            "clock": time.time,
        }
        peers = GossipPeers(**(fixed | options))  # type: ignore[arg-type]  # a test may replace any of them
        side.peers = peers
        node = Node(name, uid or f"uid-of-{name}", f"127.0.0.1:{port}", peers, wire)
        node.runner = runner

        def changed() -> None:
            node.changes += 1

        node.task = asyncio.create_task(peers.run(changed))
        self.all.append(node)
        return node

    async def close(self) -> None:
        for node in self.all:
            await node.kill()


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Nodes]:
    nodes = Nodes()
    try:
        yield nodes
    finally:
        await nodes.close()


async def until(condition: Callable[[], bool], within: float) -> float:
    """Seconds until it holds. Fails when it doesn't in time."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within, f"not within {within} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - start


def know_each_other(nodes: Nodes) -> Callable[[], bool]:
    """Whether everyone holds everyone alive."""
    names = {node.name for node in nodes.all}
    return lambda: all(node.alive == names - {node.name} for node in nodes.all)
