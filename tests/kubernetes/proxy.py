"""A bad way to the API server: slow, cut in the middle of an answer, refused for seconds."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator

from tests.kubernetes.controlplane import API_HOST, API_PORT

CHUNK = 4096
# Bytes of answers after which a connection is cut: within a TLS handshake, a list, or the events of a watch.
CUT_AFTER = (2_000, 30_000)
OPEN_SECONDS = (2.0, 5.0)
CLOSED_SECONDS = (0.5, 2.5)


class BadWay(threading.Thread):
    """A TCP proxy in a thread of its own, in the network namespace of whoever makes it.

    `delay` is in seconds for each 4 KiB in each direction. `cuts` and `closings` count what went wrong on purpose.
    """

    def __init__(self, seed: int = 1) -> None:
        super().__init__(daemon=True)
        self.host, self.port = API_HOST, 0
        self.delay = 0.0
        self.cuts = self.closings = 0
        self._rng = random.Random(seed)
        self._flapping = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._change = asyncio.Event()
        self.start()
        assert self._ready.wait(10), "the proxy doesn't listen"

    def flap(self, on: bool) -> None:
        """From now on connections are cut at any byte, and for seconds nothing listens; or no longer."""
        self._loop.call_soon_threadsafe(self._switch, on)

    def stop(self) -> None:
        """End it with all its connections."""
        self._loop.call_soon_threadsafe(self._end.set)
        self.join(timeout=10)

    def run(self) -> None:
        """The thread."""
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._main())

    def _switch(self, on: bool) -> None:
        self._flapping = on
        self._change.set()

    async def _main(self) -> None:
        opening = asyncio.create_task(self._open_and_close())
        await self._end.wait()
        opening.cancel()
        await asyncio.wait([opening])
        # Every connection has been aborted, so what serves them ends by itself.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            await asyncio.wait(rest, timeout=5)

    async def _open_and_close(self) -> None:
        while True:
            async with self._listening():
                await self._until_change(self._rng.uniform(*OPEN_SECONDS))
            if self._flapping:
                self.closings += 1
                await self._until_change(self._rng.uniform(*CLOSED_SECONDS))

    async def _until_change(self, seconds: float) -> None:
        """Wait so long, or until it flaps no longer; for ever while it doesn't flap."""
        while True:
            self._change.clear()
            try:
                await asyncio.wait_for(self._change.wait(), seconds if self._flapping else None)
            except TimeoutError:
                return
            if not self._flapping:
                return

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, self.host, self.port, reuse_address=True)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            yield
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(API_HOST, API_PORT)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        left = self._rng.randint(*CUT_AFTER) if self._flapping else None
        ways = [
            asyncio.ensure_future(self._pump(reader, far_writer, None)),
            asyncio.ensure_future(self._pump(far_reader, writer, left)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in both:
                end.transport.abort()
            self._writers -= both

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if self.delay:
                    await asyncio.sleep(self.delay)
                if left is not None and self._flapping:
                    data, left = data[:left], left - len(data)
                writer.write(data)
                await writer.drain()
                if left is not None and left <= 0:
                    self.cuts += 1
                    return
