"""The planner: from what this worker sees to what it does next, and what it says of itself.

`plan` is a function of its argument alone. Killed after any prefix of its actions and started again without volatile
memory, an agent reaches the same end state. The laws it keeps, each a property test:

- Unknown is never empty: with the adapters, the members or the engine unknown it fetches and loads, and takes nothing.
- Make before break: a copy goes when the targets report theirs, never the last one known.
- Route away, wait, unload, keep the files.
- An update never costs the old revision, and changes one worker at a time in rank order.
"""

from __future__ import annotations

from sidecar.core import handover, update
from sidecar.core.drafts import Draft, blocked, refused_by, wanted_revision
from sidecar.core.memory import spoken, trial
from sidecar.core.poison import suspected
from sidecar.core.world import Fetch, Load, Plan, Unload, World
from sidecar.model import Adapter, Decision, Listing, State

__all__ = ["plan"]

UNSETTLED = "waiting for the peers' first records"


def plan(world: World) -> Plan:
    """What this worker should do now. Pure; raises nothing."""
    draft = Draft(world)
    for adapter in world.catalog.active:
        if adapter.key in world.mine:
            _target(draft, adapter)
        else:
            _not_target(draft, adapter)
    for key, message in world.catalog.rejected.items():
        draft.say(key, State.REJECTED, "", message=message)
    _orphans(draft)
    return draft.finish()


def _target(draft: Draft, adapter: Adapter) -> None:
    world, name = draft.world, adapter.served_name
    have = world.owned.get(name) if world.engine else None
    if world.engine and name in world.foreign:
        draft.say(adapter.key, State.FAILED, name, message=_foreign_message(name))
        return
    if name in world.going:
        update.under_way(draft, adapter, have or "", message="changing over")
        return
    want = wanted_revision(world, adapter)
    if have is not None and have == want:
        draft.loaded(adapter, have)
        _refresh(draft, adapter)
        return
    if want is None or want not in world.disk:
        _fetch(draft, adapter, have)
        return
    why = blocked(world, adapter.key, want)
    if why is not None:
        draft.rejected(adapter, want, why, have)
    elif world.engine is None:
        draft.say(adapter.key, State.PENDING, name, revision=want, message=world.engine_message)
    elif have is not None:
        update.change_over(draft, adapter, have, want)
    else:
        _load(draft, adapter, want)
    _refresh(draft, adapter)


def _foreign_message(name: str) -> str:
    return (
        f"the engine already serves {name!r} from outside this agent's directory (--lora-modules or a resolver); "
        "it is left alone. Give the adapter another servedName, or take that one away."
    )


def _load(draft: Draft, adapter: Adapter, want: str) -> None:
    world, name, key = draft.world, adapter.served_name, adapter.key
    if name in world.busy_names:
        draft.say(key, State.LOADING, name, revision=want)
        return
    retry = draft.retry(adapter, want)
    if retry is not None and world.now < retry.not_before:
        state = State.REJECTED if retry.rejected else State.FAILED
        draft.wake(retry.not_before)
        draft.say(key, state, name, revision=want, message=spoken(retry.message, retry.not_before, world.now))
        return
    verdict = draft.cache.verdict(adapter, want)
    if verdict == "hold":
        draft.held(adapter, "")
        return
    if not world.settled:
        draft.say(key, State.PENDING, name, revision=want, message=UNSETTLED)
        return
    # What has served here before is no start.
    refuser = refused_by(world, key, want) if world.memory.previous.get(key) != want else None
    if refuser is not None:
        message = f"the engine of {refuser} refused this content: nobody else starts with it until the source changes"
        draft.say(key, State.PENDING, name, revision=want, message=message, held=True)
        return
    draft.say(key, State.LOADING, name, revision=want)
    suspect = want in suspected(world.memory, world.now)
    draft.load(Load(key=key, name=name, revision=want, reset=verdict == "reset"), last=suspect)


def _fetch(draft: Draft, adapter: Adapter, have: str | None) -> None:
    """The content isn't here yet. What is loaded (`have`) goes on serving meanwhile.

    An agent that has just started would fetch what others hold, before it has heard of them.
    """
    world, key = draft.world, adapter.key
    decision = world.decisions.get(key)
    progress = world.busy_fetches.get(key)
    retry = draft.retry(adapter, decision.revision if decision else "")
    message, state = "", State.DOWNLOADING
    if progress is None:
        state, message = _start_fetch(draft, adapter, decision) if world.settled else (State.PENDING, UNSETTLED)
    if have is not None:
        draft.loaded(adapter, have, message=message or "new content is being fetched")
        return
    if retry is not None and progress is None and not message:
        message = retry.message
    draft.say(
        key,
        state,
        adapter.served_name,
        revision=decision.revision if decision else "",
        message=message,
    )


