"""The peer view without gossip: ask each listed address for its own record, `GET /v1/record`.

Every second with few peers, every five beyond, each peer at a phase of its own, so that a pool's questions spread over
the interval. An unchanged record costs a 304. Asking is the failure detector, so it goes on at the same pace whatever a
peer answers; a change from answering to silent or back is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import aiohttp
import msgspec
import structlog

from sidecar.edges.bare_question import still_the_same
from sidecar.edges.peerbook import NotBelieved, PeerBook
from sidecar.model import Frozen, Member, Problem, Record
from sidecar.ports import Clock, Observed, PeerUnreachable

log = structlog.get_logger()

# A worker with 1,000 adapters and a message for each is at about 0.5 MiB.
MAX_RECORD_BYTES = 8 * 1024 * 1024
# Sockets at once: with every second of 1,000 peers hung, 100 questions are under way.
MAX_CONNECTIONS = 256
# A hung peer's socket isn't kept, and beyond few peers none is: a thousand idle sockets cost more than new ones.
KEEPALIVE_SECONDS = 3.0
# First questions a second, when many peers appear at once.
FIRST_PER_SECOND = 500.0
_SHOWN = 5

_decoder = msgspec.json.Decoder(Record)


class Timing(Frozen, frozen=True, kw_only=True):
    """How often peers are asked, in seconds. `few` peers or less are asked at the near pace."""

    few: int = 20
    near_interval: float = 1.0
    far_interval: float = 5.0
    near_window: float = 3.0
    far_window: float = 15.0
    # So short that within the window two questions may get lost.
    near_timeout: float = 1.0
    far_timeout: float = 2.0
    # How often the backend's list is looked at, and the longest sleep.
    tick: float = 0.5
    # How long a silent peer's last record is kept without a platform that says whether it is gone.
    keep: float = 600.0


class _Wrong(PeerUnreachable):
    """The peer answered, but not with a record of this pool's member."""


class _Slot(msgspec.Struct, eq=False):
    """One address to ask."""

    member: Member
    due: float
    # The ETag of the record held of `uid`, which answered here last.
    etag: str = ""
    uid: str = ""
    own: bool = False
    asking: bool = False
    answered: bool = False
    # A record of a member, or of this agent itself, has come from here.
    heard: bool = False
    error: PeerUnreachable | None = None


class Asking(Protocol):
    """How an agent is asked for its record."""

    def opened(self) -> AbstractAsyncContextManager[object]:
        """`get` works as long as this is entered."""

    async def get(self, address: str, etag: str, timeout: float) -> tuple[bytes | None, str]:
        """Body (None: unchanged since `etag`) and ETag of /v1/record at host:port, within `timeout` seconds.

        Raises PeerUnreachable.
        """


