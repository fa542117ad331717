"""When a worker that stopped being a target may let go of its copy: make before break."""

from __future__ import annotations

from sidecar.core.placement import Assignment
from sidecar.core.world import Peer, World
from sidecar.model import Adapter, Entry, State


def loaded_elsewhere(world: World, key: str, name: str, fresh_after: float) -> bool:
    """Whether `name` serves `key` right now, as reported since `fresh_after`, whatever the revision."""
    peer = world.peers.get(name)
    if peer is None or not _speaks(peer, fresh_after):
        return False
    entry = peer.entries.get(key)
    return entry is not None and _serves(entry)


def has_wanted(world: World, key: str, name: str, wanted: str | None, fresh_after: float) -> bool:
    """Whether target `name` reports the wanted revision loaded (or an older one because its engine refused it)."""
    peer = world.peers.get(name)
    if peer is None or not _speaks(peer, fresh_after):
        return False
    entry = peer.entries.get(key)
    if entry is None or not _serves(entry):
        return False
    return wanted is None or entry.revision == wanted or entry.refused == wanted


def _serves(entry: Entry) -> bool:
    return entry.state == State.LOADED and not entry.hidden


def _speaks(peer: Peer, fresh_after: float) -> bool:
    return peer.alive and peer.head.engine_up and peer.heard >= fresh_after


def is_deletion(world: World, adapter: Adapter) -> bool:
    """No target by will: replicas or percentage zero, or a selector that fits no worker of the pool."""
    d = adapter.distribution
    if d.strategy == "fixed" and d.replicas == 0:
        return True
    if d.strategy == "percentage" and d.percentage == 0:
        return True
    return adapter.key in world.unmatched


def may_drop(world: World, adapter: Adapter, since: float) -> bool:
    """Whether this worker, no target of `adapter` since `since`, may start to let its copy go.

    The last copy that is known never goes; while anything is unknown nothing goes. When this worker's pod ends and
    there is nobody to hand over to, waiting helps nobody: it goes after the time that a replacement needs to be listed.
    """
    if not world.adapters_fresh or not world.members_fresh or not world.settled:
        return False
    if adapter.key in world.heirless:
        return is_deletion(world, adapter) or world.now >= patience_ends(world, adapter.key, since)
    if world.isolated:
        return False
    if is_deletion(world, adapter):
        return True
    assignment = world.assignments.get(adapter.key)
    if assignment is None:
        return False
    if not assignment.targets:
        return assignment.short > 0 and bool(assignment.waiting) and _own_targets_loaded(world)
    return _targets_hold(world, adapter, assignment, since)


def patience_ends(world: World, key: str, since: float) -> float:
    """When this worker, no target of `key` since `since`, waits no longer for others to take it over."""
    if key in world.heirless:
        return world.heirless[key] + world.rules.heir_seconds
    return since + world.rules.handover_patience


def _targets_hold(world: World, adapter: Adapter, assignment: Assignment, since: float) -> bool:
    fresh = world.now - world.rules.witness_age
    decision = world.decisions.get(adapter.key)
    # Nobody newly loads what is in quarantine: a target that serves anything is all that can be waited for.
    wanted = decision.revision if decision and decision.revision not in world.quarantined else None
    holding = [t for t in assignment.targets if has_wanted(world, adapter.key, t, wanted, fresh)]
    missing = [t for t in assignment.targets if t not in holding and not _avoids(world, adapter.key, t)]
    if holding and not missing:
        return True
    if world.now < patience_ends(world, adapter.key, since):
        return False
    # Of several that hold on for targets that never report, the first by name stays: each must not count on the other.
    return any(
        loaded_elsewhere(world, adapter.key, name, fresh)
        for name in world.peers
        if name in assignment.targets or name < world.me
    )


def _avoids(world: World, key: str, name: str) -> bool:
    peer = world.peers.get(name)
    entry = peer.entries.get(key) if peer else None
    return entry is not None and entry.avoid


def _own_targets_loaded(world: World) -> bool:
    names = {a.key: a.served_name for a in world.catalog.active}
    return all(names[key] in world.owned for key in world.mine if key in names)


def witnesses(world: World, adapter: Adapter) -> tuple[str, ...]:
    """The peers whose word decided, to be asked again directly before the unload."""
    assignment = world.assignments.get(adapter.key)
    targets = assignment.targets if assignment else ()
    holders = (n for n, p in world.peers.items() if adapter.key in p.entries and p.entries[adapter.key].revision)
    return tuple(dict.fromkeys([*(t for t in targets if t in world.peers), *holders]))
