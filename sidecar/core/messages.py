"""What gossiping agents say to each other, as MessagePack arrays: bodies of datagrams and of the sync over HTTP.

Every length is bounded by the size of what carries it (a datagram, or an HTTP body with a limit) and here again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated

import msgspec

from sidecar.core.wire import Count, Uid, decode_or_none
from sidecar.model import MAX_ENTRIES, Entry, Head, Name, Suspicion

# Members of a pool that one message may name.
MAX_MEMBERS = 20_000
# Removed adapters that a record still names, so that a peer a little behind needs no full copy.
MAX_REMOVED = 256
BUCKETS = 64

Sum = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Standing(IntEnum):
    """What is believed of a worker's agent, each outranking the one before at the same incarnation."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """What the sender believes of one agent, and the version of its record that the sender has.

    `by` names who accuses (a hash of its UID): independent accusers shorten a suspicion, echoes don't.
    """

    uid: Uid
    generation: Count
    incarnation: Count
    standing: Standing
    version: Count
    by: Sum = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        """Higher beats lower."""
        return (self.generation, self.incarnation, self.standing)


class HeadItem(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The head of a record as of version `stamp`."""

    stamp: Count
    head: Head

    @property
    def key(self) -> str:
        """Where it stands among the items of its record."""
        return "\0head"


class EntryItem(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One entry as of version `stamp`."""

    stamp: Count
    entry: Entry

    @property
    def key(self) -> str:
        """Where it stands among the items of its record."""
        return self.entry.adapter


class RemovedItem(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An entry that is gone as of version `stamp`."""

    stamp: Count
    adapter: Name

    @property
    def key(self) -> str:
        """Where it stands among the items of its record."""
        return self.adapter


class SuspicionsItem(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The suspicions of a record as of version `stamp`."""

    stamp: Count
    suspicions: Annotated[tuple[Suspicion, ...], msgspec.Meta(max_length=256)]

    @property
    def key(self) -> str:
        """Where it stands among the items of its record."""
        return "\0suspicions"


Item = HeadItem | EntryItem | RemovedItem | SuspicionsItem


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What takes a copy of one record from version `base` (0: from nothing) to `version`.

    `latest` is the newest version that the sender has: more is to be had when it is higher. Stamps ascend.
    """

    uid: Uid
    generation: Count
    base: Count
    version: Count
    latest: Count
    items: Annotated[tuple[Item, ...], msgspec.Meta(max_length=MAX_ENTRIES + MAX_REMOVED + 2)] = ()


class PackedDelta(msgspec.Struct, frozen=True, array_like=True):
    """A `Delta` whose items are encoded already; the same bytes on the wire."""

    uid: str
    generation: int
    base: int
    version: int
    latest: int
    items: Sequence[msgspec.Raw] = ()


class Target(msgspec.Struct, frozen=True, array_like=True):
    """Whom a PING_REQ is about, and whom the relayed ACK or NACK is about."""

    uid: Uid
    generation: Count
    address: Name = ""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The body of a datagram; its kind stands in the frame. The first claim is the sender's own."""

    seq: Count
    target: Target | None
    claims: Annotated[tuple[Claim, ...], msgspec.Meta(max_length=64)]
    deltas: Annotated[tuple[Delta, ...], msgspec.Meta(max_length=64)]


class PackedMessage(msgspec.Struct, frozen=True, array_like=True):
    """A `Message` whose parts are encoded already; the same bytes on the wire."""

    seq: int
    target: Target | None
    claims: Sequence[msgspec.Raw] = ()
    deltas: Sequence[msgspec.Raw] = ()


class Want(msgspec.Struct, frozen=True, array_like=True):
    """Asks for one record from that version of that generation on; version 0: I have nothing of it."""

    uid: Uid
    generation: Count
    version: Count


Claims = Annotated[tuple[Claim, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Deltas = Annotated[tuple[Delta, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Wants = Annotated[tuple[Want, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class SyncRequest(msgspec.Struct, frozen=True, array_like=True):
    """One step of a sync. The first claim is the sender's own.

    `sums` are checksums over the members by bucket; the answer names the members of those buckets that differ.
    """

    claims: Claims = ()
    sums: Annotated[tuple[Sum, ...], msgspec.Meta(max_length=BUCKETS)] = ()
    wants: Wants = ()
    deltas: Deltas = ()


class SyncAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer: `claims` hold every live member of the differing `buckets`; `more`: not all wants fitted."""

    claims: Claims = ()
    buckets: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)], ...], msgspec.Meta(max_length=BUCKETS)
    ] = ()
    wants: Wants = ()
    deltas: Deltas = ()
    more: bool = False


encode = msgspec.msgpack.Encoder().encode
_message = msgspec.msgpack.Decoder(Message).decode
_request = msgspec.msgpack.Decoder(SyncRequest).decode
_answer = msgspec.msgpack.Decoder(SyncAnswer).decode


def raw(value: msgspec.Struct) -> msgspec.Raw:
    """The value encoded, to stand inside another message."""
    return msgspec.Raw(encode(value))


def decode_message(data: bytes) -> Message | None:
    """The body of a datagram, None if it is none."""
    found = decode_or_none(_message, data)
    return found if isinstance(found, Message) else None


def decode_request(data: bytes) -> SyncRequest | None:
    """The body of a sync request, None if it is none."""
    found = decode_or_none(_request, data)
    return found if isinstance(found, SyncRequest) else None


def decode_answer(data: bytes) -> SyncAnswer | None:
    """The body of a sync answer, None if it is none."""
    found = decode_or_none(_answer, data)
    return found if isinstance(found, SyncAnswer) else None
