"""The gossip's datagrams, on the same address as the agent's HTTP server.

Datagrams may be lost, so nothing here waits, and no failure of a single one is an error: a closed port, a full buffer
or a name that isn't known yet count as loss. Only a port that can't be opened is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Coroutine

import structlog

from sidecar.edges.seeds import addresses_of, join_address, split_address
from sidecar.edges.threads import in_thread
from sidecar.ports import ListenFailed

log = structlog.get_logger()

Received = Callable[[bytes, str], None]
"""Called with a datagram and the host:port that it came from."""

# Kernel buffer: an agent that sleeps for a second must not lose what was said to it meanwhile.
RECEIVE_BUFFER = 1024 * 1024
REOPEN_SECONDS = 1.0
MAX_NAMES = 4096
NAME_SECONDS = 30.0

_Address = tuple[str, int]


class UdpEndpoint:
    """One UDP socket that sends to and receives from host:port texts. It is opened again when it breaks."""

    def __init__(self, host: str, port: int) -> None:
        """The address to listen on; port 0 is any free one."""
        self._host, self._port = host, port
        self._transport: asyncio.DatagramTransport | None = None
        self._received: Received | None = None
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._addresses: dict[str, tuple[_Address | None, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        # The kernel takes nothing now; what would have to wait is lost.
        self.congested = False

    def move(self, port: int) -> None:
        """Listen there from the next `open` on: the HTTP server's real port is known late."""
        self._port = port

    async def open(self, received: Received) -> None:
        """Listen. Raises ListenFailed."""
        self._received = received
        try:
            bound = await in_thread(self._bind)
        except OSError as error:
            place = join_address(self._host, self._port)
            raise ListenFailed(
                f"--listen {place}: UDP port {self._port} can't be opened ({error.strerror or error}); gossip uses the "
                "port number of the HTTP server; end the other process, or choose another port"
            ) from error
        self.congested = False
        # A socket that was opened again keeps the number that peers know.
        self._port = int(bound.getsockname()[1])
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: _Protocol(self), sock=bound)
        self.address = join_address(self._host, self._port)

    def send(self, address: str, data: bytes) -> None:
        """Send one datagram to host:port, or lose it."""
        transport = self._transport
        if transport is None or transport.is_closing() or self.congested:
            return
        found = self._resolved(address)
        if found is not None:
            with contextlib.suppress(OSError, ValueError):
                transport.sendto(data, found)

    async def close(self) -> None:
        """Stop listening. Harmless when not open."""
        transport, self._transport, self._received = self._transport, None, None
        for task in self._tasks:
            task.cancel()
        if transport is not None:
            transport.close()
            await asyncio.sleep(0)

    def _bind(self) -> socket.socket:
        bound = socket.socket(self._family, socket.SOCK_DGRAM)
        try:
            if self._family == socket.AF_INET6:
                # One socket for both: peers of an IPv4 cluster must reach an agent that listens on [::].
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            with contextlib.suppress(OSError):
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            bound.setblocking(False)
            bound.bind((self._host, self._port))
        except OSError:
            bound.close()
            raise
        return bound

    def _resolved(self, address: str) -> _Address | None:
        """Where to send for that text; a name is looked up aside, and what is sent to it meanwhile is lost."""
        now = asyncio.get_running_loop().time()
        known = self._addresses.get(address)
        if known is not None and known[1] > now:
            return known[0]
        if len(self._addresses) >= MAX_NAMES:
            self._addresses.clear()
        try:
            host, port = split_address(address)
        except ValueError:
            self._addresses[address] = (None, now + NAME_SECONDS)
            return None
        with contextlib.suppress(ValueError):
            found = (self._for_family(host), port)
            self._addresses[address] = (found, float("inf"))
            return found
        self._addresses[address] = (known[0] if known else None, now + NAME_SECONDS)
        self._start(self._look_up(address, host, port))
        return self._addresses[address][0]

    async def _look_up(self, address: str, host: str, port: int) -> None:
        try:
            found = await in_thread(lambda: addresses_of(host))
        except (OSError, UnicodeError):
            return
        until = asyncio.get_running_loop().time() + NAME_SECONDS
        self._addresses[address] = ((self._for_family(found[0]), port), until)

    def _for_family(self, host: str) -> str:
        """An IPv6 socket names IPv4 hosts in its own way. Raises ValueError for what isn't an IP address."""
        ip = ipaddress.ip_address(host)
        return f"::ffff:{ip}" if ip.version == 4 and self._family == socket.AF_INET6 else str(ip)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _arrived(self, data: bytes, host: str, port: int) -> None:
        if self._received is not None:
            self._received(data, join_address(host.removeprefix("::ffff:"), port))

    def _lost(self, error: Exception | None) -> None:
        """The transport has ended by itself: one bad moment must not end all gossip."""
        if self._received is None:
            return
        log.warning("udp_closed", address=self.address, reason=str(error or "end of file"))
        self._transport = None
        self._start(self._reopen())

    async def _reopen(self) -> None:
        while self._transport is None and self._received is not None:
            await asyncio.sleep(REOPEN_SECONDS)
            try:
                await self.open(self._received)
            except ListenFailed as error:
                log.warning("udp_not_opened", reason=str(error))


class _Protocol(asyncio.DatagramProtocol):
    """asyncio's side of the endpoint."""

    def __init__(self, endpoint: UdpEndpoint) -> None:
        self._endpoint = endpoint

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        """See asyncio. An IPv6 address has four parts."""
        self._endpoint._arrived(data, str(addr[0]), addr[1])

    def error_received(self, exc: Exception) -> None:
        """A datagram came back as undeliverable: its receiver is away, which silence says as well."""

    def pause_writing(self) -> None:
        """See asyncio."""
        self._endpoint.congested = True

    def resume_writing(self) -> None:
        """See asyncio."""
        self._endpoint.congested = False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._endpoint._lost(exc)
