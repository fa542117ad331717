"""New content under a served name: one worker at a time in rank order, while another serves."""

from __future__ import annotations

from sidecar.core.drafts import Draft, refused_by
from sidecar.core.handover import loaded_elsewhere
from sidecar.core.memory import spoken
from sidecar.core.world import Swap
from sidecar.model import Adapter, State

CHANGING = (State.LOADING, State.DRAINING)
ON_ITS_WAY = (State.LOADED, State.LOADING, State.DRAINING, State.DOWNLOADING, State.PENDING)


def change_over(draft: Draft, adapter: Adapter, have: str, want: str) -> None:
    """`have` is loaded and `want` lies on the disk: take the turn, drain if another serves, and swap."""
    world, key, name = draft.world, adapter.key, adapter.served_name
    if name in world.busy_names:
        under_way(draft, adapter, want)
        return
    mode = draft.cache.verdict(adapter, want)
    if mode == "hold":
        draft.held(adapter, have)
        return
    reason = _not_yet(draft, adapter, want)
    if reason is not None:
        draft.loaded(adapter, have, message=reason)
        return
    swap = Swap(key=key, name=name, old=have, new=want, reset=mode == "reset", witnesses=_others(draft, key))
    if not swap.witnesses:
        draft.say(key, State.LOADING, name, revision=want, routed=True)
        draft.act(swap)
        return
    ready = draft.drained(name, max(adapter.drain_seconds, world.rules.look_again_seconds))
    draft.draining(adapter, have)
    if ready:
        draft.act(swap)


def under_way(draft: Draft, adapter: Adapter, want: str, message: str = "") -> None:
    """A change of this name has begun. Who serves it alone keeps its traffic meanwhile: it was never withdrawn."""
    world, name = draft.world, adapter.served_name
    withdrawn = name in world.memory.drains
    if withdrawn:
        draft.drained(name, adapter.drain_seconds)
    routed = name in world.owned and not withdrawn
    draft.say(adapter.key, State.LOADING, name, revision=want, message=message, routed=routed)


def _not_yet(draft: Draft, adapter: Adapter, want: str) -> str | None:
    """Why it is not this worker's turn, or None."""
    world, key = draft.world, adapter.key
    retry = draft.retry(adapter, want)
    if retry is not None and world.now < retry.not_before:
        draft.wake(retry.not_before)
        return spoken(retry.message, retry.not_before, world.now)
    if not (world.members_fresh and world.adapters_fresh and world.settled) or world.isolated:
        return "new content waits: not all workers of the pool are in view"
    entries = {n: p.entries[key] for n, p in world.peers.items() if p.alive and key in p.entries}
    refuser = refused_by(world, key, want)
    if refuser is not None:
        return f"new content waits: the engine of {refuser} refused it"
    # A copy that the platform doesn't route to yet is no other that serves: without it this worker would seem alone,
    # and change over under its traffic.
    busy = {n for n, e in entries.items() if e.state in CHANGING or e.hidden}
    changing = sorted(n for n in _targets(draft, key) if n in busy)
    if changing and adapter.served_name not in world.memory.drains:
        return f"new content waits: {changing[0]} is changing over"
    for name in _before_me(draft, key):
        entry = entries.get(name)
        behind = entry is not None and entry.revision != want and not entry.avoid and entry.state in ON_ITS_WAY
        if behind:
            return f"new content waits: {name} changes over first"
    return None


def _targets(draft: Draft, key: str) -> tuple[str, ...]:
    assignment = draft.world.assignments.get(key)
    return assignment.targets if assignment else ()


def _before_me(draft: Draft, key: str) -> tuple[str, ...]:
    targets = _targets(draft, key)
    me = draft.world.me
    return targets[: targets.index(me)] if me in targets else targets


def _others(draft: Draft, key: str) -> tuple[str, ...]:
    world = draft.world
    fresh = world.now - world.rules.witness_age
    return tuple(sorted(n for n in world.peers if loaded_elsewhere(world, key, n, fresh)))
