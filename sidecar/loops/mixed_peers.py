"""Gossip, and the agents of the pool that don't speak it yet: while a key is rolled out, both must know each other.

Whoever the backend lists and gossip doesn't hold alive is asked for its record, as without gossip. It is believed only
if it says that it doesn't speak gossip; one that does, and isn't heard that way, has another key and is no peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sidecar.core.namesakes import seniority
from sidecar.loops.gossip import GossipPeers
from sidecar.model import Member, Problem, Record
from sidecar.ports import Clock, Observed, Peers, Row

# Gossip finds whoever speaks it within this time, so that a new agent doesn't ask all of a large pool at once.
PATIENCE = 3.0
# A peer that has just started is heard by gossip so soon: until then its silence isn't worth a word.
GRACE = 5.0
_SHOWN = 5

MembersOf = Callable[[], tuple[Member, ...] | None]


class AskedPeers(Peers, Protocol):
    """The peers that are asked for their records."""

    def problems(self) -> Sequence[Problem]:
        """What a person should know of them."""


class Unreached:
    """The listed members that gossip hasn't held alive for a while: whom to ask. The same tuple until that changes."""

    def __init__(self, gossip: GossipPeers, members: MembersOf, clock: Clock) -> None:
        self._gossip, self._members, self._clock = gossip, members, clock
        self._since: dict[tuple[str, str], float] = {}
        self.found: tuple[Member, ...] = ()

    def __call__(self) -> tuple[Member, ...] | None:
        """None while the members are unknown."""
        listed = self._members()
        if listed is None:
            return None
        now = self._clock()
        missing = self._missing(listed)
        self._since = {
            (member.address, member.uid): self._since.get((member.address, member.uid), now) for member in missing
        }
        found = tuple(m for m in missing if now - self._since[m.address, m.uid] >= PATIENCE)
        if found != self.found:
            self.found = found
        return self.found

    def _missing(self, listed: tuple[Member, ...]) -> list[Member]:
        gossip = self._gossip.speaker.gossip
        members = gossip.members
        living = (members.by_uid.keys() - members.dead) | {gossip.me.uid}
        missing = [m for m in listed if (m.uid or gossip.found_at.get(m.address, "")) not in living]
        if all(member.uid for member in missing):
            return missing
        # A seed has no uid: it is who has its address.
        here = {gossip.membership.me.address, *(members.by_uid[uid].address for uid in living & members.by_uid.keys())}
        return [member for member in missing if member.uid or member.address not in here]


class MixedPeers:
    """Implements the port `Peers`. Only for the event loop's thread."""

    def __init__(self, gossip: GossipPeers, asked: AskedPeers, members: MembersOf, clock: Clock) -> None:
        """`members` lists the pool, `asked` must be made with an `Unreached` of the same gossip and members."""
        self._gossip, self._asked = gossip, asked
        self._members, self._clock = members, clock
        self._since: dict[str, float] = {}

    def view(self) -> Mapping[str, Observed]:
        """See Peers."""
        self._strangers()
        known, plain = self._gossip.view(), self._plain()
        if not plain:
            return known
        return {**known, **{name: seen for name, seen in plain.items() if _counts(seen, known.get(name))}}

    def unheard(self) -> frozenset[str]:
        """See Peers."""
        missing = self._gossip.unheard()
        if not missing:
            return missing
        heads = [seen.record.head for seen in self._plain().values()]
        uids, addresses = {head.uid for head in heads}, {head.address for head in heads}
        heard = {
            member.name or member.address
            for member in self._members() or ()
            if (member.uid in uids if member.uid else member.address in addresses)
        }
        return missing - heard

    def namesake(self) -> Record | None:
        """See Peers."""
        plain = self._asked.namesake()
        return self._gossip.namesake() or (plain if plain is not None and not plain.head.gossip else None)

    def announce(self, record: Record) -> None:
        """See Peers."""
        self._gossip.announce(record)
        self._asked.announce(record)

    async def ask(self, name: str) -> Record:
        """See Peers."""
        plain = self._plain().get(name)
        if plain is not None and _counts(plain, self._gossip.view().get(name)):
            return await self._asked.ask(name)
        return await self._gossip.ask(name)

    async def run(self, changed: Callable[[], None]) -> None:
        """See Peers. Raises EdgeError when gossip's port can't be opened."""
        loops = [asyncio.ensure_future(self._gossip.run(changed)), asyncio.ensure_future(self._asked.run(changed))]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    def problems(self) -> Sequence[Problem]:
        """What gossip has to say, whoever is no peer for having another key, and whoever doesn't speak gossip yet."""
        strangers = self._strangers()
        plain = [name for name, seen in self._plain().items() if seen.alive]
        found = [*self._gossip.problems(), *self._asked.problems()]
        found += [
            Problem(
                where=f"worker {seen.record.head.name}",
                message=f"the agent at {seen.record.head.address} speaks gossip with another key (or with "
                "--insecure-gossip) than this one, and is no peer of it; give both the same --gossip-key-file",
            )
            for seen in strangers[:_SHOWN]
        ]
        if plain:
            more = f" and {len(plain) - _SHOWN} more" if len(plain) > _SHOWN else ""
            found.append(
                Problem(
                    where="gossip",
                    message=f"{', '.join(sorted(plain)[:_SHOWN])}{more} don't speak gossip and are asked for their "
                    "records instead, which is slower; an agent begins with gossip at its first start with a key file",
                )
            )
        return tuple(found)

    def rows(self) -> Mapping[str, Row]:
        """What gossip knows beyond the records, by worker name; see GossipPeers.rows."""
        known, plain = self._gossip.view(), self._plain()
        return {
            name: row
            for name, row in self._gossip.rows().items()
            if name not in plain or not _counts(plain[name], known.get(name))
        }

    def _plain(self) -> dict[str, Observed]:
        """Who was asked and doesn't speak gossip."""
        return {name: seen for name, seen in self._asked.view().items() if not seen.record.head.gossip}

    def _strangers(self) -> list[Observed]:
        """Who speaks gossip, but not with this agent, though it is there; and not for being slow or off its time."""
        now, skewed = self._clock(), self._gossip.speaker.skewed
        seen = {
            o.record.head.uid: o
            for o in self._asked.view().values()
            if o.alive and o.record.head.gossip and o.record.head.uid not in skewed
        }
        self._since = {uid: self._since.get(uid, now) for uid in seen}
        return [o for uid, o in seen.items() if now - self._since[uid] >= GRACE]


def _counts(plain: Observed, known: Observed | None) -> bool:
    """Whether the asked one of that name is the worker rather than the one that gossip knows."""
    if known is None or plain.alive is not known.alive:
        return known is None or plain.alive
    return seniority(plain.record) < seniority(known.record)
