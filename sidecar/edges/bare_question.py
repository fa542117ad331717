"""The cheapest way to ask a peer whether its record is still the one that is known: one request on a bare socket.

A new connection by aiohttp costs three times the CPU, and a thousand idle ones cost memory. Only the answer "304" is
read here. Whoever gives another one, or has a name instead of an address, is asked in the usual way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from sidecar.edges.seeds import split_address

# More than the status line of any answer.
_BEGINNING = 64


async def still_the_same(address: str, etag: str) -> bool:
    """Whether the agent at the host:port answers GET /v1/record with 304 for `etag`. Raises OSError.

    False: it says something else, or can't be asked in this way. Waits for as long as the peer does.
    """
    found = _numeric(address)
    if found is None or not etag.isascii() or not etag.isprintable():
        return False
    family, place = found
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, place)
        await loop.sock_sendall(
            connection,
            f"GET /v1/record HTTP/1.1\r\nHost: {address}\r\nIf-None-Match: {etag}\r\nAccept: application/json\r\n"
            "User-Agent: lora-sidecar\r\nConnection: close\r\n\r\n".encode(),
        )
        beginning = b""
        while b"\r\n" not in beginning and len(beginning) < _BEGINNING:
            more = await loop.sock_recv(connection, _BEGINNING)
            if not more:
                break
            beginning += more
    return beginning.startswith((b"HTTP/1.1 304 ", b"HTTP/1.0 304 "))


def _numeric(address: str) -> tuple[socket.AddressFamily, tuple[str, int]] | None:
    """The family and the socket's address of host:port if the host is numeric, so that nothing is looked up."""
    with contextlib.suppress(ValueError):
        host, port = split_address(address)
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):
                socket.inet_pton(family, host)
                return family, (host, port)
    return None
