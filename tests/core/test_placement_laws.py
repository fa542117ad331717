"""What holds for any pool and any adapters: agreement with the literal rules, minimal moves, room, zones, avoiding."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core import placement_blocks
from sidecar.core.placement import Worker, in_order, place, place_plainly
from sidecar.core.placement_blocks import place_in_blocks
from sidecar.core.pool import Pool
from sidecar.model import Adapter
from tests.core import reference
from tests.core.placing import FEWER, Placement, adapter, some_adapters, some_workers, worker

PLENTY = st.just(1_000)
HEALTHY = some_workers(room=PLENTY, most=8)


def holders(placed: Placement) -> dict[str, set[str]]:
    return {key: set(a.targets) for key, a in placed.items()}


@given(adapters=some_adapters(), pool=some_workers())
def test_follows_the_literal_rules(adapters: list[Adapter], pool: list[Worker]) -> None:
    assert place(adapters, pool) == reference.place(adapters, pool)


@given(adapters=some_adapters(), pool=some_workers())
def test_blocks_agree_with_plain_python(adapters: list[Adapter], pool: list[Worker]) -> None:
    ordered = in_order(adapters)
    assert place_in_blocks(ordered, Pool(pool)) == place_plainly(ordered, Pool(pool))


@pytest.mark.parametrize("block_scores", [1, 100])
@given(data=st.data(), pool=some_workers(least=30, most=60, room=st.integers(0, 6)))
@settings(max_examples=20)
def test_heads_of_rankings_agree_with_whole_ones(block_scores: int, data: st.DataObject, pool: list[Worker]) -> None:
    """Pools in which adapters want few of many, nearly all room gets used, and rows come in several blocks."""
    adapters = data.draw(some_adapters(most=30))
    adapters += [adapter(f"many-{i}", replicas=1 + i % 5, priority=i % 3) for i in range(data.draw(st.integers(0, 90)))]
    ordered = in_order(adapters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement_blocks, "BLOCK_SCORES", block_scores)
        patch.setattr(placement_blocks, "ADAPTERS_AT_ONCE", 7)
        assert place_in_blocks(ordered, Pool(pool)) == place_plainly(ordered, Pool(pool))


@pytest.mark.parametrize("room", [2, 4, 6, 40])
def test_heads_agree_where_small_zones_seldom_reach_them(room: int) -> None:
    """Of 200 workers three stand in zones of their own; with room for 2 each, a third of the adapters finds none."""
    pool = [worker(f"worker-{i}", zone={0: "b", 1: "b", 2: "c"}.get(i, "a"), room=room) for i in range(200)]
    ordered = in_order([adapter(f"a-{i}", replicas=1 + i % 5, spread="zone" if i % 7 else "none") for i in range(220)])
    placed = place_plainly(ordered, Pool(pool))
    assert place_in_blocks(ordered, Pool(pool)) == placed
    assert any(a.short for a in placed.values()) == (room == 2)


@given(data=st.data(), adapters=some_adapters(), pool=some_workers())
@FEWER
def test_independent_of_the_order_of_inputs(data: st.DataObject, adapters: list[Adapter], pool: list[Worker]) -> None:
    shuffled = place(data.draw(st.permutations(adapters)), data.draw(st.permutations(pool)))
    assert list(shuffled.items()) == list(place(adapters, pool).items())


@given(adapters=some_adapters(), pool=some_workers())
@FEWER
def test_nobody_gets_more_than_it_has_room_for(adapters: list[Adapter], pool: list[Worker]) -> None:
    load = Counter(t for a in place(adapters, pool).values() for t in a.targets)
    assert all(load[w.name] <= w.room for w in pool)


@given(adapters=some_adapters(), pool=some_workers())
@FEWER
def test_short_only_if_every_other_candidate_is_full(adapters: list[Adapter], pool: list[Worker]) -> None:
    placed = place(adapters, pool)
    load = Counter(t for a in placed.values() for t in a.targets)
    by_key = {a.key: a for a in adapters}
    for key, assignment in placed.items():
        assert len(assignment.targets) + assignment.short == assignment.wanted
        assert not set(assignment.targets) & set(assignment.waiting)
        if assignment.short:
            idle = [w for w in pool if w.up and reference.fits(by_key[key], w) and w.name not in assignment.targets]
            assert all(load[w.name] == w.room for w in idle)
            assert len(assignment.waiting) >= min(assignment.short, len(idle))
        else:
            assert not assignment.waiting


@given(adapters=some_adapters(), pool=HEALTHY, leaver=st.integers(0, 7))
def test_who_leaves_moves_only_what_it_held(adapters: list[Adapter], pool: list[Worker], leaver: int) -> None:
    """Read backwards: who joins takes only what it will hold. A percentage may also change its number by one."""
    if leaver >= len(pool):
        return
    name = pool[leaver].name
    before, after = place(adapters, pool), place(adapters, [w for w in pool if w.name != name])
    for a in adapters:
        had, has = before[a.key], after[a.key]
        if had.wanted == has.wanted or a.distribution.strategy != "percentage":
            stayed = set(had.targets) - {name}
            assert stayed <= set(has.targets)
            assert len(set(has.targets) - stayed) <= (name in had.targets)
        else:
            assert had.wanted == has.wanted + 1
            assert set(has.targets) <= set(had.targets)


@given(pool=HEALTHY, percentages=st.tuples(st.integers(0, 100), st.integers(0, 100)))
@FEWER
def test_a_smaller_number_drops_the_last_in_rank(pool: list[Worker], percentages: tuple[int, int]) -> None:
    low, high = sorted(percentages)
    few = place([adapter("a", percentage=low)], pool)["default/a"].targets
    many = place([adapter("a", percentage=high)], pool)["default/a"].targets
    assert many[: len(few)] == few


@given(adapters=some_adapters(), pool=some_workers(room=PLENTY), down=st.sets(st.integers(0, 8)))
@FEWER
def test_a_percentage_counts_engines_that_are_down(adapters: list[Adapter], pool: list[Worker], down: set[int]) -> None:
    changed = [worker_with(w, up=w.up and i not in down) for i, w in enumerate(pool)]
    before, after = place(adapters, pool), place(adapters, changed)
    assert {k: a.wanted for k, a in before.items()} == {k: a.wanted for k, a in after.items()}


@given(adapters=some_adapters(), pool=HEALTHY, victim=st.integers(0, 7), chosen=st.integers(0, 11))
@FEWER
def test_avoiding_moves_that_adapter_only(
    adapters: list[Adapter], pool: list[Worker], victim: int, chosen: int
) -> None:
    if victim >= len(pool) or chosen >= len(adapters):
        return
    key = adapters[chosen].key
    changed = [worker_with(w, avoids=w.avoids | {key}) if i == victim else w for i, w in enumerate(pool)]
    before, after = place(adapters, pool), place(adapters, changed)
    assert len(before[key].targets) == len(after[key].targets)
    assert {k: a for k, a in before.items() if k != key} == {k: a for k, a in after.items() if k != key}


@given(adapters=some_adapters(), pool=some_workers(room=PLENTY))
@FEWER
def test_zones_differ_by_one_at_most_while_they_have_workers(adapters: list[Adapter], pool: list[Worker]) -> None:
    willing = [worker_with(w, avoids=frozenset(), resting=False) for w in pool]
    zone = {w.name: w.zone for w in pool}
    by_key = {a.key: a for a in adapters}
    for key, assignment in place(adapters, willing).items():
        if by_key[key].distribution.spread == "none":
            continue
        had = Counter(zone[t] for t in assignment.targets)
        size = Counter(w.zone for w in pool if w.up and reference.fits(by_key[key], w))
        most = max(had.values(), default=0)
        assert all(had[z] >= min(most - 1, size[z]) for z in size)


@given(pool=some_workers(room=st.integers(0, 3)), count=st.integers(0, 15))
@FEWER
def test_later_adapters_take_nothing_from_earlier_ones(pool: list[Worker], count: int) -> None:
    several = [adapter(f"a-{i}", replicas=2, created=i) for i in range(count + 1)]
    with_all, without_last = place(several, pool), place(several[:-1], pool)
    assert {k: a for k, a in with_all.items() if k != several[-1].key} == without_last


def worker_with(w: Worker, **changes: object) -> Worker:
    fields = {f: getattr(w, f) for f in w.__struct_fields__}
    return worker(**(fields | changes))  # type: ignore[arg-type]  # fields of Worker by name


def test_two_full_workers_swap_when_priorities_do() -> None:
    """Targets bound by capacity alone: each of two full workers may be told to hold what the other holds."""
    pool = [worker("worker-0", room=1), worker("worker-1", room=1)]
    swapped = 0
    for i in range(40):
        a, b = (adapter(f"{n}-{i}", replicas=1, created=c) for n, c in (("a", 1), ("b", 2)))
        older_b = adapter(b.name, replicas=1, created=0)
        before, after = holders(place([a, b], pool)), holders(place([a, older_b], pool))
        for placed in (before, after):
            assert sorted(t for who in placed.values() for t in who) == ["worker-0", "worker-1"]
        swapped += before != after
    assert swapped
