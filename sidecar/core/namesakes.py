"""Agents by worker name: of two live ones with one name, the earlier is the worker."""

from __future__ import annotations

from sidecar.core.members import Member, Members
from sidecar.core.messages import Standing
from sidecar.model import Record


def seniority(record: Record) -> tuple[int, str]:
    """Sorts the agents of one name, the rightful one first; every agent comes to the same order."""
    return (record.head.generation, record.head.uid)


class Names:
    """Who goes by which name, as of one state of the table."""

    def __init__(self, members: Members) -> None:
        # The agent that counts for each name: the senior of the live ones, else the one heard last.
        self.shown: dict[str, tuple[Member, Record]] = {}
        # A live agent that had this agent's own name first.
        self.namesake: Record | None = None
        # Live agents whose name a senior one has: (name, address of the senior, address of this one).
        self.twice: list[tuple[str, str, str]] = []
        own = members.me.replica.record()
        by_name: dict[str, list[tuple[Member, Record]]] = {}
        for member in members.by_uid.values():
            record = member.replica.record()
            if record is not None:
                by_name.setdefault(record.head.name, []).append((member, record))
        for name, found in by_name.items():
            self._settle(name, found, own if own is not None and own.head.name == name else None)
        self.twice.sort()

    def _settle(self, name: str, found: list[tuple[Member, Record]], own: Record | None) -> None:
        living = [(member, record) for member, record in found if member.standing is not Standing.DEAD]
        if not living:
            self.shown[name] = max(found, key=lambda each: (each[0].heard, each[0].uid))
            return
        living.sort(key=lambda each: seniority(each[1]))
        self.shown[name] = living[0]
        records = sorted([record for _, record in living] + ([own] if own else []), key=seniority)
        self.twice += [(name, records[0].head.address, later.head.address) for later in records[1:]]
        if own is not None and records[0] is not own:
            self.namesake = records[0]


def heard(member: Member, last_contact: float) -> float:
    """When what is known of it was right at the latest.

    Who counts as alive is vouched for by the whole pool, so by anyone who was heard; a suspect is not.
    """
    return max(member.heard, last_contact) if member.standing is Standing.ALIVE else member.heard
