"""The table of a pool's agents: who they are, what is believed of each, and a checksum over all of it by bucket."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from sidecar.core.liveness import Rng, Suspicion
from sidecar.core.messages import BUCKETS, Claim, Standing
from sidecar.core.replica import Replica
from sidecar.core.wire import Party

# Agents remembered by their last incarnation alone, so that an echo doesn't bring them back.
MAX_FORGOTTEN = 4096


def accuser_id(uid: str) -> int:
    """How an accuser is named in claims; never 0, which stands for nobody."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4], "big") or 1


def bucket_of(uid: str) -> int:
    """The checksum's bucket of that agent."""
    return hashlib.sha256(uid.encode()).digest()[4] % BUCKETS


class Member:
    """One agent as this one knows it. Times are on this agent's steady clock."""

    __slots__ = (
        "bucket",
        "doubt",
        "generation",
        "heard",
        "incarnation",
        "listed",
        "replica",
        "share",
        "since",
        "standing",
        "udp",
    )

    def __init__(self, replica: Replica, now: float) -> None:
        self.replica = replica
        self.generation = replica.generation
        self.incarnation = 0
        self.standing = Standing.ALIVE
        self.since = now
        self.heard = now
        self.bucket = bucket_of(replica.uid)
        self.share = 0  # what it adds to the checksum of its bucket
        self.doubt: Suspicion | None = None
        self.listed = False  # stands in the probe order
        # Whether its own acks to datagrams arrive; None before the first probe.
        self.udp: bool | None = None

    @property
    def uid(self) -> str:
        """Who it is."""
        return self.replica.uid

    @property
    def party(self) -> Party:
        """The process to which messages are addressed."""
        return Party(self.uid, self.generation)

    @property
    def version(self) -> int:
        """The version of its record that is here, 0 for one of an earlier process."""
        return self.replica.version if self.replica.generation == self.generation else 0

    @property
    def address(self) -> str:
        """host:port, for datagrams and HTTP."""
        head = self.replica.head
        return head.address if head else ""

    @property
    def rank(self) -> tuple[int, int, int]:
        """What a claim must beat."""
        return (self.generation, self.incarnation, self.standing)

    def claim(self, by: int = 0) -> Claim:
        """What is believed of it."""
        return Claim(self.uid, self.generation, self.incarnation, self.standing, self.version, by)

    def checksum(self) -> int:
        """32 bits over what two agents must agree on; a suspicion passes by itself and doesn't count."""
        text = f"{self.uid}\0{self.generation}\0{self.incarnation}\0{self.version}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


class Members:
    """All agents but this one by UID, with what must be kept in step with them."""

    def __init__(self, me: Member, rng: Rng) -> None:
        self.me = me
        self.by_uid: dict[str, Member] = {}
        self.suspects: set[str] = set()
        self.dead: set[str] = set()
        self.sums = [0] * BUCKETS
        self.buckets: list[set[str]] = [set() for _ in range(BUCKETS)]
        # Everyone who may be probed, in random order; the dead and the gone are taken out at each round's end.
        self.order: list[str] = []
        self.forgotten: OrderedDict[str, tuple[int, int]] = OrderedDict()
        # Counts changes of content and of who is alive.
        self.revision = 0
        self._rng = rng

    @property
    def size(self) -> int:
        """Agents that count as alive, this one included."""
        return len(self.by_uid) - len(self.dead) + 1

    def add(self, member: Member) -> None:
        """A new agent."""
        self.by_uid[member.uid] = member
        self.buckets[member.bucket].add(member.uid)
        self.touch(member)
        self.enlist(member)

    def remove(self, uid: str) -> Member | None:
        """An agent that is gone, remembered by its incarnation."""
        member = self.by_uid.pop(uid, None)
        if member is None:
            return None
        self._count(member, 0)
        self.buckets[member.bucket].discard(uid)
        self.suspects.discard(uid)
        self.dead.discard(uid)
        self.revision += 1
        self.forgotten.pop(uid, None)
        self.forgotten[uid] = (member.generation, member.incarnation)
        if len(self.forgotten) > MAX_FORGOTTEN:
            self.forgotten.popitem(last=False)
        return member

    def stand(self, member: Member, rank: tuple[int, int, Standing], now: float, doubt: Suspicion | None) -> None:
        """Believe something else of an agent."""
        was_dead = member.standing is Standing.DEAD
        member.generation, member.incarnation, standing = rank
        if standing is not member.standing:
            member.since = now
        member.standing, member.doubt = standing, doubt
        (self.suspects.add if standing is Standing.SUSPECT else self.suspects.discard)(member.uid)
        is_dead = standing is Standing.DEAD
        (self.dead.add if is_dead else self.dead.discard)(member.uid)
        if was_dead and not is_dead:
            self.enlist(member)
        self.touch(member, changed=was_dead is not is_dead)

    def touch(self, member: Member, changed: bool = True) -> None:
        """Put the checksum right after a change; `changed` if those who look at records should look again."""
        self._count(member, 0 if member.standing is Standing.DEAD else member.checksum())
        self.revision += changed

    def enlist(self, member: Member) -> None:
        """Put it at a random place of the probe order."""
        if not member.listed:
            member.listed = True
            self.order.insert(self._rng.randrange(0, len(self.order) + 1), member.uid)

    def shuffle(self) -> None:
        """Begin another round of probes, in another order, without the dead and the gone."""
        kept: list[str] = []
        for uid in dict.fromkeys(self.order):
            member = self.by_uid.get(uid)
            if member is None:
                continue
            member.listed = member.standing is not Standing.DEAD
            if member.listed:
                kept.append(uid)
        self._rng.shuffle(kept)
        self.order = kept

    def sample(self, count: int, without: str = "") -> list[Member]:
        """Up to `count` different agents that count as alive, at random."""
        picked = self._rng.sample(self.order, min(len(self.order), 2 * count + 2))
        found = [self.by_uid[uid] for uid in picked if uid != without and uid in self.by_uid]
        return [member for member in found if member.standing is not Standing.DEAD and member.address][:count]

    def about(self, uid: str) -> Claim | None:
        """What that agent should refute: None when it counts as alive, or was never known."""
        member = self.by_uid.get(uid)
        if member is not None:
            return member.claim() if member.standing is not Standing.ALIVE else None
        if uid in self.forgotten:
            return Claim(uid, *self.forgotten[uid], Standing.DEAD, 0)
        return None

    def _count(self, member: Member, share: int) -> None:
        self.sums[member.bucket] = (self.sums[member.bucket] - member.share + share) % 2**32
        member.share = share
