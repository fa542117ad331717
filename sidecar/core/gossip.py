"""Gossip as a state machine: time, randomness and messages go in, messages to send and conversations to hold come out.

The caller brings `now` (seconds on a clock that never jumps), calls `tick` when `due` says so, hands in what arrives,
and carries out the effects. Nothing here knows how messages are authenticated or sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from sidecar.core.antientropy import Conversation, Sync
from sidecar.core.liveness import Rng, Timing
from sidecar.core.members import Members
from sidecar.core.membership import Membership
from sidecar.core.messages import Claim, Message, PackedMessage, Standing, SyncAnswer, SyncRequest, Target, encode, raw
from sidecar.core.probing import Prober
from sidecar.core.wire import Kind, Party
from sidecar.model import Frozen, Record

# Of a datagram's room; the rest is for records.
_CLAIMS_SHARE = 3
_MAX_TALKS = 4
_MAX_PULL = 500
_PULL_TRIES = 5


class Send(Frozen, frozen=True):
    """Send one datagram."""

    to: Party
    address: str
    kind: Kind
    body: bytes


class Talk(Frozen, frozen=True):
    """Hold a conversation over HTTP: send `request`, hand the answer to `answered`, or call `unanswered`."""

    talk: Conversation
    request: SyncRequest
    timeout: float


class Seed(Frozen, frozen=True):
    """An address where an agent of the pool may be; with a UID, only that agent will do."""

    address: str
    uid: str = ""


Effect = Send | Talk


class Gossip:
    """One agent's part in the gossip of its pool."""

    def __init__(
        self, uid: str, generation: int, timing: Timing, rng: Rng, now: float, room: Callable[[str], int]
    ) -> None:
        """`room(uid)` is how many bytes the body of a datagram to that UID may have."""
        self.membership = Membership(uid, generation, timing, rng, now)
        self.sync = Sync(self.membership)
        self.prober = Prober(self.membership, now)
        self.seeds: tuple[Seed, ...] = ()
        # Addresses where agents of the pool were in earlier times.
        self.known: tuple[str, ...] = ()
        # When an authentic message came last, from anyone.
        self.contact = now
        # Who answered at an address that isn't how the agent there calls itself; this agent too may be found there.
        self.found_at: dict[str, str] = {}
        self._timing = timing
        self._rng = rng
        self._room = room
        self._talks: list[Conversation] = []
        self._next_news = now
        # Doubled after a sync that found all equal, halved after one that didn't.
        self._sync_interval = timing.sync_fast
        self._next_sync = now + self._jittered(timing.sync_fast)
        self._next_join = now
        self._next_pull = now
        self._planned = now

    @property
    def members(self) -> Members:
        """What is believed of the pool."""
        return self.membership.members

    @property
    def me(self) -> Party:
        """Who this agent is now: its generation rises when someone knows a later one."""
        return self.membership.me.party

    def announce(self, record: Record, now: float) -> bool:
        """Say this of oneself from now on; True if it is news. `tick` has something to do then."""
        return self.membership.announce(record)

    def due(self, now: float) -> float:
        """When `tick` must be called next, at the latest. Being called later than that counts as having slept."""
        due = [self.prober.due(), self._next_sync, self._next_join]
        if self._news():
            due.append(self._next_news)
        if self.membership.behind and len(self._talks) < _MAX_TALKS:
            due.append(max(self._next_pull, min(behind.due for behind in self.membership.behind.values())))
        for uid in self.members.suspects:
            doubt = self.members.by_uid[uid].doubt
            if doubt is not None:
                due.append(doubt.deadline)
        if self.prober.relays:
            due.append(next(iter(self.prober.relays.values())).due)
        self._planned = max(now, min(due))
        return self._planned

    def tick(self, now: float) -> list[Effect]:
        """Do what is due."""
        self._wake(now)
        self.membership.expire(now)
        effects: list[Effect] = [*self._nacks(now), *self._probe(now)]
        effects += self._pull(now)
        effects += self._compare(now)
        effects += self._join(now)
        effects += self._tell(now)
        self._planned = self.due(now)
        return effects

    def receive(self, kind: Kind, message: Message, sender: Party, source: str, now: float) -> list[Effect]:
        """An authentic datagram has come from `source` (host:port)."""
        self._met(sender, now)
        for claim in message.claims:
            self.membership.hear(claim, sender.uid, now)
        for delta in message.deltas:
            self.membership.merge(delta, sender.uid, now, tell=True)
        if kind is Kind.PING:
            return [self._send(sender, source, Kind.ACK, message.seq)]
        if kind is Kind.PING_REQ and message.target is not None:
            return self._ping_for(message.target, sender, source, message.seq, now)
        if kind is Kind.ACK:
            return self._acked(message, sender)
        if kind is Kind.NACK:
            self.prober.nacked(message.seq)
        return []

    def answer(self, request: SyncRequest, sender: Party, now: float) -> SyncAnswer:
        """The answer to an authentic sync request."""
        self._met(sender, now)
        return self.sync.answer(request, sender, now)

    def answered(self, talk: Conversation, answer: SyncAnswer, sender: Party, now: float) -> SyncRequest | None:
        """The next request of a conversation, None when it is over. Only `talk.to` may answer, if it has a UID."""
        self._met(sender, now)
        if talk.purpose == "join":
            self.found_at[talk.address] = sender.uid
        following = self.sync.proceed(talk, answer, sender, now)
        self.prober.talked(sender.uid)
        if talk.steps == 1 and not talk.only:
            factor = 0.5 if answer.buckets else 2.0
            self._sync_interval = min(
                self._timing.sync_interval, max(self._timing.sync_fast, self._sync_interval * factor)
            )
        if following is None:
            self._end(talk)
            for uid in talk.only:  # it had nothing newer after all
                self.membership.behind.pop(uid, None)
        return following

    def unanswered(self, talk: Conversation, now: float) -> None:
        """A conversation has failed."""
        self._end(talk)
        for uid in talk.only:
            behind = self.membership.behind.get(uid)
            if behind is None:
                continue
            behind.tries += 1
            if behind.tries >= _PULL_TRIES:
                del self.membership.behind[uid]
                continue
            behind.due = now + self._timing.catch_up * 2**behind.tries
            helper = next(iter(self.members.sample(1, without=talk.to.uid)), None)
            behind.teller = helper.uid if helper and behind.tries > 1 else uid

    def met_myself(self, sender: Party, now: float) -> None:
        """A message has come from this agent's own UID: its own, sent to a seed that is itself, or a twin's."""
        self.membership.hear(Claim(sender.uid, sender.generation, 0, Standing.ALIVE, 0), sender.uid, now)

    def outdated(self, answer: SyncAnswer, sender: Party, now: float) -> None:
        """`sender` doesn't listen to this process, and says what later one it knows."""
        for claim in answer.claims:
            if claim.uid == self.me.uid:
                self.membership.hear(claim, sender.uid, now, sync=True)

    def ask(self, uid: str) -> Talk | None:
        """A conversation that reads that agent's record afresh, from itself; None for one that isn't known."""
        member = self.members.by_uid.get(uid)
        if member is None or not member.address:
            return None
        return self._talk(member.party, member.address, "ask", (uid,))

    def missing(self) -> tuple[list[Seed], list[Seed]]:
        """Where someone may be who doesn't count as alive: as the backend says, and where someone once was."""
        here = {member.address for member in self.members.by_uid.values() if member.uid not in self.members.dead}
        here.add(self.membership.me.address)
        listed = [
            seed
            for seed in self.seeds
            if seed.address not in here and not self._alive(seed.uid or self.found_at.get(seed.address, ""))
        ]
        dead = [member for uid in self.members.dead if (member := self.members.by_uid[uid]).address]
        once = {address for address in (*(member.address for member in dead), *self.known) if address not in here}
        return listed, [Seed(address) for address in sorted(once) if not self._alive(self.found_at.get(address, ""))]

    def _alive(self, uid: str) -> bool:
        return uid == self.me.uid or (uid in self.members.by_uid and uid not in self.members.dead)

    def _jittered(self, seconds: float) -> float:
        return seconds * (0.75 + 0.5 * self._rng.random())

    def _news(self) -> bool:
        return bool(len(self.membership.rumours)) and self.members.size > 1

    def _wake(self, now: float) -> None:
        """Notice that this agent ran late: it was asleep, and nobody is to blame for it."""
        late = now - self._planned
        if late <= self._timing.late:
            return
        self._planned = now
        asleep = late > self._timing.asleep
        self.membership.excuse(late)
        self.prober.excuse(late, asleep)
        if late > self._timing.direct:
            self.membership.health.worse()
        if asleep:
            self._next_sync = now

    def _met(self, sender: Party, now: float) -> None:
        self._wake(now)
        self.contact = now
        self.membership.heard(sender.uid, now)

    def _nacks(self, now: float) -> Iterable[Effect]:
        for relay in self.prober.expired_relays(now):
            yield self._send(relay.asker, relay.address, Kind.NACK, relay.seq, relay.target)

    def _probe(self, now: float) -> Iterable[Effect]:
        probe = self.prober.current
        if probe is not None and probe.asked and now >= probe.failed_at:
            accused = probe.member
            self.prober.give_up(now)
            yield self._send(accused.party, accused.address, Kind.GOSSIP)
        if self.prober.current is None and now >= self.prober.due():
            begun = self.prober.begin(now)
            if begun is not None:
                yield self._send(begun.member.party, begun.member.address, Kind.PING, begun.seq)
        probe = self.prober.current
        if probe is not None and not probe.asked and now >= probe.help_at:
            probe.asked = True
            member = probe.member
            yield self._talk(member.party, member.address, "probe", (), max(0.5, probe.failed_at - now))
            target = Target(member.uid, member.generation, member.address)
            for helper in self.members.sample(self._timing.helpers, without=member.uid):
                if helper.udp is False:
                    continue
                probe.helpers += 1
                yield self._send(helper.party, helper.address, Kind.PING_REQ, probe.seq, target)

    def _ping_for(self, target: Target, asker: Party, source: str, seq: int, now: float) -> list[Effect]:
        if target.uid == self.me.uid:
            return []
        mine = self.prober.relay(asker, source, seq, target, now)
        return [self._send(Party(target.uid, target.generation), target.address, Kind.PING, mine)]

    def _acked(self, message: Message, sender: Party) -> list[Effect]:
        target = message.target
        if target is not None:
            self.prober.acked(message.seq, target.uid, direct=False)
            return []
        relay = self.prober.relays.get(message.seq)
        if relay is not None and relay.target.uid == sender.uid:
            del self.prober.relays[message.seq]
            return [self._send(relay.asker, relay.address, Kind.ACK, relay.seq, relay.target)]
        self.prober.acked(message.seq, sender.uid, direct=True)
        return []

    def _pull(self, now: float) -> list[Effect]:
        """Fetch what datagrams should have brought by now, from whoever told of it."""
        behind = self.membership.behind
        if not behind or now < self._next_pull or len(self._talks) >= _MAX_TALKS:
            return []
        busy = {talk.to.uid for talk in self._talks if talk.only}
        due = {uid: each for uid, each in behind.items() if each.due <= now and each.teller not in busy}
        if not due:
            self._next_pull = now + self._timing.catch_up
            return []
        self._next_pull = now + self._timing.catch_up / 2
        teller = next(iter(due.values())).teller
        member = self.members.by_uid.get(teller)
        uids = tuple(uid for uid, each in due.items() if each.teller == teller)[:_MAX_PULL]
        if member is None or not member.address:
            self.unanswered(Conversation(Party(teller), "", "pull", uids), now)
            return []
        return [self._talk(member.party, member.address, "pull", uids)]

    def _compare(self, now: float) -> list[Effect]:
        """The periodic full sync, with anyone."""
        if now < self._next_sync:
            return []
        self._next_sync = now + self._jittered(self._sync_interval)
        return [self._talk(member.party, member.address, "sync") for member in self.members.sample(1)]

    def _join(self, now: float) -> list[Effect]:
        """Look for those who are missing, for ever."""
        if now < self._next_join:
            return []
        alone = self.members.size == 1
        self._next_join = now + self._jittered(self._timing.rejoin_alone if alone else self._timing.rejoin_interval)
        effects: list[Effect] = []
        for places in self.missing():
            at = {seed.address: seed for seed in places}
            for address in self._rng.sample(sorted(at), min(len(at), 2 if alone else 1)):
                talk = self._talk(Party(at[address].uid), address, "join")
                talk.talk.join = alone
                effects.append(talk)
        return effects

    def _tell(self, now: float) -> list[Effect]:
        if now < self._next_news or not self._news():
            return []
        self._next_news = now + self._timing.news_interval
        effects: list[Effect] = []
        for member in self.members.sample(self._timing.news_fanout):
            if not len(self.membership.rumours):
                break
            if member.udp is not False:
                effects.append(self._send(member.party, member.address, Kind.GOSSIP))
            elif len(self._talks) < _MAX_TALKS:
                effects.append(self._talk(member.party, member.address, "news"))
        return effects

    def _talk(self, to: Party, address: str, purpose: str, only: tuple[str, ...] = (), timeout: float = 0.0) -> Talk:
        # Any process of that agent may answer: what the other way round is known of its generation may be old.
        talk = Conversation(Party(to.uid), address, purpose, only)
        self._talks.append(talk)
        return Talk(talk, self.sync.open(talk), timeout or self._timing.talk)

    def _end(self, talk: Conversation) -> None:
        if talk in self._talks:
            self._talks.remove(talk)

    def _send(self, to: Party, address: str, kind: Kind, seq: int = 0, target: Target | None = None) -> Send:
        """A datagram with as much news as fits. The first claim is the own one, the second what `to` should refute."""
        room = self._room(to.uid) - len(encode(PackedMessage(seq, target))) - 4
        about = self.members.about(to.uid)
        limit = self.membership.limit
        told = self.membership.rumours.take_claims(room // _CLAIMS_SHARE, limit)
        claims = [raw(claim) for claim in (self.membership.me.claim(), about, *told) if claim is not None]
        room -= sum(memoryview(claim).nbytes for claim in claims)
        deltas: list[msgspec.Raw] = self.membership.rumours.take_deltas(room, limit, self.membership.replica)
        return Send(to, address, kind, encode(PackedMessage(seq, target, claims, deltas)))
