"""Who a standalone worker is: a random UID and a generation, both kept in state/."""

from __future__ import annotations

import uuid

import msgspec

from sidecar.ports import Store


class Identity(msgspec.Struct, frozen=True):
    """`generation` is higher at each start than at any before."""

    uid: str
    generation: int


STATE = "identity.json"


def take_identity(store: Store, now: float, uid: str = "") -> Identity:
    """The kept identity with the next generation, max(stored + 1, clock); `uid` overrides the kept one.

    Raises DiskFull if it can't be kept.
    """
    data = store.read(STATE)
    old: Identity | None = None
    if data:
        try:
            old = msgspec.json.decode(data, type=Identity)
        except (msgspec.DecodeError, msgspec.ValidationError):
            old = None
    generation = max(old.generation + 1 if old else 0, int(now))
    identity = Identity(uid=uid or (old.uid if old else str(uuid.uuid4())), generation=generation)
    keep_identity(store, identity)
    return identity


def keep_identity(store: Store, identity: Identity) -> None:
    """Write it down, so that the next start goes above its generation. Raises DiskFull."""
    store.save(STATE, msgspec.json.encode(identity))
