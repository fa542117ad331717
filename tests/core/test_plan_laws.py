"""The planner's laws, on worlds of every kind."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.core.drafts import wanted_revision
from sidecar.core.handover import has_wanted, is_deletion, loaded_elsewhere
from sidecar.core.memory import FOREVER, PROVEN_SECONDS, Retry
from sidecar.core.placement import place
from sidecar.core.plan import plan
from sidecar.core.report import entries
from sidecar.core.sight import worker_of
from sidecar.core.world import Fetch, Load, Peer, Swap, Unload, World
from sidecar.model import Adapter, Entry, Head, State

from .random_worlds import WORLDS, some_world
from .worlds import BASE, ME

LAWS = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])


def by_key(seen: World, key: str) -> Adapter | None:
    return next((a for a in seen.catalog.active if a.key == key), None)


def taken_away(seen: World) -> list[Unload | Swap]:
    return [a for a in plan(seen).actions if isinstance(a, Unload | Swap)]


@LAWS
@given(WORLDS, st.sampled_from(["adapters_fresh", "members_fresh", "engine", "isolated"]))
def test_unknown_is_never_empty(seen: World, unknown: str) -> None:
    """While a list is unknown nothing is taken away, and nobody's traffic but what was on its way already."""
    change: dict[str, Any] = {unknown: {"engine": None, "isolated": True}.get(unknown, False)}
    if unknown == "engine":
        change["owned"] = {}
    blind = msgspec.structs.replace(seen, **change)
    assert taken_away(blind) == []
    if unknown in ("adapters_fresh", "members_fresh", "isolated"):
        for key, status in plan(blind).statuses.items():
            kept = status.served_name in blind.owned and status.served_name not in blind.going
            assert status.routed or not kept or status.served_name in blind.busy_names, key


@LAWS
@given(WORLDS)
def test_a_copy_goes_only_when_the_targets_report_theirs(seen: World) -> None:
    fresh = seen.now - seen.rules.witness_age
    for action in taken_away(seen):
        each = by_key(seen, action.key)
        if not isinstance(action, Unload) or each is None:
            continue
        if is_deletion(seen, each):
            continue
        placed = seen.assignments[each.key]
        assert ME not in placed.targets
        if not placed.targets:
            assert placed.short  # pushed out by others
            continue
        decided = seen.decisions.get(each.key)
        wanted = decided.revision if decided and decided.revision not in seen.quarantined else None
        having = [t for t in placed.targets if has_wanted(seen, each.key, t, wanted, fresh)]
        told = {n: p.entries[each.key] for n, p in seen.peers.items() if each.key in p.entries}
        able = [t for t in placed.targets if t not in told or not told[t].avoid]
        out_of_patience = seen.now - seen.memory.leaving.get(each.key, seen.now) >= seen.rules.handover_patience
        assert (having and set(able) <= set(having)) or out_of_patience
        assert any(loaded_elsewhere(seen, each.key, n, fresh) for n in seen.peers)
        assert action.handover
        assert set(having) <= set(action.witnesses)


@LAWS
@given(WORLDS)
def test_foreign_names_are_left_alone(seen: World) -> None:
    made = plan(seen)
    assert not [a for a in made.actions if not isinstance(a, Fetch) and a.name in seen.foreign]
    assert not made.drains.keys() & seen.foreign
    assert not [s for s in made.statuses.values() if s.routed and s.served_name in seen.foreign]


@LAWS
@given(WORLDS)
def test_each_action_fits_what_the_engine_lists(seen: World) -> None:
    for action in plan(seen).actions:
        if isinstance(action, Load):
            assert seen.engine is not None
            assert action.name not in seen.engine.adapters
        elif isinstance(action, Unload):
            assert seen.owned[action.name] == action.revision
        elif isinstance(action, Swap):
            assert seen.owned[action.name] == action.old != action.new


@LAWS
@given(WORLDS)
def test_at_most_one_action_a_name_and_none_on_a_busy_one(seen: World) -> None:
    actions = plan(seen).actions
    names = [a.name for a in actions if not isinstance(a, Fetch)]
    keys = [a.key for a in actions if isinstance(a, Fetch)]
    assert len(names) == len(set(names))
    assert len(keys) == len(set(keys))
    assert not set(names) & seen.busy_names
    assert not set(keys) & seen.busy_fetches.keys()


@LAWS
@given(WORLDS)
def test_traffic_goes_only_to_what_is_loaded_with_the_right_root(seen: World) -> None:
    for key, status in plan(seen).statuses.items():
        if status.routed and status.state == State.LOADED:
            assert seen.owned[status.served_name] == status.revision, key
        elif status.routed:
            # Alone and changing over back to back: the old one is still there.
            assert status.state == State.LOADING
            assert status.served_name in seen.owned
        if status.state == State.LOADED:
            assert status.routed, key


@LAWS
@given(WORLDS)
def test_the_traffic_goes_before_the_copy(seen: World) -> None:
    made = plan(seen)
    for action in made.actions:
        if isinstance(action, Unload) or (isinstance(action, Swap) and action.witnesses):
            each = by_key(seen, action.key)
            seconds = each.drain_seconds if each else seen.memory.drain_seconds.get(action.name, 5)
            assert seen.now - seen.withdrawn[action.name] >= seconds
            assert seen.now - seen.memory.drains[action.name] >= seconds
            assert not [s for s in made.statuses.values() if s.served_name == action.name and s.routed]


@LAWS
@given(WORLDS)
def test_who_swaps_without_a_drain_serves_alone(seen: World) -> None:
    fresh = seen.now - seen.rules.witness_age
    for action in taken_away(seen):
        if isinstance(action, Swap):
            others = [n for n in seen.peers if loaded_elsewhere(seen, action.key, n, fresh)]
            assert sorted(action.witnesses) == sorted(others)


