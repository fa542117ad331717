"""One probe a period: a ping, then the help of others and a question over HTTP, then an accusation."""

from __future__ import annotations

from collections import OrderedDict

from sidecar.core.members import Member
from sidecar.core.membership import Membership
from sidecar.core.messages import Standing, Target
from sidecar.core.wire import Party

MAX_RELAYS = 256


class Probe:
    """A probe under way. Deadlines are on the steady clock."""

    __slots__ = ("answers", "asked", "failed_at", "help_at", "helpers", "member", "seq")

    def __init__(self, member: Member, seq: int, help_at: float, failed_at: float) -> None:
        self.member = member
        self.seq = seq
        self.help_at = help_at
        self.failed_at = failed_at
        self.asked = False
        self.helpers = 0
        self.answers = 0


class Relay:
    """A ping for someone else: whom and where to tell."""

    __slots__ = ("address", "asker", "due", "seq", "target")

    def __init__(self, asker: Party, address: str, seq: int, target: Target, due: float) -> None:
        self.asker = asker
        self.address = address
        self.seq = seq
        self.target = target
        self.due = due


class Prober:
    """Whom to probe, and what became of it."""

    def __init__(self, membership: Membership, now: float) -> None:
        self.current: Probe | None = None
        self.relays: OrderedDict[int, Relay] = OrderedDict()
        self.next_at = now
        self._membership = membership
        self._timing = membership.timing
        self._urgent_at = now
        self._seq = 0
        self._at = 0

    def due(self) -> float:
        """When something must be done next."""
        probe = self.current
        if probe is None:
            # Someone else's accusation is looked into at once, but by one probe at a time.
            return min(self.next_at, self._urgent_at) if self._membership.urgent else self.next_at
        return probe.failed_at if probe.asked else probe.help_at

    def new_seq(self) -> int:
        """A number that the next ping is known by."""
        self._seq += 1
        return self._seq

    def begin(self, now: float) -> Probe | None:
        """The next probe, if there is anyone to probe."""
        factor = self._membership.health.factor
        jitter = 0.9 + 0.2 * self._membership.rng.random()
        self.next_at = now + self._timing.period * factor * jitter
        self._urgent_at = now + self._timing.direct
        member = self._next_member()
        if member is None:
            return None
        help_at, failed_at = now + self._timing.direct * factor, now + self._timing.patience * factor
        self.current = Probe(member, self.new_seq(), help_at, failed_at)
        if member.udp is False:
            self.current.help_at = now
        return self.current

    def acked(self, seq: int, uid: str, direct: bool) -> None:
        """An ack has come: from the agent itself, or through a helper."""
        member = self._membership.members.by_uid.get(uid)
        if direct and member is not None:
            member.udp = True
        probe = self.current
        if probe is not None and probe.seq == seq and probe.member.uid == uid:
            self._good()

    def nacked(self, seq: int) -> None:
        """A helper got no ack either, but the helper itself answers: the fault isn't here."""
        if self.current is not None and self.current.seq == seq:
            self.current.answers += 1

    def talked(self, uid: str) -> None:
        """The agent has answered over HTTP, whatever becomes of datagrams."""
        probe = self.current
        if probe is None or probe.member.uid != uid:
            return
        if probe.asked:
            probe.member.udp = False
        self._good()

    def give_up(self, now: float) -> None:
        """The probe under way has failed: accuse, and doubt oneself if not even the helpers answered."""
        probe, self.current = self.current, None
        if probe is None:
            return
        if probe.helpers > probe.answers:
            self._membership.health.worse()
        if self._membership.members.by_uid.get(probe.member.uid) is probe.member:
            self._membership.accuse(probe.member, now)

    def excuse(self, seconds: float, asleep: bool) -> None:
        """This agent didn't run for so long; after a real sleep a probe from before it proves nothing."""
        if asleep:
            self.current = None
        elif self.current is not None:
            self.current.help_at += seconds
            self.current.failed_at += seconds

    def relay(self, asker: Party, address: str, seq: int, target: Target, now: float) -> int:
        """Remember a ping for someone else; returns the number for it."""
        mine = self.new_seq()
        self.relays[mine] = Relay(asker, address, seq, target, now + self._timing.direct)
        if len(self.relays) > MAX_RELAYS:
            self.relays.popitem(last=False)
        return mine

    def expired_relays(self, now: float) -> list[Relay]:
        """Pings for others that got no ack; they stand in the order of their deadlines."""
        found: list[Relay] = []
        while self.relays:
            seq, relay = next(iter(self.relays.items()))
            if relay.due > now:
                break
            found.append(self.relays.pop(seq))
        return found

    def _good(self) -> None:
        self.current = None
        self._membership.health.better()

    def _next_member(self) -> Member | None:
        """Those accused by others first, then everyone in turn, in another order each round."""
        members, urgent = self._membership.members, self._membership.urgent
        while urgent:
            member = members.by_uid.get(urgent.pop())
            if member is not None and member.standing is not Standing.DEAD and member.address:
                return member
        for _ in range(len(members.order) + 1):
            if self._at >= len(members.order):
                members.shuffle()
                self._at = 0
                if not members.order:
                    return None
            member = members.by_uid.get(members.order[self._at])
            self._at += 1
            if member is not None and member.standing is not Standing.DEAD and member.address:
                return member
        return None
