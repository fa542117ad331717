"""Who a standalone worker is: a random UID and a generation, both kept in state/."""

from __future__ import annotations

import uuid

import msgspec
import structlog

from sidecar.ports import DiskFull, Store

log = structlog.get_logger()


class Identity(msgspec.Struct, frozen=True):
    """`generation` is higher at each start than at any before."""

    uid: str
    generation: int


STATE = "identity.json"


def take_identity(store: Store, now: float, uid: str = "") -> Identity:
    """The kept identity with the next generation, max(stored + 1, clock); `uid` overrides the kept one.

    On a full disk it isn't kept, which is no reason not to serve what is there: the next generation comes of the clock.
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
    try:
        keep_identity(store, identity)
    except DiskFull as error:
        log.warning("identity_not_kept", error=str(error))
    return identity


def keep_identity(store: Store, identity: Identity) -> None:
    """Write it down, so that the next start goes above its generation. Raises DiskFull."""
    store.save(STATE, msgspec.json.encode(identity))