def _start_fetch(draft: Draft, adapter: Adapter, decision: Decision | None) -> tuple[State, str]:
    world, key = draft.world, adapter.key
    retry = draft.retry(adapter, decision.revision if decision else "")
    if retry is not None and world.now < retry.not_before:
        draft.wake(retry.not_before)
        refresh = _refresh_due(draft, adapter, decision)
        if refresh is None:
            message = spoken(retry.message, retry.not_before, world.now)
            return (State.REJECTED if retry.rejected else State.FAILED), message
        draft.act(refresh)
        return State.DOWNLOADING, ""
    if decision is not None:
        refresh = _refresh_due(draft, adapter, decision)
        draft.act(refresh or _fetch_decided(key, decision))
        return State.DOWNLOADING, ""
    first = draft.first_in_rank(key)
    if first and first != world.me and key in world.memory.large:
        _fetch_ahead(draft, adapter, first)
        return State.PENDING, f"waiting for {first} to settle which content the pool takes"
    draft.act(Fetch(key=key, refresh=0, limit=None if first in (None, world.me) else world.rules.small_content))
    return State.DOWNLOADING, ""


def _fetch_ahead(draft: Draft, adapter: Adapter, first: str) -> None:
    """What the first in rank will most likely decide on comes already, from its download that is under way."""
    peer = draft.world.peers.get(first)
    entry = peer.entries.get(adapter.key) if peer is not None and peer.alive else None
    coming = entry.coming if entry is not None else None
    if coming is None or coming.source_id != adapter.source_id or not draft.world.rules.peer_bytes:
        return
    listing = Listing(files=coming.listing, archive=coming.archive)
    draft.act(Fetch(key=adapter.key, refresh=coming.refresh, listing=listing, ahead=True))


def _fetch_decided(key: str, decision: Decision) -> Fetch:
    listing = Listing(files=decision.listing, archive=decision.archive) if decision.listing else None
    return Fetch(key=key, refresh=decision.refresh, listing=listing, expected=decision.revision)


def _refresh_due(draft: Draft, adapter: Adapter, decision: Decision | None) -> Fetch | None:
    """A new look at the origin, by the first in rank alone: on time, or when nobody can have the decided bytes."""
    world, key = draft.world, adapter.key
    if key in world.busy_fetches or draft.first_in_rank(key) != world.me or adapter.source.digest is not None:
        return None
    looked, refresh = trial(world.memory, adapter), decision.refresh + 1 if decision else 0
    if decision is not None and draft.bytes_are_gone(key, decision):
        due, compare = looked.not_before if looked else 0.0, None
    elif adapter.source.refresh_seconds > 0 and (decision or looked):
        due, compare = world.memory.refreshed.get(adapter.source_id, 0.0) + adapter.source.refresh_seconds, decision
    else:
        return None
    if world.now < due:
        draft.wake(due)
        return None
    return Fetch(key=key, refresh=refresh, compare=compare, trial=True)


def _refresh(draft: Draft, adapter: Adapter) -> None:
    action = _refresh_due(draft, adapter, draft.world.decisions.get(adapter.key))
    if action is not None and draft.world.settled:
        draft.act(action)


def _not_target(draft: Draft, adapter: Adapter) -> None:
    world, name, key = draft.world, adapter.served_name, adapter.key
    have = world.owned.get(name) if world.engine else None
    assignment = world.assignments.get(key)
    if name in world.going and name in world.busy_names and name not in world.memory.drains:
        update.under_way(draft, adapter, have or "", message="changing over")
        return
    if have is None:
        if key in world.prefetch and not draft.avoids(adapter):
            _prefetch(draft, adapter)
        elif assignment and world.me in assignment.waiting and world.me not in assignment.targets:
            draft.say(key, State.WAITING, name, message="no room here: other adapters come first within this capacity")
        return
    since = draft.leaving_since(key)
    if name in world.going:
        draft.drained(name, 0.0)
        draft.draining(adapter, have)
        return
    if not handover.may_drop(world, adapter, since):
        draft.loaded(adapter, have)
        draft.wake(handover.patience_ends(world, key, since))
        return
    deletion = handover.is_deletion(world, adapter)
    wait = adapter.drain_seconds if deletion else max(adapter.drain_seconds, world.rules.look_again_seconds)
    if not draft.drained(name, wait):
        draft.draining(adapter, have)
        return
    draft.draining(adapter, have)
    if name not in world.busy_names and not world.terminating:
        asked = () if deletion else handover.witnesses(world, adapter)
        draft.act(Unload(name=name, revision=have, key=key, handover=not deletion, witnesses=asked))


def _prefetch(draft: Draft, adapter: Adapter) -> None:
    """It will be a target when its engine is up: then the files are here."""
    want = wanted_revision(draft.world, adapter)
    if want is None or want not in draft.world.disk:
        _fetch(draft, adapter, None)
        return
    message = draft.world.engine_message
    draft.say(adapter.key, State.PENDING, adapter.served_name, revision=want, message=message)


def _orphans(draft: Draft) -> None:
    """Names of ours that belong to no adapter any more: deleted, renamed, or deleted while nobody was looking."""
    world = draft.world
    if world.engine is None or world.isolated or not (world.adapters_fresh and world.members_fresh):
        return
    claimed = {a.served_name for a in world.catalog.active}
    for name, revision in world.owned.items():
        if name in claimed or name in world.busy_names:
            continue
        if draft.drained(name, world.memory.drain_seconds.get(name, 5)):
            draft.act(Unload(name=name, revision=revision))
