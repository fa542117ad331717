"""Authenticated messages between agents: bytes in, a message or the reason for dropping it out, never an exception.

One frame for datagrams and for HTTP:

    "LG" | wire version | kind | key id (4) | length of what follows the MAC (2) | MAC (16) | envelope

The envelope is MessagePack: pool, sender and addressee (UID, generation), time, nonce, and a datagram's body. The MAC
is HMAC-SHA256, cut to 16 bytes, over everything before and after it; for HTTP also over method, path, query and Range,
which travel outside the frame (the frame itself is a header, with the body's hash in the place of a body, so that a
stranger's body is never read). An answer carries the nonce of its request. A nonce is a sender's counter: a receiver
needs only a sliding window for each sender to drop replays, and no clock. A restarted receiver has another generation,
so what was addressed to the old one is dropped too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from collections import Counter
from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec

from sidecar.core.keyring import Key, Keyring
from sidecar.model import Frozen

WIRE_VERSION = 1
# Fits every path without fragments: 1,280 bytes is the least IPv6 MTU.
MAX_DATAGRAM = 1200
# Two UIDs stand in every datagram; a pod's has 36 characters.
MAX_UID = 64
# Seconds that a message's time may be off the receiver's wall clock.
CLOCK_WINDOW = 300.0
# Messages that a sender may have under way at once: uploads and file transfers overtake each other.
REPLAY_WINDOW = 2048
MAX_SENDERS = 20_000
MAX_GENERATION = 2**53
MAX_NONCE = 2**62

AUTH_HEADER = "X-Lora-Sidecar-Auth"
MAX_AUTH_HEADER = 1024

Uid = Annotated[str, msgspec.Meta(max_length=MAX_UID)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_GENERATION)]

_MAGIC = b"LG"
_HEAD = struct.Struct(">2sBB4sH")
_MAC_SIZE = 16
_FIXED = _HEAD.size + _MAC_SIZE


class Kind(IntEnum):
    """What a frame is for."""

    PING = 1
    ACK = 2
    PING_REQ = 3
    NACK = 4
    GOSSIP = 5
    REQUEST = 16
    ANSWER = 17


DATAGRAMS = frozenset({Kind.PING, Kind.ACK, Kind.PING_REQ, Kind.NACK, Kind.GOSSIP})
_KINDS = frozenset(int(kind) for kind in Kind)


class Drop(StrEnum):
    """Why a message was dropped; counted, and shown to people."""

    STRANGER = "stranger"  # not our protocol, or a key that we don't have
    VERSION = "version"  # another version of the frame
    TRUNCATED = "truncated"
    OVERSIZED = "oversized"
    ALTERED = "altered"  # our key, but not what was signed
    MALFORMED = "malformed"  # authentic, but not to be understood
    WRONG_POOL = "wrong pool"
    WRONG_ADDRESSEE = "wrong addressee"
    SELF = "self"  # this agent's own UID as the sender: reflected, or a twin
    REPLAY = "replay"
    STALE = "stale"  # from an earlier process of its sender, or from one that must rise above that
    CLOCK = "clock"  # further off than the window


class Party(Frozen, frozen=True):
    """One process of one agent. As an addressee over HTTP, "" is anyone and generation 0 any process."""

    uid: str
    generation: int = 0


class HttpRequest(Frozen, frozen=True, kw_only=True):
    """What the MAC of a request covers beside the envelope. `range` is the header's text, "" without one."""

    method: str
    path: str
    query: str = ""
    range: str = ""


class HttpAnswer(Frozen, frozen=True, kw_only=True):
    """What the MAC of an answer covers beside the envelope; `fields` are the header values that its reader needs."""

    status: int
    fields: tuple[str, ...] = ()


UNCOVERED = b""
"""Stands for the hash of a body whose reader has its hash from elsewhere: files are sent without being read here."""


def body_hash(body: bytes) -> bytes:
    """What a signed request or answer says about its body."""
    return hashlib.sha256(body).digest()


class Opened(Frozen, frozen=True):
    """An authentic message: who sent it, when (its own wall clock), and a datagram's body, or the hash of HTTP's."""

    kind: Kind
    sender: Party
    nonce: int
    time: float
    body: bytes


class Dropped(Frozen, frozen=True):
    """A message that doesn't count. The rest is known for an authentic one; `skew` in seconds, ahead is positive."""

    reason: Drop
    sender: Party | None = None
    skew: float = 0.0
    nonce: int = 0


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    pool: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    sender: Uid
    generation: Count
    to: Uid
    to_generation: Count
    time: float
    nonce: Annotated[int, msgspec.Meta(ge=0, le=MAX_NONCE)]
    body: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Envelope).decode


def decode_or_none(decode: Callable[[bytes], object], data: bytes) -> object | None:
    """`decode(data)`, None if it can't be decoded: every way in which a decoder refuses hostile bytes."""
    try:
        return decode(data)
    except (ValueError, RecursionError, OverflowError):
        return None


