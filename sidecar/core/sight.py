"""From what the edges know to what placement and the planner see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sidecar.core.placement import Assignment
from sidecar.core.pool import Worker
from sidecar.core.selector import matches
from sidecar.core.world import Peer
from sidecar.model import Adapter, Decision, EngineView, Head, Member, Record


def worker_of(peer: Peer, member: Member | None = None) -> Worker:
    """A peer as placement sees it. Zone and terminating come from the backend where it lists the worker."""
    head = peer.head
    return Worker(
        name=head.name,
        uid=head.uid,
        zone=(member.zone if member else "") or head.zone,
        base_models=frozenset(head.base_models),
        labels=head.labels,
        room=max(0, head.capacity - head.foreign),
        up=peer.alive and head.engine_up,
        cordoned=head.cordoned,
        terminating=head.terminating or (member.terminating if member else False),
        resting=head.resting,
        avoids=frozenset(k for k, e in peer.entries.items() if e.avoid),
    )


class Roster:
    """Everybody in the pool, this worker included, as the members' list and the records have it.

    With UIDs (Kubernetes) a record counts only for the member with that UID; without (standalone) the members are mere
    addresses, and the workers are those whose records came from them; `unheard` counts the addresses without one.
    """

    def __init__(self, me: Peer, members: Sequence[Member], peers: Mapping[str, Peer], unheard: int) -> None:
        by_name = {m.name: m for m in members if m.uid}
        self.by_uid = bool(by_name)
        self.peers: dict[str, Peer] = {}
        for name, peer in peers.items():
            member = by_name.get(name)
            if not self.by_uid or (member is not None and member.uid == peer.head.uid):
                self.peers[name] = peer
        self.workers = [worker_of(p, by_name.get(p.head.name)) for p in (me, *self.peers.values())]
        # The same, with those as up whose engines have not answered for the first time yet.
        self.hoped = [
            msgspec.structs.replace(w, up=p.alive and (w.up or not p.head.engine_seen))
            for w, p in zip(self.workers, (me, *self.peers.values()), strict=True)
        ]
        # Others that are listed and not ending; `strangers` among them have not said yet who they are.
        self.heirs = [w for w in self.workers[1:] if not w.terminating]
        silent = {m.name for m in by_name.values() if not m.terminating} - self.peers.keys() - {me.head.name}
        self.strangers = bool(silent) if self.by_uid else unheard > 0
        others = sum(1 for m in members if m.uid and m.name != me.head.name) if self.by_uid else len(self.peers)
        self.listed = 1 + others
        self.reached = 1 + sum(1 for p in self.peers.values() if p.alive)
        self.unheard = others - len(self.peers) if self.by_uid else unheard

    @property
    def complete(self) -> bool:
        """Every listed worker has said who it is and what its engine first answered."""
        return self.unheard <= 0 and all(p.head.engine_seen for p in self.peers.values())


def unmatched(adapters: Iterable[Adapter], assignments: Mapping[str, Assignment], roster: Roster) -> frozenset[str]:
    """Keys of adapters that fit no worker at all, cordoned or ending ones included; empty while anybody is unheard."""
    if not roster.complete:
        return frozenset()
    return frozenset(
        a.key
        for a in adapters
        if a.key in assignments
        and not assignments[a.key].members
        and not any(a.base_model in w.base_models and matches(a.selector, w.labels) for w in roster.workers)
    )


def heirless(adapters: Iterable[Adapter], roster: Roster) -> frozenset[str]:
    """Keys of adapters that no other worker could ever take over: all others are ending too, or there are none, or
    they serve another base model or have other labels.

    Who is cordoned, down, dead or still starting may come (back), so it counts as one that could.
    """
    if roster.strangers:
        return frozenset()
    return frozenset(
        a.key
        for a in adapters
        if not any(
            (a.base_model in w.base_models or not w.base_models) and matches(a.selector, w.labels) for w in roster.heirs
        )
    )


def split_names(engine: EngineView | None, revisions_dir: str) -> tuple[dict[str, str], frozenset[str]]:
    """(served name -> revision of what lies in our directory, all other names that the engine serves)."""
    owned: dict[str, str] = {}
    foreign: set[str] = set()
    prefix = revisions_dir.rstrip("/") + "/"
    for name, root in (engine.adapters if engine else {}).items():
        tail = root.removeprefix(prefix).rstrip("/")
        if root.startswith(prefix) and tail and "/" not in tail:
            owned[name] = f"sha256:{tail}"
        else:
            foreign.add(name)
    return owned, frozenset(foreign)


def told_decisions(peers: Iterable[Peer]) -> dict[str, list[Decision]]:
    """Every decision that this worker has heard of from others, by the adapter's key.

    One look at each entry: asking every peer about every adapter would take a tenth of a second with a thousand each.
    """
    told: dict[str, list[Decision]] = {}
    for peer in peers:
        for entry in peer.entries.values():
            if entry.decision is not None:
                told.setdefault(entry.adapter, []).append(entry.decision)
    return told


def base_model_names(engine: EngineView | None, configured: str) -> tuple[str, ...]:
    """Every name under which this engine's base model may be asked for."""
    names = {configured} if configured else set()
    for model in engine.base_models if engine else ():
        names |= {model.id, model.root}
    return tuple(sorted(names - {""}))


def as_peer(record: Record, heard: float, alive: bool) -> Peer:
    """A record, its entries indexed by adapter."""
    return Peer(head=record.head, entries={e.adapter: e for e in record.entries}, heard=heard, alive=alive)


def own_head(template: Head, **changes: object) -> Head:
    """`template` with some fields replaced."""
    fields = {f: getattr(template, f) for f in template.__struct_fields__}
    return Head(**{**fields, **changes})
