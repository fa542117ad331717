"""Whether all workers want the same adapters: a mistake in one worker's manifests, or a watch that has gone deaf.

Placement is only as good as its inputs are equal. So each worker tells a digest of its list, and what differs is shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from sidecar.core.placement import Assignment
from sidecar.core.world import Peer
from sidecar.model import Adapter, Frozen

Verdict = Literal["same", "differs", "unknown"]
How = Literal["only there", "not there", "another source"]

# Differences that are named; the first by name.
MOST_NAMED = 20

_encode = msgspec.json.Encoder(order="deterministic").encode


class Difference(Frozen, frozen=True):
    """An adapter (`namespace/name`) that another worker wants otherwise."""

    adapter: str
    how: How


def digest(adapters: Iterable[Adapter] | None) -> str:
    """16 hex digits over what is wanted, in whatever order it is listed; "" while that is unknown.

    A resource of the platform is told by its UID and generation, a manifest by what it says. The status doesn't count.
    """
    if adapters is None:
        return ""
    whole = hashlib.sha256()
    for each in sorted(adapters, key=lambda a: a.key):
        spec = b"" if each.uid and each.generation else _encode(msgspec.structs.replace(each, status_revision=None))
        whole.update(_encode((each.key, each.uid, each.generation)) + spec + b"\n")
    return whole.hexdigest()[:16]


def verdict(mine: str, theirs: str) -> Verdict:
    """What two digests say. An agent that has no list yet, or is too old to tell its digest, is unknown."""
    if not mine or not theirs:
        return "unknown"
    return "same" if mine == theirs else "differs"


def placed_on(assignments: Mapping[str, Assignment]) -> dict[str, list[str]]:
    """By worker, the keys of the adapters of which it is a target."""
    found: dict[str, list[str]] = {}
    for key, assignment in assignments.items():
        for name in assignment.targets:
            found.setdefault(name, []).append(key)
    return found


def differences(adapters: Mapping[str, Adapter], targeted: Iterable[str], peer: Peer) -> tuple[Difference, ...]:
    """What the entries of `peer` tell of where its list differs from `adapters` (by key).

    `targeted` are the keys of which it should be a target. A worker says nothing about adapters that are none of its
    business, so not every difference is seen.
    """
    found: dict[str, How] = {key: "not there" for key in targeted if key not in peer.entries}
    for key, entry in peer.entries.items():
        adapter = adapters.get(key)
        if adapter is None:
            found[key] = "only there"
        elif any(d is not None and d.source_id != adapter.source_id for d in (entry.decision, entry.coming)):
            found[key] = "another source"
    return tuple(Difference(key, found[key]) for key in sorted(found)[:MOST_NAMED])
