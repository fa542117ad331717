"""An agent's voice: the gossip state machine behind the gate that signs what it says and checks what it hears.

All of gossip but sockets and clocks, so that what a simulation runs is what an agent runs, bytes included.
"""

from __future__ import annotations

from sidecar.core.antientropy import Conversation
from sidecar.core.gossip import Effect, Gossip, Send
from sidecar.core.keyring import Keyring
from sidecar.core.liveness import Rng, Timing
from sidecar.core.messages import SyncAnswer, decode_answer, decode_message, decode_request, encode
from sidecar.core.wire import Drop, Dropped, Gate, HttpAnswer, HttpRequest, Opened, Party, body_hash
from sidecar.model import Frozen

SYNC_PATH = "/peer/sync"
SYNC = HttpRequest(method="POST", path=SYNC_PATH)
# Bytes of one sync message: 10,000 entries at some hundred bytes each, and room to spare.
MAX_SYNC_BODY = 16 * 1024 * 1024
_MAX_SKEWED = 256


class Datagram(Frozen, frozen=True):
    """Bytes for host:port."""

    address: str
    data: bytes


class Call(Frozen, frozen=True, kw_only=True):
    """POST `body` to `http://<address>/peer/sync` with `header` as the authentication header.

    The outcome goes to `Speaker.outcome`, whatever it is, within `timeout` seconds.
    """

    address: str
    header: str
    body: bytes
    timeout: float
    nonce: int
    talk: Conversation


class Outcome(Frozen, frozen=True, kw_only=True):
    """What came of a call: status 0 is no answer at all."""

    status: int
    header: str = ""
    body: bytes = b""


Out = Datagram | Call