class PolledPeers:
    """Implements the port `Peers` by asking the backend's members, and only them."""

    def __init__(
        self,
        *,
        pool: str,
        uid: str,
        members: Callable[[], tuple[Member, ...] | None],
        clock: Clock,
        rng: random.Random | None = None,
        timing: Timing | None = None,
        asking: Asking | None = None,
    ) -> None:
        """`uid` is this agent's own; `members` is cheap; None means unknown, and the last list then counts."""
        self._pool = pool
        self._uid = uid
        self._members = members
        self._clock = clock
        self._rng = rng or random.Random()
        self._timing = timing or Timing()
        self._book = PeerBook(pool=pool, uid=uid, window=self._timing.near_window, keep=self._timing.keep)
        self._slots: dict[tuple[str, str], _Slot] = {}
        self._listed: tuple[Member, ...] | None = None
        self._few = True
        self._own: Record | None = None
        self._asking = asking or _HttpAsking(lambda: not self._few)
        self._first_heard = False
        self._wake = asyncio.Event()
        self._wake_at = 0.0

    @property
    def own(self) -> Record | None:
        """What `announce` was given last: the answer to others' /v1/record."""
        return self._own

    def announce(self, record: Record) -> None:
        """See Peers. Nothing is sent; the server answers with it."""
        self._own = record
        self._book.set_own(record)

    def view(self) -> Mapping[str, Observed]:
        """See Peers. Keyed by the name in each record."""
        return self._book.view(self._clock())

    def unheard(self) -> frozenset[str]:
        """See Peers. When one is heard at last, `changed` is called, for this agent itself too."""
        self._sync(self._clock())
        return frozenset(slot.member.name for slot in self._slots.values() if not slot.heard)

    def namesake(self) -> Record | None:
        """The live agent that had this worker's name first, if there is one: this worker then holds no targets."""
        return self._book.namesake(self._clock())

    def problems(self) -> tuple[Problem, ...]:
        """Names used twice, members that answer as someone else, and members that don't answer."""
        wrong = [slot for slot in self._slots.values() if isinstance(slot.error, _Wrong)]
        silent = [slot for slot in self._slots.values() if slot.error and not isinstance(slot.error, _Wrong)]
        found = list(self._book.problems(self._clock()))
        found += [Problem(where=f"peer {slot.member.address}", message=str(slot.error)) for slot in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            found.append(Problem(where="peers", message=f"{len(wrong) - _SHOWN} more listed addresses answer wrongly"))
        if silent:
            shown = "; ".join(str(slot.error) for slot in silent[:_SHOWN])
            more = f"; and {len(silent) - _SHOWN} more" if len(silent) > _SHOWN else ""
            found.append(
                Problem(where="peers", message=f"{len(silent)} of {len(self._slots)} don't answer: {shown}{more}")
            )
        return tuple(found)

    async def ask(self, name: str) -> Record:
        """See Peers. The question is a new one, sent after this call."""
        self._sync(self._clock())
        slot = self._slot_of(name)
        if slot is None:
            raise PeerUnreachable(f"no member of the pool is called {name!r}")
        await self._ask(slot)
        record = self._book.record_of(slot.uid)
        if record is None or record.head.name != name:
            raise _Wrong(f"{slot.member.address} answers as {record.head.name if record else 'nobody'!r}, not {name!r}")
        return record

    async def run(self, changed: Callable[[], None]) -> None:
        """See Peers."""
        async with self._asking.opened(), asyncio.TaskGroup() as group:
            while True:
                now = self._clock()
                self._sync(now)
                self._tell(changed, now)
                for slot in self._slots.values():
                    if not slot.asking and slot.due <= now:
                        slot.asking = True
                        group.create_task(self._poll(slot, changed))
                await self._rest(self._pause(now))

    async def _rest(self, seconds: float) -> None:
        self._wake.clear()
        self._wake_at = self._clock() + seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _slot_of(self, name: str) -> _Slot | None:
        observed = self._book.view(self._clock()).get(name)
        uid = observed.record.head.uid if observed else ""
        held = (slot for slot in self._slots.values() if uid and slot.uid == uid)
        listed = (slot for slot in self._slots.values() if slot.member.name == name)
        return next(held, None) or next(listed, None)

    def _sync(self, now: float) -> None:
        """Follow the backend's list."""
        members = self._members()
        if members is None or members is self._listed:
            return
        self._listed = members
        wanted: dict[tuple[str, str], Member] = {}
        uids: set[str] = set()
        for member in members:
            if member.uid and (member.uid == self._uid or member.uid in uids):
                continue  # a pod stands in several slices, one for each address family for example
            uids.add(member.uid)
            wanted[member.address, member.uid] = member
        fresh = sum(key not in self._slots for key in wanted)
        spread = 0.0 if fresh <= self._timing.few else fresh / FIRST_PER_SECOND
        slots: dict[tuple[str, str], _Slot] = {}
        for key, member in wanted.items():
            slots[key] = self._slots.get(key) or _Slot(member=member, due=now + self._rng.uniform(0.0, spread))
            slots[key].member = member
        self._slots = slots
        self._pace(now)
        window = self._timing.near_window if self._few else self._timing.far_window
        self._book.set_members(wanted.values(), window, now)

    def _pace(self, now: float) -> None:
        was_few = self._few
        self._few = sum(not slot.own for slot in self._slots.values()) <= self._timing.few
        if self._few and not was_few:
            for slot in self._slots.values():
                slot.due = min(slot.due, now + self._rng.uniform(0, self._timing.near_interval))

    def _pause(self, now: float) -> float:
        """Seconds until something is due. Many peers are taken in batches: a wake-up for each would cost too much."""
        due = min((slot.due for slot in self._slots.values() if not slot.asking), default=now + self._timing.tick)
        least = 0.002 if self._few else 0.05
        return max(least, min(due - now, self._book.until - now, self._timing.tick))

    async def _poll(self, slot: _Slot, changed: Callable[[], None]) -> None:
        started = self._clock()
        first = not slot.answered and slot.error is None
        try:
            await self._ask(slot)
        except PeerUnreachable:
            pass  # noted and logged where it was raised
        finally:
            slot.asking = False
            interval = self._timing.near_interval if self._few else self._timing.far_interval
            # The second question falls anywhere in the interval, the others keep that phase but for some jitter.
            share = self._rng.uniform(0.0, 1.0) if first else self._rng.uniform(0.9, 1.1)
            slot.due = max(started + interval * share, self._clock())
            if slot.due < self._wake_at:
                self._wake.set()
        self._tell(changed, self._clock())

    def _tell(self, changed: Callable[[], None], now: float) -> None:
        news, self._first_heard = self._first_heard, False
        if self._book.changed(now) or news:
            changed()

    async def _ask(self, slot: _Slot) -> None:
        try:
            await self._question(slot)
        except PeerUnreachable as error:
            if slot.error is None or type(slot.error) is not type(error):
                log.warning("peer_unreachable", address=slot.member.address, name=slot.member.name, reason=str(error))
            slot.error = error
            raise
        if slot.error is not None:
            log.info("peer_reachable", address=slot.member.address, name=slot.member.name)
        slot.error, slot.answered = None, True

    async def _question(self, slot: _Slot) -> None:
        """One request; the book then knows its answer. Raises PeerUnreachable."""
        address, uid, started = slot.member.address, slot.uid, self._clock()
        limit = self._timing.near_timeout if self._few else self._timing.far_timeout
        body, etag = await self._asking.get(address, slot.etag if self._book.knows(uid) else "", limit)
        now = self._clock()
        if body is None:
            if slot.uid != uid or not self._book.knows(uid):
                raise PeerUnreachable(f"{address} changed hands while it was asked")
            self._book.hear_again(uid, now)
            return
        try:
            record = _decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _Wrong(f"{address} gives a wrong record: {str(error)[:200]}") from error
        try:
            own = self._book.is_own(record)
            held = not own and self._book.hear(slot.member, record, started, now)
        except NotBelieved as error:
            slot.etag = slot.uid = ""
            raise _Wrong(f"the agent at {address} {error}") from error
        if own != slot.own:
            slot.own, self._listed = own, None  # one peer more or less: the pace may change
        if not slot.heard:
            slot.heard = self._first_heard = True
        slot.uid, slot.etag = ("", "") if own else (record.head.uid, etag if held else "")


class _HttpAsking:
    """Asks over HTTP, as everybody but a simulation does."""

    def __init__(self, seldom: Callable[[], bool]) -> None:
        """`seldom`: peers are asked so seldom that no connection is kept between two questions."""
        self._session: aiohttp.ClientSession | None = None
        self._seldom = seldom

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_SECONDS)
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "Accept": "application/json", "User-Agent": "lora-sidecar"},
        )
        async with session:
            self._session = session
            try:
                yield
            finally:
                self._session = None

    async def get(self, address: str, etag: str, timeout: float) -> tuple[bytes | None, str]:
        session = self._session
        if session is None:
            raise PeerUnreachable(f"{address} can't be asked: this agent isn't running")
        began = asyncio.get_running_loop().time()
        try:
            if etag and self._seldom():
                async with asyncio.timeout(timeout):
                    if await still_the_same(address, etag):
                        return None, etag
            left = began + timeout - asyncio.get_running_loop().time()
            async with session.get(
                f"http://{address}/v1/record",
                headers={"If-None-Match": etag} if etag else None,
                timeout=aiohttp.ClientTimeout(total=max(left, 0.001)),
                allow_redirects=False,
                auto_decompress=False,
            ) as answer:
                if answer.status == 304 and etag:
                    return None, etag
                if answer.status != 200:
                    raise _Wrong(f"{address} answers HTTP {answer.status} to GET /v1/record, not with a record")
                return await _bounded(answer, address), answer.headers.get("ETag", "")
        except TimeoutError as error:
            raise PeerUnreachable(f"{address} doesn't answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PeerUnreachable(f"{address} can't be reached: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """`connection refused` rather than a library's account of it."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


async def _bounded(answer: aiohttp.ClientResponse, address: str) -> bytes:
    parts: list[bytes] = []
    size = answer.content_length or 0
    if size <= MAX_RECORD_BYTES:
        size = 0
        async for part in answer.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > MAX_RECORD_BYTES:
                break
    if size > MAX_RECORD_BYTES:
        answer.close()
        raise _Wrong(f"{address} gives a record larger than {MAX_RECORD_BYTES} bytes")
    return b"".join(parts)