def _mac(key: Key, head: bytes, envelope: bytes, covered: bytes) -> bytes:
    return hmac.digest(key.secret, head + envelope + covered, "sha256")[:_MAC_SIZE]


def _framed(*parts: bytes) -> bytes:
    """The parts with their lengths, so that no two different lists give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _covered_request(request: HttpRequest) -> bytes:
    texts = (request.method, request.path, request.query, request.range)
    return _framed(b"request", *(text.encode("utf-8", "surrogateescape") for text in texts))


def _covered_answer(answer: HttpAnswer) -> bytes:
    fields = (field.encode("utf-8", "surrogateescape") for field in answer.fields)
    return _framed(b"answer", str(answer.status).encode(), *fields)


class _Window:
    """Which nonces of one sender have been seen: the highest, and a bit for each of those just below it."""

    __slots__ = ("bits", "generation", "top")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.top = -1
        self.bits = 0

    def take(self, nonce: int) -> bool:
        """True once for each nonce, never for one that has fallen out of the window."""
        if nonce > self.top:
            shift = nonce - self.top
            self.bits = 1 if shift >= REPLAY_WINDOW else (self.bits << shift | 1) & ((1 << REPLAY_WINDOW) - 1)
            self.top = nonce
            return True
        bit = 1 << (self.top - nonce) if self.top - nonce < REPLAY_WINDOW else 0
        if not bit or self.bits & bit:
            return False
        self.bits |= bit
        return True


class Gate:
    """Signs what goes out and checks what comes in, for one agent.

    `wall` arguments are seconds since the epoch on the wall clock: a machine whose clock is put right must be let in
    again, so the clock that never jumps won't do.
    """

    def __init__(self, me: Party, pool: str, keys: Keyring, first_nonce: int) -> None:
        """`first_nonce` must lie above every nonce of an earlier process of the same UID and generation.

        Raises:
            ValueError: a UID that is empty or too long for the wire.
        """
        if not 0 < len(me.uid) <= MAX_UID:
            raise ValueError(f"a worker's UID needs 1 to {MAX_UID} characters, got {len(me.uid)}: {me.uid!r}")
        self.me = me
        self.keys = keys
        self.dropped: Counter[Drop] = Counter()
        self._pool = hashlib.sha256(b"lora-sidecar pool\0" + pool.encode()).digest()[:8]
        self._nonce = first_nonce
        self._windows: dict[str, _Window] = {}

    def room(self, to: str) -> int:
        """Bytes that the body of a datagram to that UID may have."""
        empty = self._envelope(Party(to, MAX_GENERATION), 0.0, MAX_NONCE, b"")
        return MAX_DATAGRAM - _FIXED - len(_encode(empty)) - 1  # a longer body needs one more byte for its length

    def seal(self, kind: Kind, to: Party, body: bytes, wall: float) -> bytes:
        """A datagram. A body longer than `room` makes one that receivers drop as oversized."""
        return self._frame(kind, to, wall, self._next(), body, b"")

    def open(self, data: bytes, wall: float) -> Opened | Dropped:
        """Check a received datagram; a drop is counted."""
        if len(data) > MAX_DATAGRAM:
            return self._drop(Dropped(Drop.OVERSIZED))
        found = self._unframe(data, b"", wall)
        if isinstance(found, Opened) and found.kind not in DATAGRAMS:
            found = Dropped(Drop.MALFORMED, found.sender)
        return self._judge(found)

    def sign_request(self, to: Party, request: HttpRequest, body: bytes, wall: float) -> tuple[str, int]:
        """The authentication header of a request with that body, and the nonce that its answer will carry."""
        nonce = self._next()
        frame = self._frame(Kind.REQUEST, to, wall, nonce, body_hash(body), _covered_request(request))
        return base64.urlsafe_b64encode(frame).decode(), nonce

    def check_request(self, header: str, request: HttpRequest, wall: float) -> Opened | Dropped:
        """Check a received request by its authentication header; a drop is counted. The body is yet to be `proved`."""
        found = self._unframe(_header(header), _covered_request(request), wall)
        if isinstance(found, Opened) and found.kind is not Kind.REQUEST:
            found = Dropped(Drop.MALFORMED, found.sender)
        return self._judge(found)

    def sign_answer(self, request: Opened | Dropped, answer: HttpAnswer, digest: bytes, wall: float) -> str:
        """The authentication header of the answer; `digest` is the `body_hash` of its body, or UNCOVERED."""
        frame = self._frame(
            Kind.ANSWER, request.sender or Party(""), wall, request.nonce, digest, _covered_answer(answer)
        )
        return base64.urlsafe_b64encode(frame).decode()

    def check_answer(self, header: str, nonce: int, answer: HttpAnswer, wall: float) -> Opened | Dropped:
        """Check an answer to the request that had `nonce`; a drop is counted. The caller judges sender and body."""
        found = self._unframe(_header(header), _covered_answer(answer), wall)
        if isinstance(found, Opened) and found.kind is not Kind.ANSWER:
            found = Dropped(Drop.MALFORMED, found.sender)
        elif isinstance(found, Opened) and found.nonce != nonce:
            found = Dropped(Drop.REPLAY, found.sender)
        return self._drop(found) if isinstance(found, Dropped) else found

    def proved(self, opened: Opened, body: bytes) -> bool:
        """Whether this is the body that was signed; another one is counted as altered."""
        if hmac.compare_digest(opened.body, body_hash(body)):
            return True
        self.dropped[Drop.ALTERED] += 1
        return False

    def forget(self, uid: str) -> None:
        """Drop what is remembered of a sender that is gone for good."""
        self._windows.pop(uid, None)

    def _next(self) -> int:
        self._nonce += 1
        return self._nonce

    def _envelope(self, to: Party, wall: float, nonce: int, body: bytes) -> _Envelope:
        return _Envelope(self._pool, self.me.uid, self.me.generation, to.uid, to.generation, wall, nonce, body)

    def _frame(self, kind: Kind, to: Party, wall: float, nonce: int, body: bytes, covered: bytes) -> bytes:
        envelope = _encode(self._envelope(to, wall, nonce, body))
        key = self.keys.keys[0]
        head = _HEAD.pack(_MAGIC, WIRE_VERSION, kind, key.id, min(len(envelope), 0xFFFF))
        return head + _mac(key, head, envelope, covered) + envelope

    def _unframe(self, frame: bytes, covered: bytes, wall: float) -> Opened | Dropped:
        """The frame if it is authentic, for this pool, for this agent, and of this time."""
        checked = self._authentic(frame, covered)
        if isinstance(checked, Drop):
            return Dropped(checked)
        kind, envelope = checked
        sender = Party(envelope.sender, envelope.generation)
        reason = self._misdirected(kind, envelope)
        skew = envelope.time - wall
        if reason is None and not abs(skew) <= CLOCK_WINDOW:
            reason = Drop.CLOCK
        if reason is not None:
            return Dropped(reason, sender, skew if reason is Drop.CLOCK else 0.0)
        return Opened(kind, sender, envelope.nonce, envelope.time, envelope.body)

    def _authentic(self, frame: bytes, covered: bytes) -> tuple[Kind, _Envelope] | Drop:
        if frame[:2] != _MAGIC[: len(frame)] or not frame:
            return Drop.STRANGER
        if len(frame) < _FIXED:
            return Drop.TRUNCATED
        _, version, kind, key_id, length = _HEAD.unpack_from(frame)
        if version != WIRE_VERSION:
            return Drop.VERSION
        if len(frame) != _FIXED + length:
            return Drop.TRUNCATED if len(frame) < _FIXED + length else Drop.ALTERED
        key = self.keys.find(key_id)
        if key is None:
            return Drop.STRANGER
        head, mac, body = frame[: _HEAD.size], frame[_HEAD.size : _FIXED], frame[_FIXED:]
        if not hmac.compare_digest(mac, _mac(key, head, body, covered)):
            return Drop.ALTERED
        envelope = decode_or_none(_decode, body)
        if not isinstance(envelope, _Envelope) or kind not in _KINDS:
            return Drop.MALFORMED
        return Kind(kind), envelope

    def _misdirected(self, kind: Kind, envelope: _Envelope) -> Drop | None:
        if envelope.pool != self._pool:
            return Drop.WRONG_POOL
        if envelope.sender == self.me.uid:
            return Drop.SELF
        if kind is Kind.REQUEST:
            right = envelope.to in ("", self.me.uid) and envelope.to_generation in (0, self.me.generation)
        else:
            right = (envelope.to, envelope.to_generation) == (self.me.uid, self.me.generation)
        return None if right else Drop.WRONG_ADDRESSEE

    def _judge(self, found: Opened | Dropped) -> Opened | Dropped:
        """Count a drop, and take the nonce of what is not one."""
        reason = self._spent(found.sender, found.nonce) if isinstance(found, Opened) else None
        if isinstance(found, Opened) and reason is not None:
            found = Dropped(reason, found.sender, 0.0, found.nonce)
        return self._drop(found) if isinstance(found, Dropped) else found

    def _spent(self, sender: Party, nonce: int) -> Drop | None:
        """None once. A new process of the sender begins anew; what an old one sent is stale for ever."""
        window = self._windows.pop(sender.uid, None)
        if window is None and len(self._windows) >= MAX_SENDERS:
            del self._windows[next(iter(self._windows))]  # the one not heard for longest
        if window is None or sender.generation > window.generation:
            window = _Window(sender.generation)
        self._windows[sender.uid] = window
        if sender.generation != window.generation:
            return Drop.STALE
        return None if window.take(nonce) else Drop.REPLAY

    def _drop(self, dropped: Dropped) -> Dropped:
        self.dropped[dropped.reason] += 1
        return dropped


def _header(text: str) -> bytes:
    """The frame in a header, b"" (a stranger's) if there is none."""
    if len(text) > MAX_AUTH_HEADER:
        return b""
    try:
        return base64.urlsafe_b64decode(text.encode("ascii"))
    except (binascii.Error, ValueError):
        return b""