@LAWS
@given(WORLDS)
def test_what_is_loaded_is_on_the_disk_and_wanted_and_not_poison(seen: World) -> None:
    banned = {r for r, b in seen.memory.banned.items() if seen.now < b.until}
    for action in plan(seen).actions:
        if isinstance(action, Load | Swap):
            each = by_key(seen, action.key)
            new = action.revision if isinstance(action, Load) else action.new
            assert each is not None
            assert each.key in seen.mine
            assert new in seen.disk
            assert new == wanted_revision(seen, each)
            assert new not in banned
            held = seen.memory.held.get(each.key)
            proven = held is not None and held.revision == new and seen.now - held.since >= PROVEN_SECONDS
            assert proven or new not in seen.quarantined
            assert seen.settled


@LAWS
@given(WORLDS)
def test_what_the_prefix_cache_holds_back_is_not_loaded(seen: World) -> None:
    process = seen.engine.process if seen.engine else None
    for action in plan(seen).actions:
        if not isinstance(action, Load | Swap) or not seen.stale_cache:
            continue
        new = action.revision if isinstance(action, Load) else action.new
        past = {h.revision for h in seen.memory.history if h.name == action.name}
        each = by_key(seen, action.key)
        if past <= {new} or (each and each.on_stale_prefix_cache == "Replace"):
            continue
        assert action.reset
        assert process not in seen.memory.no_reset


@LAWS
@given(WORLDS)
def test_a_refused_update_leaves_the_old_revision_alone(seen: World) -> None:
    for action in taken_away(seen):
        refused = seen.memory.refused.get(action.key)
        if isinstance(action, Swap) and refused is not None and action.new == refused.revision:
            assert seen.memory.previous.get(action.key) not in seen.disk - {refused.revision}


@LAWS
@given(WORLDS)
def test_nothing_is_fetched_before_the_peers_have_spoken_nor_what_is_there(seen: World) -> None:
    for action in plan(seen).actions:
        if isinstance(action, Fetch):
            assert seen.settled
            assert action.key in seen.mine
            assert action.trial or action.expected not in seen.disk


@LAWS
@given(WORLDS)
def test_each_target_gets_a_word(seen: World) -> None:
    made = plan(seen)
    assert seen.mine <= made.statuses.keys()
    assert made.wake_at > seen.now


@LAWS
@given(WORLDS, WORLDS)
def test_the_plan_is_a_function_of_the_world(seen: World, other: World) -> None:
    first = plan(seen)
    plan(other)
    again = plan(seen)
    assert msgspec.structs.asdict(first) == msgspec.structs.asdict(again)


@LAWS
@given(WORLDS)
def test_one_bad_adapter_changes_nothing_for_the_others(seen: World) -> None:
    keys = [a.key for a in seen.catalog.active]
    if not keys or [a for a in seen.catalog.active if a.served_name == "shared"]:
        return
    bad, memory = keys[0], msgspec.structs.replace(seen.memory, retries=dict(seen.memory.retries))
    memory.retries[bad] = Retry(by_key(seen, bad).source_id, 9, FOREVER, "bad", True)  # type: ignore[union-attr]  # it is there
    spoiled = msgspec.structs.replace(seen, memory=memory)
    suspects = {s.revision for s in seen.memory.suspicions}
    theirs = [a for a in plan(seen).actions if a.key not in ("", bad)]
    still = [a for a in plan(spoiled).actions if a.key not in ("", bad)]
    # A suspect comes last, and is let in earlier when others stop trying.
    assert [a for a in theirs if not _of(a, suspects)] == [a for a in still if not _of(a, suspects)]


def _of(action: Fetch | Load | Unload | Swap, revisions: set[str]) -> bool:
    return isinstance(action, Load) and action.revision in revisions


# -- asking to be passed over is steady


@LAWS
@given(WORLDS, st.integers(1, 3))
def test_asking_to_be_passed_over_never_swings(seen: World, size: int) -> None:
    """Placed by what it asks for, it asks for the same again: else it would come and go for ever."""
    told: tuple[Entry, ...] = ()
    history = []
    for _ in range(8):
        head = Head(name=ME, uid="me", base_models=(BASE,), capacity=size, engine_up=True, engine_seen=True)
        mine = Peer(head=head, entries={e.adapter: e for e in told}, heard=seen.now, alive=True)
        placed = place(seen.catalog.active, [worker_of(p) for p in (mine, *seen.peers.values())])
        targets = frozenset(k for k, a in placed.items() if ME in a.targets)
        made = plan(msgspec.structs.replace(seen, assignments=placed, mine=targets))
        told = entries({}, made.statuses, {}, {}, seen.memory, seen.now)
        history.append((targets, frozenset(e.adapter for e in told if e.avoid)))
    assert history[-1] == history[-2]


def test_the_worlds_are_not_dull() -> None:
    """The laws above hold of something: every kind of action and of waiting is drawn."""
    kinds: set[str] = set()
    for seed in range(3000):
        made = plan(some_world(seed))
        for action in made.actions:
            kinds.add(type(action).__name__)
            kinds.add("handover" if isinstance(action, Unload) and action.handover else "")
            kinds.add("reset" if isinstance(action, Load | Swap) and action.reset else "")
            kinds.add("witnessed" if isinstance(action, Swap) and action.witnesses else "")
            kinds.add("trial" if isinstance(action, Fetch) and action.trial else "")
        kinds.update(s.state.value for s in made.statuses.values())
        kinds.update("held" for s in made.statuses.values() if s.held)
    wanted = {"Fetch", "Load", "Unload", "Swap", "handover", "reset", "witnessed", "trial", "held", *map(str, State)}
    assert wanted <= kinds
