"""Downloads that other workers read from while they are still under way: names, chunks, and who reads from whom."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from sidecar.model import Listing

CHUNK = 4 * 1024 * 1024
"""Bytes that are verified, and passed on, as one."""

FAN_OUT = 2


def flight_id(source_id: str, listing: Listing) -> str:
    """32 hex digits that name one content under way: two workers mean the same if paths, sizes and ETags are equal."""
    framed = msgspec.json.encode((source_id, listing))
    return hashlib.sha256(b"lora-sidecar flight\0" + framed).hexdigest()[:32]


def chunks(size: int) -> int:
    """How many chunks a file of that size has; an empty one has none."""
    return -(-size // CHUNK)


def span(size: int, chunk: int) -> tuple[int, int]:
    """First byte of a chunk, and the one behind it."""
    return chunk * CHUNK, min((chunk + 1) * CHUNK, size)


def upstream(targets: Sequence[str], me: str) -> list[str]:
    """Whom to read from, in this order, when the targets stand in rank order: the parent, its parents up to the first,
    then everyone else before this worker.

    Nobody reads from a worker behind itself, so no two wait for each other. A worker that isn't a target stands behind
    all of them.
    """
    rank = targets.index(me) if me in targets else len(targets)
    line: list[int] = []
    above = rank
    while above > 0:
        above = (above - 1) // FAN_OUT
        line.append(above)
    rest = [n for n in range(rank - 1, -1, -1) if n not in line]
    return [targets[n] for n in (*line, *rest)]
