"""Ports for processes that must know each other's before they start."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """TCP ports of 127.0.0.1 that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
