"""Blocking HTTP GETs from peers, for threads that move bytes: connections are kept, bodies go where the caller says."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from sidecar.edges.seeds import split_address

# Without a byte for so long a peer counts as away. Longer than the time that it may hold a request on purpose.
TIMEOUT = 5.0
MAX_IDLE = 4
MAX_SMALL_BODY = 1024 * 1024
_BLOCK = 1024 * 1024

Headers = http.client.HTTPMessage
Accept = Callable[[int, Headers], bool]
"""Whether the body of this answer is wanted; the rest of the connection is dropped if not."""
Take = Callable[[memoryview], None]
"""Takes the next bytes of a body."""


@runtime_checkable
class Filling(Protocol):
    """A `Take` that says where its next bytes should lie, so that they need not be copied there."""

    def room(self, size: int) -> memoryview:
        """Room for some of the next `size` bytes. Raises PeerFault if there is none."""

    def __call__(self, block: memoryview) -> None:
        """These bytes have come into that room."""


class PeerFault(Exception):
    """A peer that can't be reached, stopped in the middle, or doesn't speak HTTP."""


class Line:
    """One exchange that another thread may end, however its peer drags it out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_cut = False

    def take(self, connection: http.client.HTTPConnection) -> None:
        """From now on this connection is what `cut` ends. Raises PeerFault if it was called already."""
        if connection.sock is None and not self._is_cut:
            connection.connect()
        with self._lock:
            if self._is_cut:
                raise PeerFault("nobody wants it any more")
            self._socket = connection.sock

    def release(self) -> bool:
        """The exchange is over; whether its connection may be used again."""
        with self._lock:
            self._socket = None
            return not self._is_cut

    def cut(self) -> None:
        """End it, from any thread: whoever waits for its bytes gets a PeerFault."""
        with self._lock:
            self._is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


class PeerConnections:
    """Connections by host:port. Safe for many threads."""

    def __init__(self, *, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        self._idle: dict[str, list[http.client.HTTPConnection]] = defaultdict(list)
        self._lock = threading.Lock()
        self._closed = False

    def get(
        self, address: str, path: str, headers: dict[str, str], accept: Accept, take: Take, line: Line
    ) -> tuple[int, Headers]:
        """GET it; when `accept` says so, the body goes to `take` block by block. Returns status and headers.

        Raises PeerFault, also when `line` is cut, and what `take` raises.
        """
        connection = self._idle_one(address)
        if connection is not None:
            try:
                return self._exchange(connection, address, path, headers, accept, take, line)
            except _Stale:
                pass  # the peer closed it while it lay idle: not its fault, nothing was received
        return self._exchange(self._new(address), address, path, headers, accept, take, line)

    def close(self) -> None:
        """Close those that lie idle, and let no others become idle."""
        with self._lock:
            self._closed = True
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        address: str,
        path: str,
        headers: dict[str, str],
        accept: Accept,
        take: Take,
        line: Line,
    ) -> tuple[int, Headers]:
        keep = False
        reused = connection.sock is not None
        try:
            line.take(connection)
            try:
                connection.request("GET", path, headers=headers)
                response = connection.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected) as error:
                if reused:
                    raise _Stale from error
                raise
            if accept(response.status, response.headers):
                _read(response, take)
                keep = not response.will_close
            return response.status, response.headers
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PeerFault(f"{address}: {error or type(error).__name__}") from error
        finally:
            self._done(address, connection, line.release() and keep)

    def _idle_one(self, address: str) -> http.client.HTTPConnection | None:
        with self._lock:
            connections = self._idle.get(address)
            return connections.pop() if connections else None

    def _new(self, address: str) -> http.client.HTTPConnection:
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise PeerFault(str(error)) from error
        return http.client.HTTPConnection(host, port, timeout=self._timeout)

    def _done(self, address: str, connection: http.client.HTTPConnection, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed and len(self._idle[address]) < MAX_IDLE:
                self._idle[address].append(connection)
                return
        connection.close()


class _Stale(PeerFault):
    """An idle connection was closed by the peer."""


def _read(response: http.client.HTTPResponse, take: Take) -> None:
    expected = response.length
    if expected is None:
        raise http.client.HTTPException("an answer without a length")
    own = memoryview(bytearray(0 if isinstance(take, Filling) else min(_BLOCK, max(expected, 1))))
    left = expected
    while left:
        buffer = take.room(left) if isinstance(take, Filling) else own[: min(left, len(own))]
        count = response.readinto(buffer)
        if not count:
            raise http.client.IncompleteRead(b"", left)
        left -= count
        take(buffer[:count])
    # Only this makes the connection ready for another request, also after an empty body.
    response.close()


class Body:
    """A body kept in memory, no more than `limit` bytes. Raises PeerFault beyond."""

    def __init__(self, limit: int = MAX_SMALL_BODY) -> None:
        self.data = bytearray()
        self._limit = limit

    def __call__(self, block: memoryview) -> None:
        if len(self.data) + len(block) > self._limit:
            raise PeerFault(f"a body of more than {self._limit} bytes")
        self.data += block
