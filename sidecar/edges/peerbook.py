"""What this worker believes about its peers: their last records, who is alive, and whose name counts.

No I/O and no clock in here: times are arguments, in seconds of the agent's clock. The rules:

- A record is believed only from the pool's own members: the pool must match, and the pod UID where the platform lists
  one. A pool-mate or a stranger that got a dead worker's address is neither that worker nor keeps it alive.
- Alive is who was heard within the window. An agent that was itself asleep accuses nobody: those alive before its
  sleep get a whole window more.
- Of two live agents with one name the later (greater generation, then greater UID) is ignored and named as a problem;
  of two that claim one UID from different addresses likewise.
- What the platform no longer lists is gone at once; without a platform (no UIDs listed) a silent peer's last record
  stays for `keep` seconds, or as long as its address is listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from sidecar.model import Member, Problem, Record
from sidecar.ports import Observed

KEEP_SECONDS = 600.0
# The owner calls `changed` at least twice a second; more time than this between two calls was a sleep.
ASLEEP_SECONDS = 1.5

_COPIED = "an adapters directory was copied; delete state/ in one of the two"


class NotBelieved(Exception):
    """An answer that isn't this member's record. The text says why, for people."""


class _Seen(msgspec.Struct):
    record: Record
    heard: float
    deadline: float
    address: str
    by_uid: bool


class PeerBook:
    """The peers' records by UID, and the view by name that follows from them."""

    def __init__(self, *, pool: str, uid: str, window: float, keep: float = KEEP_SECONDS) -> None:
        """`uid` is this agent's own; `window` as in `set_members`; `keep` in seconds."""
        self._pool = pool
        self._uid = uid
        self._window = window
        self._keep = keep
        self._own: Record | None = None
        self._seen: dict[str, _Seen] = {}
        self._uid_at: dict[str, str] = {}
        self._members_known = False
        self._uids: frozenset[str] = frozenset()
        self._addresses: frozenset[str] = frozenset()
        self._view: dict[str, Observed] = {}
        self._reported: dict[str, Observed] = {}
        self._reported_namesake: str | None = None
        self._namesake: Record | None = None
        self._problems: tuple[Problem, ...] = ()
        # Stale: the view must be composed anew. Unreported: it was, and `changed` hasn't compared it yet.
        self._stale = True
        self._unreported = True
        self._until = -math.inf
        self._awake: float | None = None

    def set_members(self, members: Iterable[Member], window: float, now: float) -> None:
        """Take the backend's list, and the seconds without an answer after which a peer counts as dead.

        A longer window (the pool grew, peers are asked less often) holds at once, a shorter one only from each
        peer's next answer on: it could not have been asked more often before.
        """
        listed = tuple(members)
        self._members_known = True
        self._uids = frozenset(m.uid for m in listed if m.uid)
        self._addresses = frozenset(m.address for m in listed)
        self._uid_at = {address: uid for address, uid in self._uid_at.items() if address in self._addresses}
        if window > self._window:
            for seen in self._seen.values():
                if seen.deadline > now:
                    seen.deadline = max(seen.deadline, seen.heard + window)
        self._window = window
        self._stale = True

    def set_own(self, record: Record) -> None:
        """This worker's own record, against which names are compared."""
        self._own = record
        self._stale = True

    def is_own(self, record: Record) -> bool:
        """Whether an answer came from this very agent (a seed list may name everyone).

        Raises NotBelieved for a copy of it.
        """
        if record.head.uid != self._uid:
            return False
        if self._own is not None and record.head.generation != self._own.head.generation:
            raise NotBelieved(f"has this agent's own identity (uid {self._uid}): {_COPIED}")
        return True

    def knows(self, uid: str) -> bool:
        """Whether a record of that UID is held."""
        return uid in self._seen

    def record_of(self, uid: str) -> Record | None:
        """The record held of that UID."""
        seen = self._seen.get(uid)
        return seen.record if seen else None

    def hear(self, member: Member, record: Record, started: float, now: float) -> bool:
        """Take an answer to a request sent at `started`; False if a newer one was already held.

        Raises NotBelieved.
        """
        self._check(member, record)
        head = record.head
        old = self._seen.get(head.uid)
        if old is not None:
            if old.address != member.address and old.deadline > now and old.record.head.generation != head.generation:
                raise NotBelieved(f"has the identity (uid {head.uid}) of the agent at {old.address}: {_COPIED}")
            if started < old.heard and _order(record) < _order(old.record):
                return False
            if record == old.record:
                record = old.record
        self._replace_at(member.address, head.uid, now)
        revived = old is None or old.deadline <= now
        self._stale = self._stale or revived or old is None or record is not old.record
        self._until = min(self._until, now + self._window)
        self._seen[head.uid] = _Seen(record, now, now + self._window, member.address, bool(member.uid))
        self._touch(head.name, record)
        return True

    def hear_again(self, uid: str, now: float) -> None:
        """The peer answered that its record is the one held."""
        seen = self._seen[uid]
        self._stale = self._stale or seen.deadline <= now
        seen.heard, seen.deadline = now, now + self._window
        self._until = min(self._until, seen.deadline)  # the window may be shorter than at the answer before
        self._touch(seen.record.head.name, seen.record)

    def changed(self, now: float) -> bool:
        """Whether content or liveness differ from what they were at the last call. Call it twice a second or more."""
        self._compose(now)
        self._awake = now
        if not self._unreported:
            return False
        self._unreported = False
        namesake = self._namesake.head.uid if self._namesake else None
        differs = namesake != self._reported_namesake or not _same(self._reported, self._view)
        if differs:
            self._reported, self._reported_namesake = self._view.copy(), namesake
        return differs

    def view(self, now: float) -> Mapping[str, Observed]:
        """Records by worker name, without the own one."""
        self._compose(now)
        return dict(self._view)

    def namesake(self, now: float) -> Record | None:
        """A live agent that had this worker's name before it: this worker then holds no targets."""
        self._compose(now)
        return self._namesake

    def problems(self, now: float) -> tuple[Problem, ...]:
        """Names that two live agents use."""
        self._compose(now)
        return self._problems

    @property
    def until(self) -> float:
        """When liveness or visibility may change without an answer; an earlier time than that does no harm."""
        return self._until

    def _check(self, member: Member, record: Record) -> None:
        head = record.head
        if not head.uid or not head.name:
            raise NotBelieved("gives a record with no uid or no name")
        if head.pool != self._pool:
            raise NotBelieved(f"belongs to pool {head.pool!r}, this agent to {self._pool!r}")
        if member.uid and head.uid != member.uid:
            raise NotBelieved(f"is {head.name!r} (uid {head.uid}), not {member.name!r} (uid {member.uid}) as listed")

    def _replace_at(self, address: str, uid: str, now: float) -> None:
        """Who answered at this address before and isn't heard elsewhere is dead: its place is taken."""
        before = self._uid_at.get(address)
        self._uid_at[address] = uid
        if before is None or before == uid:
            return
        seen = self._seen.get(before)
        if seen is not None and seen.address == address:
            seen.deadline = min(seen.deadline, now)
            self._stale = True

    def _touch(self, name: str, record: Record) -> None:
        """Bring `heard` of a view that is otherwise still right up to date, without building it anew."""
        shown = self._view.get(name)
        if not self._stale and shown is not None and shown.record is record:
            seen = self._seen[record.head.uid]
            self._view[name] = Observed(record=record, heard=seen.heard, alive=True)

    def _forgive(self, now: float) -> None:
        """After a sleep of this agent's own: who was alive before it gets a whole window."""
        awake = self._awake
        if awake is None or now - awake <= ASLEEP_SECONDS:
            return
        for seen in self._seen.values():
            if seen.deadline > awake:
                seen.deadline = max(seen.deadline, now + self._window)
        self._awake = now
        self._stale = True

    def _compose(self, now: float) -> None:
        self._forgive(now)
        if not self._stale and now < self._until:
            return
        for uid in [uid for uid, seen in self._seen.items() if not self._kept(uid, seen, now)]:
            del self._seen[uid]
        by_name: dict[str, list[_Seen]] = {}
        for seen in self._seen.values():
            by_name.setdefault(seen.record.head.name, []).append(seen)
        self._view, self._namesake = {}, None
        problems: list[Problem] = []
        for name, claimants in sorted(by_name.items()):
            problems += self._settle_name(name, claimants, now)
        self._problems = tuple(problems)
        self._until = self._next_event(now)
        self._stale, self._unreported = False, True

    def _settle_name(self, name: str, claimants: list[_Seen], now: float) -> list[Problem]:
        """Show the rightful one of those that go by `name`; problems for each other that is alive."""
        living: list[tuple[tuple[int, str], str, _Seen | None]] = [
            (_age(seen.record), seen.address, seen) for seen in claimants if seen.deadline > now
        ]
        if self._own is not None and self._own.head.name == name:
            living.append((_age(self._own), f"{self._own.head.address} (this agent)", None))
        living.sort(key=lambda claim: claim[0])
        if not living:
            last = max(claimants, key=lambda seen: (seen.heard, seen.record.head.uid))
            self._view[name] = Observed(record=last.record, heard=last.heard, alive=False)
            return []
        (_, address, first), *later = living
        if first is not None:
            self._view[name] = Observed(record=first.record, heard=first.heard, alive=True)
            if any(seen is None for _, _, seen in later):
                self._namesake = first.record
        return [_twice(name, address, other) for _, other, _ in later]

    def _kept(self, uid: str, seen: _Seen, now: float) -> bool:
        if not self._members_known:
            return True
        if seen.by_uid:
            return uid in self._uids
        listed = seen.address in self._addresses and self._uid_at.get(seen.address) == uid
        return listed or now - seen.heard < self._keep or seen.deadline > now

    def _next_event(self, now: float) -> float:
        deadlines = (seen.deadline for seen in self._seen.values() if seen.deadline > now)
        ends = (seen.heard + self._keep for seen in self._seen.values() if not seen.by_uid and seen.deadline <= now)
        return min((at for at in (*deadlines, *ends) if at > now), default=math.inf)


def _order(record: Record) -> tuple[int, int]:
    return (record.head.generation, record.version)


def _age(record: Record) -> tuple[int, str]:
    """Sorts the agents of one name, the rightful one first."""
    return (record.head.generation, record.head.uid)


def _same(one: Mapping[str, Observed], other: Mapping[str, Observed]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].record is other[name].record and one[name].alive == other[name].alive for name in one
    )


def _twice(name: str, earlier: str, later: str) -> Problem:
    return Problem(
        where=f"worker {name}",
        message=f"two live agents have this name, at {earlier} and at {later}; the later one, at {later}, holds no "
        "targets: give each agent a --name of its own",
    )
