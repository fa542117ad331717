"""The gossip loop: drives the state machine with real time, datagrams and HTTP, and is a `Peers` to the other loops."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import structlog

from sidecar.core.gossip import Seed
from sidecar.core.keyring import Keyring
from sidecar.core.liveness import Timing
from sidecar.core.messages import Standing
from sidecar.core.namesakes import Names, heard
from sidecar.core.speaker import Call, Datagram, Out, Outcome, Speaker
from sidecar.core.wire import Drop, HttpAnswer, HttpRequest, Opened, Party
from sidecar.loops.gossip_report import problems, rows
from sidecar.model import Member, Problem, Record
from sidecar.ports import Clock, EdgeError, Observed, PeerUnreachable, Row, Store

log = structlog.get_logger()

STATE = "gossip.json"
# Last known addresses that are kept, newest first, and for how long: a healed partition must find someone.
MAX_ADDRESSES = 1024
KEEP_ADDRESSES = 7 * 86_400.0
# How often addresses are written down, and how often keys, seeds and the platform's list are looked at.
SAVE_SECONDS = 60.0
HOUSE_SECONDS = 1.0
# Datagrams that wait for this loop; more than this is a flood, and loss is what datagrams are allowed.
MAX_INBOX = 4096


class Datagrams(Protocol):
    """The edge that sends and receives datagrams."""

    async def open(self, received: Callable[[bytes, str], None]) -> None:
        """Listen. Raises EdgeError."""

    def send(self, address: str, data: bytes) -> None:
        """Send, or lose it."""

    async def close(self) -> None:
        """Stop listening."""


class SyncClient(Protocol):
    """The edge that sends sync requests."""

    async def post(self, address: str, header: str, body: bytes, timeout: float) -> Outcome:
        """What came of it. Never raises."""

    async def close(self) -> None:
        """Close its connections."""


class _Addresses(msgspec.Struct, frozen=True):
    """What is kept over a restart: address -> when an agent was alive there."""

    addresses: dict[str, float] = {}


class GossipPeers:
    """Implements the port `Peers` by gossip. Only for the event loop's thread."""

    def __init__(
        self,
        *,
        uid: str,
        generation: int,
        pool: str,
        keys: Keyring,
        datagrams: Datagrams,
        client: SyncClient,
        members: Callable[[], tuple[Member, ...] | None],
        clock: Clock,
        fresh: Callable[[], bool] = lambda: True,
        new_keys: Callable[[], Keyring | None] | None = None,
        rise: Callable[[int], None] = lambda generation: None,
        store: Store | None = None,
        wall: Callable[[], float] = time.time,
        timing: Timing | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`uid` and `generation` are this agent's own; `rise` keeps a higher generation when the pool knows one.

        `members` lists the pool as the backend does (None is unknown), `fresh` says whether what it no longer lists is
        gone; `new_keys` gives other keys when there are any, and may block.
        """
        self.speaker = Speaker(
            me=Party(uid, generation),
            pool=pool,
            keys=keys,
            timing=timing or Timing(),
            rng=rng or random.Random(),
            now=clock(),
            wall=wall(),
        )
        # When the loop came round last, on the clock given.
        self.beat = clock()
        self._pool = pool
        self._datagrams = datagrams
        self._client = client
        self._members_of = members
        self._fresh = fresh
        self._new_keys = new_keys
        self._rise = rise
        self._store = store
        self._clock = clock
        self._wall = wall
        self._own: Record | None = None
        self._generation = generation
        self._inbox: deque[tuple[bytes, str]] = deque(maxlen=MAX_INBOX)
        self._wake = asyncio.Event()
        self._changed: Callable[[], None] = lambda: None
        self._told = 0
        self._names: tuple[int, Names] | None = None
        self._known: dict[str, float] = {}
        self._listed: tuple[Member, ...] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    # The port

    @property
    def own(self) -> Record | None:
        """What `announce` was given last."""
        return self._own

    def announce(self, record: Record) -> None:
        """See Peers. The generation in it is replaced by the gossip's own, which may have risen."""
        self._own = record
        if self.speaker.gossip.announce(record, self._clock()):
            self._names = None
            self._wake.set()

    def view(self) -> Mapping[str, Observed]:
        """See Peers."""
        contact = self.speaker.gossip.contact
        return {
            name: Observed(
                record=record,
                heard=heard(member, contact),
                alive=member.standing is not Standing.DEAD,
            )
            for name, (member, record) in self._by_name().shown.items()
        }

    def unheard(self) -> frozenset[str]:
        """See Peers."""
        gossip = self.speaker.gossip
        here = {member.address for member in gossip.members.by_uid.values()} | {gossip.membership.me.address}
        me = gossip.me.uid
        missing: set[str] = set()
        for member in self._members_of() or ():
            uid = member.uid or gossip.found_at.get(member.address, "")
            if uid == me or uid in gossip.members.by_uid or (not member.uid and member.address in here):
                continue
            missing.add(member.name or member.address)
        return frozenset(missing)

    async def ask(self, name: str) -> Record:
        """See Peers."""
        shown = self._by_name().shown.get(name)
        call = self.speaker.ask(shown[0].uid, self._wall()) if shown else None
        if shown is None or call is None:
            raise PeerUnreachable(f"no worker of pool {self._pool!r} is known as {name!r}")
        if not await self._converse(call):
            raise PeerUnreachable(f"{name} at {call.address} gave no answer within {call.timeout:.0f} s")
        record = shown[0].replica.record()
        assert record is not None, "a shown member has a record, and copies never lose theirs"
        return record

    async def run(self, changed: Callable[[], None]) -> None:
        """See Peers. Raises EdgeError when the port can't be opened."""
        self._changed = changed
        await self._remember_addresses()
        await self._datagrams.open(self._received)
        self._follow_members()
        house = asyncio.create_task(self._keep_house(), name="gossip-house")
        try:
            while not house.done():
                self._step()
                await self._rest()
            house.result()
        finally:
            house.cancel()
            for call in self._calls:
                call.cancel()
            await asyncio.gather(house, *self._calls, return_exceptions=True)
            await self._datagrams.close()
            await self._client.close()

    # What the HTTP server asks

    def admit(self, header: str, request: HttpRequest) -> Opened | Outcome:
        """Check a request of a peer before its body is read: who sent it, or the answer that refuses it."""
        found = self.speaker.admit(header, request, self._clock(), self._wall())
        self._after()
        return found

    def answer(self, opened: Opened, body: bytes) -> Outcome:
        """The signed answer to an admitted sync request."""
        outcome = self.speaker.request(opened, body, self._clock(), self._wall())
        self._after()
        return outcome

    def sign_answer(self, opened: Opened, answer: HttpAnswer, digest: bytes) -> str:
        """The authentication header of the answer to an admitted request; see wire.Gate."""
        return self.speaker.gate.sign_answer(opened, answer, digest, self._wall())

    # What transfers of files ask

    def sign_request(self, uid: str, request: HttpRequest) -> tuple[str, int]:
        """The authentication header of a request without a body to that agent, and its nonce."""
        return self.speaker.gate.sign_request(Party(uid), request, b"", self._wall())

    def check_answer(self, uid: str, header: str, nonce: int, answer: HttpAnswer) -> Opened | None:
        """The answer if it is authentic and that agent's. May be called on any thread."""
        opened = self.speaker.gate.check_answer(header, nonce, answer, self._wall())
        return opened if isinstance(opened, Opened) and opened.sender.uid == uid else None

    # What people ask

    def namesake(self) -> Record | None:
        """A live agent that had this worker's name before it: this worker then holds no targets."""
        return self._by_name().namesake

    def problems(self) -> tuple[Problem, ...]:
        """Names used twice, clocks that are off, and peers that only HTTP reaches."""
        return problems(self.speaker, self._by_name())

    def rows(self) -> Mapping[str, Row]:
        """By worker name, what gossip knows beyond the record: state, since, incarnation, udp, and clockSkew if off."""
        return rows(self.speaker, self._by_name())

    def dropped(self) -> Mapping[Drop, int]:
        """Messages dropped since the start, by reason."""
        return self.speaker.gate.dropped

    # The loop

    def _step(self) -> None:
        """Take what has arrived, then do what is due."""
        now = self.beat = self._clock()
        for _ in range(len(self._inbox)):
            data, source = self._inbox.popleft()
            self._carry_out(self.speaker.datagram(data, source, now, self._wall()))
        self._carry_out(self.speaker.tick(self._clock(), self._wall()))
        self._after()

    async def _rest(self) -> None:
        self._wake.clear()
        now = self._clock()
        seconds = self.speaker.gossip.due(now) - now
        if self._inbox or seconds <= 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _received(self, data: bytes, source: str) -> None:
        self._inbox.append((data, source))
        self._wake.set()

    def _carry_out(self, outs: list[Out]) -> None:
        for out in outs:
            if isinstance(out, Datagram):
                self._datagrams.send(out.address, out.data)
            else:
                task = asyncio.get_running_loop().create_task(self._call(out))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)

    async def _call(self, call: Call) -> None:
        await self._converse(call)

    async def _converse(self, call: Call) -> bool:
        """Hold a conversation to its end; False if the first request got no answer that counts."""
        following: Call | None = call
        answered = False
        while following is not None:
            before = following.talk.steps
            try:
                outcome = await self._client.post(
                    following.address, following.header, following.body, following.timeout
                )
            except asyncio.CancelledError:
                self.speaker.gossip.unanswered(call.talk, self._clock())
                raise
            following = self.speaker.outcome(following, outcome, self._clock(), self._wall())
            if call.talk.steps > before:
                answered = True
            self._after()
            self._wake.set()
        return answered

    def _after(self) -> None:
        """Tell whoever waits for changes, and keep a generation that has risen."""
        gossip = self.speaker.gossip
        if gossip.me.generation != self._generation:
            self._generation = gossip.me.generation
            log.warning("generation_risen", generation=self._generation, reason="the pool knew a later one")
            self._rise(self._generation)
        if gossip.members.revision != self._told:
            self._told = gossip.members.revision
            self._changed()

    def _by_name(self) -> Names:
        revision = self.speaker.gossip.members.revision
        if self._names is None or self._names[0] != revision:
            self._names = (revision, Names(self.speaker.gossip.members))
        return self._names[1]

    # Addresses and keys

    async def _keep_house(self) -> None:
        saved_at = self._clock()
        while True:
            await asyncio.sleep(HOUSE_SECONDS)
            self._follow_members()
            now = self._clock()
            keys = await asyncio.to_thread(self._new_keys) if self._new_keys else None
            if keys is not None:
                self.speaker.gate.keys = keys
            if now - saved_at >= SAVE_SECONDS:
                saved_at = now
                await self.save_addresses()

    def _follow_members(self) -> None:
        """Whom the backend lists, and where agents were last."""
        members = self._members_of()
        gossip = self.speaker.gossip
        listed = members or ()
        platform = any(member.uid for member in listed)
        gossip.seeds = tuple(Seed(member.address, member.uid) for member in listed)
        # Where the platform knows everyone, old addresses are other people's.
        gossip.known = () if platform and self._fresh() else tuple(self._known)
        if platform and self._fresh() and members is not self._listed:
            self._listed = members
            gossip.membership.set_listed(member.uid for member in listed if member.uid)
            self._after()

    def _note_addresses(self) -> None:
        now = self._clock()
        gossip = self.speaker.gossip
        for uid, member in gossip.members.by_uid.items():
            if member.address and uid not in gossip.members.dead:
                self._known[member.address] = now
        kept = sorted(self._known.items(), key=lambda item: -item[1])[:MAX_ADDRESSES]
        self._known = {address: at for address, at in kept if now - at < KEEP_ADDRESSES}

    async def save_addresses(self) -> None:
        self._note_addresses()
        store = self._store
        if store is None:
            return
        data = msgspec.json.encode(_Addresses(dict(self._known)))
        try:
            await asyncio.to_thread(store.save, STATE, data)
        except EdgeError as error:
            log.warning("gossip_addresses_not_saved", reason=str(error))

    async def _remember_addresses(self) -> None:
        store = self._store
        data = await asyncio.to_thread(store.read, STATE) if store is not None else None
        if data:
            with contextlib.suppress(msgspec.MsgspecError):
                self._known |= msgspec.json.decode(data, type=_Addresses).addresses
