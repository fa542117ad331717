"""A thousand workers of a pool in one process, each with an address of its own, for an agent that gossips with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from sidecar.core.keyring import Keyring
from sidecar.core.liveness import Timing
from sidecar.core.wire import Party
from sidecar.edges.udp import UdpEndpoint
from sidecar.model import Record
from tests.bench.bench_gossip import Puppets

PORT = 8790


class Crowd(Puppets):
    """Answers each at the address that its record names."""

    def __init__(self, told: Sequence[Record], pool: str, keys: Keyring, uid: str) -> None:
        super().__init__(len(told), pool=pool, keys=keys, party=Party(uid, 0))
        self.sockets: dict[str, UdpEndpoint] = {}
        self.told = told
        for record in told:
            self.join(record)

    def send(self, uid: str, data: bytes) -> None:
        """See Puppets."""
        self.sockets[uid].send(self.worker, data)

    @contextlib.asynccontextmanager
    async def living(self, app: web.Application) -> AsyncIterator[None]:
        """Inside, everyone answers, by `app` too, and probes the worker as often as a pool does."""
        app.router.add_post("/peer/sync", self.sync)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        assert runner.server is not None
        hosts = [record.head.address.rpartition(":")[0] for record in self.told]
        server = await asyncio.get_running_loop().create_server(runner.server, hosts, PORT)
        for record, host in zip(self.told, hosts, strict=True):
            self.sockets[record.head.uid] = UdpEndpoint(host, PORT)
            await self.sockets[record.head.uid].open(self.datagram)
        probing = asyncio.create_task(self._probe(Timing().period))
        try:
            yield
        finally:
            probing.cancel()
            for endpoint in self.sockets.values():
                await endpoint.close()
            server.close()
            await runner.cleanup()

    async def _probe(self, period: float) -> None:
        await self.found.wait()
        while True:
            self.ping()
            await asyncio.sleep(period)
