"""Full sync over HTTP: checksums first, then only what differs, in steps that the asking side drives.

A conversation: the asker sends its checksums by bucket; the answer names the live members of the buckets that differ;
the asker then wants what is newer there, claims what is newer here, and is asked for that in turn. Equal views cost one
small request, whatever the pool's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidecar.core.membership import Membership
from sidecar.core.messages import Claim, Delta, Standing, SyncAnswer, SyncRequest, Want
from sidecar.core.wire import Party

# Entries in the deltas of one message, and wants in one request: some MiB at most.
MAX_SYNC_ENTRIES = 10_000
MAX_SYNC_WANTS = 2_000
MAX_STEPS = 40
# Records that one sync may bring and that are still passed on as news; with more, everyone will sync.
FEW = 32
# Bytes of claims that go along with any step, as with a datagram.
_CLAIMS_ROOM = 1000


class Conversation:
    """One sync that this agent drives. `to` has no UID until the first answer when only an address is known."""

    __slots__ = ("address", "join", "only", "purpose", "steps", "to", "wanted")

    def __init__(self, to: Party, address: str, purpose: str, only: tuple[str, ...] = ()) -> None:
        self.to = to
        self.address = address
        self.purpose = purpose
        # UIDs asked for by themselves, without a comparison of everything.
        self.only = only
        self.wanted: dict[str, Want] = {}
        self.steps = 0
        # The first sync of an agent that knows nobody: what it learns is no news to the pool.
        self.join = False


class Sync:
    """Both sides of a sync, on what one agent believes."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def open(self, talk: Conversation) -> SyncRequest:
        """The first request."""
        membership = self._membership
        talk.wanted = {uid: membership.want(uid) for uid in talk.only[:MAX_SYNC_WANTS]}
        return SyncRequest(
            claims=self._mine(talk.to.uid),
            sums=() if talk.only else tuple(membership.members.sums),
            wants=tuple(talk.wanted.values()),
        )

    def answer(self, request: SyncRequest, sender: Party, now: float) -> SyncAnswer:
        """What to say to a request from `sender`."""
        membership = self._membership
        corrections = self._take(request.claims, request.deltas, sender, now, tell=True)
        sums = membership.members.sums
        buckets = tuple(n for n, theirs in enumerate(request.sums) if theirs != sums[n])
        deltas, more = self._deltas(request.wants)
        return SyncAnswer(
            claims=(*self._mine(sender.uid), *corrections, *self._live(buckets, sender.uid)),
            buckets=buckets,
            wants=self._wants(request.claims),
            deltas=tuple(deltas),
            more=more,
        )

    def proceed(self, talk: Conversation, answer: SyncAnswer, sender: Party, now: float) -> SyncRequest | None:
        """Take an answer; the next request, None when there is nothing more to say."""
        talk.steps += 1
        talk.to = sender
        corrections = self._take(answer.claims, answer.deltas, sender, now, tell=not talk.join)
        for delta in answer.deltas:
            talk.wanted.pop(delta.uid, None)
        if not answer.more:
            talk.wanted.clear()
        if not talk.only:
            for want in self._wants(answer.claims):
                talk.wanted[want.uid] = want
        claims = [*corrections, *self._unknown_there(talk, answer)]
        deltas, _ = self._deltas(answer.wants)
        wants = tuple(talk.wanted.values())[:MAX_SYNC_WANTS]
        if talk.steps >= MAX_STEPS or not (claims or wants or deltas):
            return None
        return SyncRequest(claims=(*self._mine(sender.uid), *claims), wants=wants, deltas=tuple(deltas))

    def _mine(self, to: str) -> tuple[Claim, ...]:
        """The own claim, what the other should refute, and news: where datagrams are dropped, they go this way."""
        about = self._membership.members.about(to)
        told = self._membership.rumours.take_claims(_CLAIMS_ROOM, self._membership.limit)
        mine = self._membership.me.claim()
        return (mine, *told) if about is None else (mine, about, *told)

    def _take(
        self, claims: Sequence[Claim], deltas: Sequence[Delta], sender: Party, now: float, *, tell: bool
    ) -> list[Claim]:
        """Believe what is said; returns what the sender should hear better."""
        membership = self._membership
        for claim in claims:
            membership.hear(claim, sender.uid, now, sync=True)
        tell = tell and len(deltas) <= FEW
        for delta in deltas:
            membership.merge(delta, sender.uid, now, tell=tell)
        corrections: list[Claim] = []
        for claim in claims:
            known = membership.members.by_uid.get(claim.uid)
            about = membership.members.about(claim.uid)
            if known is not None and known.generation > claim.generation:
                corrections.append(known.claim())  # a process that must rise above an earlier one of its own
            elif about is not None and about.rank > claim.rank and claim.uid != sender.uid:
                corrections.append(about)
        return corrections

    def _live(self, buckets: Iterable[int], without: str) -> list[Claim]:
        members = self._membership.members
        found = [members.by_uid[uid] for n in buckets for uid in members.buckets[n] if uid != without]
        return [member.claim() for member in found if member.standing is not Standing.DEAD]

    def _wants(self, claims: Iterable[Claim]) -> tuple[Want, ...]:
        membership = self._membership
        wants: list[Want] = []
        for claim in claims:
            known = claim.uid in membership.gone or claim.uid in membership.members.forgotten
            if known or claim.uid == membership.me.uid or claim.standing is Standing.DEAD or not claim.version:
                continue
            if membership.newer(claim.uid, claim.generation, claim.version):
                wants.append(membership.want(claim.uid))
        return tuple(wants[:MAX_SYNC_WANTS])

    def _deltas(self, wants: Iterable[Want]) -> tuple[list[Delta], bool]:
        """What was asked for, as far as one message may carry, and whether some of it is left over."""
        deltas: list[Delta] = []
        room = MAX_SYNC_ENTRIES
        for want in wants:
            replica = self._membership.replica(want.uid)
            if replica is None or not replica.version:
                continue
            if (want.generation, want.version) >= (replica.generation, replica.version):
                continue
            if room <= 0:
                return deltas, True
            delta = replica.delta(want.version if want.generation == replica.generation else 0)
            deltas.append(delta)
            room -= len(delta.items)
        return deltas, False

    def _unknown_there(self, talk: Conversation, answer: SyncAnswer) -> list[Claim]:
        """Live members of the differing buckets that the other lacks, or has an older version of."""
        membership = self._membership
        there = {claim.uid: (claim.generation, claim.version) for claim in answer.claims}
        found: list[Claim] = []
        for n in answer.buckets:
            for uid in membership.members.buckets[n]:
                claim = membership.members.by_uid[uid].claim()
                if claim.standing is Standing.DEAD or uid == talk.to.uid:
                    continue
                if there.get(uid, (0, 0)) < (claim.generation, claim.version) or uid not in there:
                    found.append(claim)
        return found
