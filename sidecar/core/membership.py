"""SWIM's rules: what an agent believes after each claim, delta, failed probe and expired suspicion.

Precedence is (generation, incarnation, alive < suspect < dead). Only an agent itself raises its incarnation, to refute
what others believe of it, and only it writes its record.
"""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.core.liveness import Health, Rng, Timing, retransmits, suspicion
from sidecar.core.members import Member, Members, accuser_id
from sidecar.core.messages import MAX_MEMBERS, Claim, Delta, Standing, Want
from sidecar.core.replica import Applied, Replica
from sidecar.core.rumours import Rumours
from sidecar.core.wire import MAX_GENERATION
from sidecar.model import Record

_FAR = MAX_GENERATION - 1


class Behind:
    """A record of which a newer version is known: to be fetched from `teller` at `due`."""

    __slots__ = ("due", "generation", "teller", "tries", "version")

    def __init__(self, generation: int, version: int, teller: str, due: float) -> None:
        self.generation = generation
        self.version = version
        self.teller = teller
        self.due = due
        self.tries = 0


class Membership:
    """What one agent believes of its pool, and what it still has to tell of it."""

    def __init__(self, uid: str, generation: int, timing: Timing, rng: Rng, now: float) -> None:
        self.timing = timing
        self.rng = rng
        self.me = Member(Replica(uid, generation), now)
        self.members = Members(self.me, rng)
        self.members.touch(self.me)
        self.rumours = Rumours()
        self.health = Health()
        self.behind: dict[str, Behind] = {}
        # Accused by others: to be probed soon, so that a true accusation is confirmed quickly.
        self.urgent: list[str] = []
        # Agents that the platform listed once and lists no more: final, whatever anyone claims.
        self.gone: set[str] = set()
        self._seen_listed: set[str] = set()
        self._my_mark = accuser_id(uid)
        self._next_rise = now

    @property
    def limit(self) -> int:
        """How often one piece of news is passed on."""
        return retransmits(self.members.size)

    def replica(self, uid: str) -> Replica | None:
        """The copy of that agent's record, the own record included."""
        if uid == self.me.uid:
            return self.me.replica
        member = self.members.by_uid.get(uid)
        return member.replica if member else None

    def announce(self, record: Record) -> bool:
        """Say this of oneself from now on; True if it is news."""
        before = self.me.replica.version
        if not self.me.replica.write(record):
            return False
        self.members.touch(self.me, changed=False)
        self.rumours.record(self.me.uid, before)
        return True

    def hear(self, claim: Claim, teller: str, now: float, *, sync: bool = False) -> None:
        """Take a claim into account.

        In a sync, `dead` counts as an accusation only: two halves of a pool that were apart hold each other dead.
        """
        if claim.uid == self.me.uid:
            self._hear_of_myself(claim, now)
            return
        if claim.uid in self.gone or not self._known_again(claim):
            return
        member = self.members.by_uid.get(claim.uid)
        if claim.standing is not Standing.DEAD:
            self.note_version(claim.uid, claim.generation, claim.version, teller, now)
        if member is None:
            return
        if claim.rank > member.rank:
            self._believe(member, claim, now, sync)
        elif claim.rank == member.rank and member.doubt is not None and member.doubt.confirm(claim.by):
            self.rumours.claim(claim)
            self._check_soon(member)

    def merge(self, delta: Delta, teller: str, now: float, *, tell: bool) -> None:
        """Take a delta into account; `tell` passes on what is news."""
        if delta.uid == self.me.uid:
            self._hear_of_myself(Claim(delta.uid, delta.generation, 0, Standing.ALIVE, delta.latest), now)
            return
        if delta.uid in self.gone or delta.uid in self.members.forgotten:
            return
        member = self.members.by_uid.get(delta.uid)
        replica = member.replica if member else Replica(delta.uid, delta.generation)
        before = replica.version if delta.generation == replica.generation else 0
        if replica.apply(delta) is Applied.CHANGED:
            self._take(replica, member, now)
            if tell:
                self.rumours.record(delta.uid, before)
        self.note_version(delta.uid, delta.generation, delta.latest, teller, now)

    def heard(self, uid: str, now: float) -> None:
        """An authentic message has come from that agent itself."""
        member = self.members.by_uid.get(uid)
        if member is not None:
            member.heard = now

    def accuse(self, member: Member, now: float) -> None:
        """The own probe of that agent failed in every way."""
        rank = (member.generation, member.incarnation, Standing.SUSPECT)
        if member.standing is Standing.ALIVE:
            doubt = suspicion(self.timing, self.health, self.members.size, now, self._my_mark)
            self.members.stand(member, rank, now, doubt)
        elif member.doubt is None or not member.doubt.confirm(self._my_mark):
            return
        self.rumours.claim(member.claim(self._my_mark))

    def expire(self, now: float) -> None:
        """Turn suspicions whose time is over into deaths, and forget those who have been dead for long."""
        for uid in list(self.members.suspects):
            member = self.members.by_uid[uid]
            if member.doubt is not None and member.doubt.deadline <= now:
                self.members.stand(member, (member.generation, member.incarnation, Standing.DEAD), now, None)
                self.rumours.claim(member.claim(self._my_mark))
        for uid in list(self.members.dead):
            if self.members.by_uid[uid].since + self.timing.forget <= now:
                self._remove(uid)

    def excuse(self, seconds: float) -> None:
        """This agent didn't run for so long: nobody's silence in that time counts."""
        for uid in self.members.suspects:
            doubt = self.members.by_uid[uid].doubt
            if doubt is not None:
                doubt.start += seconds

    def set_listed(self, uids: Iterable[str]) -> None:
        """What the platform lists now. Who was listed and is not any more is gone, at once."""
        now_listed = set(uids)
        self._seen_listed |= now_listed
        if len(self._seen_listed) > MAX_MEMBERS:
            self._seen_listed = now_listed
        self.gone = self._seen_listed - now_listed
        for uid in self.gone.intersection(self.members.by_uid):
            self._remove(uid)

    def want(self, uid: str) -> Want:
        """Asks for what is newer than the copy that is here."""
        replica = self.replica(uid)
        return Want(uid, replica.generation, replica.version) if replica else Want(uid, 0, 0)

    def newer(self, uid: str, generation: int, version: int) -> bool:
        """Whether that version is newer than the copy that is here."""
        replica = self.replica(uid)
        return replica is None or (generation, version) > (replica.generation, replica.version)

    def note_version(self, uid: str, generation: int, version: int, teller: str, now: float) -> None:
        """`teller` has that version of that record."""
        if uid == self.me.uid or version == 0:
            return
        if not self.newer(uid, generation, version):
            known = self.behind.get(uid)
            if known is not None and not self.newer(uid, known.generation, known.version):
                del self.behind[uid]
            return
        known = self.behind.get(uid)
        if known is None and len(self.behind) < MAX_MEMBERS:
            self.behind[uid] = Behind(generation, version, teller, now + self.timing.catch_up)
        elif known is not None and (generation, version) > (known.generation, known.version):
            known.generation, known.version, known.teller = generation, version, teller

    def _take(self, replica: Replica, member: Member | None, now: float) -> None:
        if member is None:
            self.members.add(Member(replica, now))
        elif replica.generation > member.generation:
            self.members.stand(member, (replica.generation, 0, Standing.ALIVE), now, None)
            self.members.touch(member)
        else:
            self.members.touch(member)

    def _believe(self, member: Member, claim: Claim, now: float, sync: bool) -> None:
        standing = claim.standing
        if standing is Standing.DEAD and sync and member.standing is not Standing.DEAD:
            standing = Standing.SUSPECT
            if (claim.generation, claim.incarnation, standing) <= member.rank:
                return
        doubt = None
        if standing is Standing.SUSPECT:
            doubt = suspicion(self.timing, self.health, self.members.size, now, claim.by)
        self.members.stand(member, (claim.generation, claim.incarnation, standing), now, doubt)
        self.rumours.claim(member.claim(claim.by if standing is not Standing.ALIVE else 0))
        if doubt is not None:
            self._check_soon(member)

    def _check_soon(self, member: Member) -> None:
        """A few of the pool, not all of it, look for themselves."""
        if member.uid not in self.urgent and self.rng.random() < 4 / self.members.size:
            self.urgent.append(member.uid)

    def _hear_of_myself(self, claim: Claim, now: float) -> None:
        me = self.me
        if max(claim.generation, claim.incarnation) > _FAR:
            return
        if (claim.generation, claim.version) > (me.generation, me.version):
            self._rise(claim.generation + 1, now)
        elif claim.rank > me.rank:
            me.incarnation = claim.incarnation + 1
            self.health.worse()
            self._refuted()

    def _rise(self, generation: int, now: float) -> None:
        """Someone knows a later process of this agent: go above it. A living twin does the same, so not too often."""
        if now < self._next_rise:
            return
        self._next_rise = now + self.timing.rejoin_interval
        me = self.me
        me.generation, me.incarnation = generation, 0
        me.replica.reborn(generation)
        self.rumours.record(me.uid, 0)
        self._refuted()

    def _refuted(self) -> None:
        self.members.touch(self.me, changed=False)
        self.rumours.claim(self.me.claim())

    def _known_again(self, claim: Claim) -> bool:
        """False for what is remembered as dead, until it shows a higher incarnation."""
        remembered = self.members.forgotten.get(claim.uid)
        if remembered is None:
            return True
        if (claim.generation, claim.incarnation) <= remembered or claim.standing is Standing.DEAD:
            return False
        del self.members.forgotten[claim.uid]
        return True

    def _remove(self, uid: str) -> None:
        self.members.remove(uid)
        self.rumours.forget(uid)
        self.behind.pop(uid, None)