class Speaker:
    """One agent's gossip, as bytes. `now` is the steady clock, `wall` the wall clock, both in seconds."""

    def __init__(
        self,
        *,
        me: Party,
        pool: str,
        keys: Keyring,
        timing: Timing,
        rng: Rng,
        now: float,
        wall: float,
    ) -> None:
        # Microseconds: no process sends a million messages a second, so the next one begins above this one's last.
        self.gate = Gate(me, pool, keys, first_nonce=max(0, int(wall * 1_000_000)))
        self.gossip = Gossip(me.uid, me.generation, timing, rng, now, self.gate.room)
        # UID -> seconds that its clock is ahead, for those who are outside the window.
        self.skewed: dict[str, float] = {}
        self._echoes = 0

    def tick(self, now: float, wall: float) -> list[Out]:
        """Do what is due."""
        return self._seal(self.gossip.tick(now), wall)

    def datagram(self, data: bytes, source: str, now: float, wall: float) -> list[Out]:
        """A datagram has come. What isn't an authentic message for this agent is counted, no more."""
        opened = self.gate.open(data, wall)
        if isinstance(opened, Dropped):
            self._note(opened, now)
            return []
        self.skewed.pop(opened.sender.uid, None)
        message = decode_message(opened.body)
        if message is None:
            self.gate.dropped[Drop.MALFORMED] += 1
            return []
        return self._seal(self.gossip.receive(opened.kind, message, opened.sender, source, now), wall)

    def request(self, opened: Opened, body: bytes, now: float, wall: float) -> Outcome:
        """The answer to a sync request that was admitted."""
        if not self.gate.proved(opened, body):
            return self._answer(opened, 400, b"", wall)
        found = decode_request(body)
        if found is None:
            self.gate.dropped[Drop.MALFORMED] += 1
            return self._answer(opened, 400, b"", wall)
        answer = encode(self.gossip.answer(found, opened.sender, now))
        self._follow()
        return self._answer(opened, 200, answer, wall)

    def admit(self, header: str, request: HttpRequest, now: float, wall: float) -> Opened | Outcome:
        """Check any request of a peer before its body is read; else the answer that refuses it.

        403 for what isn't authentic, 421 for a request from this very agent (a seed that is itself), and a signed 409
        for an agent whose generation is behind what is known of it, so that it can rise above that.
        """
        opened = self.gate.check_request(header, request, wall)
        if isinstance(opened, Opened):
            self.skewed.pop(opened.sender.uid, None)
            return opened
        self._note(opened, now)
        if opened.reason is Drop.STALE and opened.sender is not None:
            member = self.gossip.members.by_uid.get(opened.sender.uid)
            known = (member.claim(),) if member is not None else ()
            return self._answer(opened, 409, encode(SyncAnswer(claims=known)), wall)
        myself = opened.sender == self.gate.me
        self._echoes += myself
        return Outcome(status=421 if myself else 403)

    def outcome(self, call: Call, outcome: Outcome, now: float, wall: float) -> Call | None:
        """What came of a call: the next one of its conversation, None when that is over."""
        sender, answer = self._checked(call, outcome, now, wall)
        if sender is not None and answer is not None and outcome.status == 200:
            following = self.gossip.answered(call.talk, answer, sender, now)
            self._follow()
            return None if following is None else self._call(call.talk, encode(following), call.timeout, wall)
        if sender is not None and answer is not None:
            self.gossip.outdated(answer, sender, now)
            self._follow()
        if outcome.status == 421 and self._echoes:
            self._echoes -= 1
            self.gossip.found_at[call.address] = self.gate.me.uid
        self.gossip.unanswered(call.talk, now)
        return None

    def _checked(
        self, call: Call, outcome: Outcome, now: float, wall: float
    ) -> tuple[Party, SyncAnswer] | tuple[None, None]:
        """Who answered and what, if it is authentic and from whom it should be."""
        if outcome.status not in (200, 409):
            return None, None
        opened = self.gate.check_answer(outcome.header, call.nonce, HttpAnswer(status=outcome.status), wall)
        if isinstance(opened, Dropped):
            self._note(opened, now)
            return None, None
        if call.talk.to.uid not in ("", opened.sender.uid) or not self.gate.proved(opened, outcome.body):
            return None, None
        answer = decode_answer(outcome.body)
        if answer is None:
            self.gate.dropped[Drop.MALFORMED] += 1
            return None, None
        return opened.sender, answer

    def ask(self, uid: str, wall: float) -> Call | None:
        """A call that reads that agent's record afresh; None for one that isn't known."""
        effect = self.gossip.ask(uid)
        return None if effect is None else self._call(effect.talk, encode(effect.request), effect.timeout, wall)

    def _seal(self, effects: list[Effect], wall: float) -> list[Out]:
        self._follow()
        sealed: list[Out] = []
        for effect in effects:
            if isinstance(effect, Send):
                sealed.append(Datagram(effect.address, self.gate.seal(effect.kind, effect.to, effect.body, wall)))
            else:
                sealed.append(self._call(effect.talk, encode(effect.request), effect.timeout, wall))
        return sealed

    def _call(self, talk: Conversation, body: bytes, timeout: float, wall: float) -> Call:
        header, nonce = self.gate.sign_request(talk.to, SYNC, body, wall)
        return Call(address=talk.address, header=header, body=body, timeout=timeout, nonce=nonce, talk=talk)

    def _answer(self, opened: Opened | Dropped, status: int, body: bytes, wall: float) -> Outcome:
        header = self.gate.sign_answer(opened, HttpAnswer(status=status), body_hash(body), wall)
        return Outcome(status=status, header=header, body=body)

    def _follow(self) -> None:
        """The generation may have risen."""
        self.gate.me = self.gossip.me

    def _note(self, dropped: Dropped, now: float) -> None:
        sender = dropped.sender
        if sender is None:
            return
        if dropped.reason is Drop.SELF:
            self.gossip.met_myself(sender, now)
            self._follow()
        elif dropped.reason is Drop.CLOCK and (sender.uid in self.skewed or len(self.skewed) < _MAX_SKEWED):
            self.skewed[sender.uid] = dropped.skew
