"""What the agents believe of each other, held against the truth."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import msgspec

from sidecar.core.messages import Standing
from sidecar.loops.gossip import GossipPeers
from sidecar.model import Record

from .pool import SimPool, SimWorker

# A dead agent is known to be dead within this time by everyone, the network being good.
LONGEST_DETECTION = 12.0


class Views:
    """Watches who is held dead, or alive, by whom.

    `upset(seconds)`: something that may rightly make a live agent look dead goes on for so long; `trouble` names the
    workers that nobody can be blamed for thinking dead, `confused` those that can't be blamed for what they think.
    """

    def __init__(self, pool: SimPool) -> None:
        self.pool = pool
        self.upset_until = 0.0
        self.trouble: Counter[str] = Counter()
        self.confused: Counter[str] = Counter()
        self.checked: Counter[str] = Counter()
        self.accusations = 0
        self._dead: dict[int, frozenset[str]] = {}
        self._gone: dict[str, float] = {}

    def upset(self, seconds: float) -> None:
        """Nobody is to blame for what is believed until then."""
        self.upset_until = max(self.upset_until, asyncio.get_running_loop().time() + seconds)

    def speakers(self) -> dict[str, tuple[SimWorker, GossipPeers]]:
        """The agents that gossip, by UID."""
        return {
            w.uid: (w, w.gossip) for w in self.pool.workers.values() if w.agent is not None and w.gossip is not None
        }

    def look(self) -> Iterator[str]:
        """Faults: live agents that came to be held dead for no reason, dead ones that are held alive for too long."""
        now = asyncio.get_running_loop().time()
        speakers = self.speakers()
        for worker, gossip in speakers.values():
            members = gossip.speaker.gossip.members
            before = self._dead.get(id(gossip), frozenset())
            if members.dead == before:
                continue
            fresh = members.dead - before
            self._dead[id(gossip)] = frozenset(members.dead)
            for uid in sorted(fresh & speakers.keys()):
                self.accusations += 1
                accused = speakers[uid][0]
                blameless = self.confused[worker.key] or self.trouble[accused.key]
                if now > self.upset_until and not blameless and now - accused.started > 10.0:
                    yield f"{worker.key} holds {accused.key} dead, which lives"
        self.checked["false death"] += 1
        yield from self._undead(now, speakers)

    def _undead(self, now: float, speakers: dict[str, tuple[SimWorker, GossipPeers]]) -> Iterator[str]:
        held = {
            uid: (worker.key, gossip.speaker.gossip.members)
            for worker, gossip in speakers.values()
            if not self.trouble[worker.key]
            for uid in gossip.speaker.gossip.members.by_uid.keys() - gossip.speaker.gossip.members.dead
            if uid not in speakers
        }
        self._gone = {uid: self._gone.get(uid, now) for uid in held}
        for uid, since in self._gone.items():
            if now - max(since, self.upset_until) > LONGEST_DETECTION:
                yield f"{held[uid][0]} holds {uid} alive {now - since:.0f} s after its death"
                self._gone[uid] = now

    def unequal(self) -> list[str]:
        """What is not the same everywhere, everything being quiet: nothing when all views are equal and true."""
        wrong: list[str] = []
        workers = [w for w in self.pool.workers.values() if w.agent is not None]
        speakers = self.speakers()
        for worker in workers:
            wrong += self._seen_wrongly(worker, workers)
            if worker.gossip is not None:
                wrong += self._held_wrongly(worker, worker.gossip, speakers)
        return wrong

    def _seen_wrongly(self, worker: SimWorker, workers: list[SimWorker]) -> Iterator[str]:
        view = worker.peers.view()
        for other in workers:
            if other is worker:
                continue
            assert other.agent is not None
            seen = view.get(other.name)
            if seen is None or not seen.alive:
                yield f"{worker.key} sees {other.key} {'dead' if seen else 'nowhere'}"
            elif _said(seen.record) != _said(other.agent.record):
                yield f"{worker.key} has an old record of {other.key}"
        names = {w.name for w in workers}
        yield from (f"{worker.key} sees {n} alive" for n, seen in view.items() if seen.alive and n not in names)

    def _held_wrongly(
        self, worker: SimWorker, gossip: GossipPeers, speakers: dict[str, tuple[SimWorker, GossipPeers]]
    ) -> Iterator[str]:
        members = gossip.speaker.gossip.members
        for uid, (other, theirs) in speakers.items():
            if other is worker:
                continue
            member, truth = members.by_uid.get(uid), theirs.speaker.gossip.membership.me
            if member is None or member.standing is not Standing.ALIVE:
                yield f"{worker.key} holds {other.key} {member.standing.name if member else 'unknown'}"
            elif (member.generation, member.version) != (truth.generation, truth.version):
                yield f"{worker.key} has version {member.version} of {other.key}, not {truth.version}"
        for uid, member in members.by_uid.items():
            if uid not in speakers and member.standing is not Standing.DEAD:
                yield f"{worker.key} holds {uid} {member.standing.name}"


def _said(record: Record) -> Record:
    """A record without what gossip itself writes into it, and without an order of its entries."""
    entries = tuple(sorted(record.entries, key=lambda e: e.adapter))
    head = msgspec.structs.replace(record.head, generation=0)
    return msgspec.structs.replace(record, version=0, head=head, entries=entries)
