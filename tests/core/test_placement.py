"""Who holds what: published placements, the table of strategies, and one example for each rule."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from sidecar.core.placement import place, rank
from sidecar.core.pool import wanted
from sidecar.model import Distribution, Selector
from tests.core import reference
from tests.core.placing import adapter, targets, worker, workers

VECTORS = json.loads(reference.VECTORS.read_text())


@pytest.mark.parametrize("case", VECTORS["placements"], ids=lambda c: c["title"])
def test_published_placements(case: dict[str, Any]) -> None:
    placed = place(
        [reference.read_adapter(a) for a in case["adapters"]], [reference.read_worker(w) for w in case["workers"]]
    )
    assert {key: reference.written(a) for key, a in placed.items()} == case["expected"]


@pytest.mark.parametrize(
    ("pool", "distribution", "count"),
    [
        (3, {}, 3),
        (3, {"replicas": 2}, 2),
        (3, {"percentage": 34}, 1),
        (4, {"replicas": 10}, 4),
        (4, {"percentage": 50}, 2),
        (4, {"percentage": 10}, 1),
        (4, {}, 4),
        (4, {"replicas": 0}, 0),
        (4, {"percentage": 0}, 0),
        (4, {"percentage": 100}, 4),
        (5, {"replicas": 2}, 2),
    ],
)
def test_each_strategy_holds_its_number(pool: int, distribution: dict[str, int], count: int) -> None:
    found = place([adapter("a", **distribution)], workers(pool))["default/a"]  # type: ignore[arg-type]  # by name
    assert (len(found.targets), found.wanted, found.short, found.waiting) == (count, count, 0, ())


@pytest.mark.parametrize(
    ("percentage", "members", "count"),
    [(34, 3, 1), (66, 3, 1), (67, 3, 2), (99, 3, 2), (1, 1_000, 10), (1, 99, 1), (1, 0, 0), (100, 7, 7), (29, 100, 29)],
)
def test_percentages_round_down_but_to_one_at_least(percentage: int, members: int, count: int) -> None:
    assert wanted(Distribution(strategy="percentage", percentage=percentage), members) == count


def test_a_percentage_does_not_shrink_while_an_engine_restarts() -> None:
    pool = workers(4)
    held = targets([adapter("a", percentage=50)], pool)["a"]
    down = [worker(w.name, up=w.name != held[0]) for w in pool]
    left = targets([adapter("a", percentage=50)], down)["a"]
    assert len(left) == 2
    assert held[1] in left


def test_a_fixed_number_beyond_the_engines_that_are_up_is_short_but_waits_nowhere() -> None:
    found = place([adapter("a", replicas=3)], [*workers(2), worker("worker-2", up=False)])["default/a"]
    assert (found.members, found.wanted, len(found.targets), found.short, found.waiting) == (3, 3, 2, 1, ())


def test_cordoned_and_terminating_workers_are_no_members() -> None:
    pool = [worker("worker-0", cordoned=True), worker("worker-1", terminating=True), worker("worker-2")]
    found = place([adapter("a", percentage=100)], pool)["default/a"]
    assert (found.members, found.targets) == (1, ("worker-2",))


def test_room_goes_to_priority_then_age_then_name() -> None:
    several = [
        adapter("z-urgent", replicas=1, priority=1, created=9),
        adapter("m-old", replicas=1, created=1),
        adapter("a-new", replicas=1, created=2),
        adapter("b-new", replicas=1, created=2),
    ]
    for room, served in [(1, {"z-urgent"}), (2, {"z-urgent", "m-old"}), (3, {"z-urgent", "m-old", "a-new"})]:
        found = targets(several, [worker("worker-0", room=room)])
        assert {name for name, who in found.items() if who} == served


def test_what_finds_no_room_waits_where_it_would_be() -> None:
    first = adapter("first", replicas=3, created=1)
    second = adapter("second", replicas=2, created=2)
    found = place([second, first], workers(3, room=1))
    ideal = place([second], workers(3))
    assert found["default/second"].targets == ()
    assert set(found["default/second"].waiting) == set(ideal["default/second"].targets)
    assert found["default/second"].short == 2


def test_room_is_left_to_workers_further_down_before_anything_waits() -> None:
    order = [name for name, _ in rank(adapter("a"), workers(4))]
    pool = [worker(name, room=0 if name in order[:2] else 5) for name in order]
    found = place([adapter("a", replicas=2)], pool)["default/a"]
    assert (found.targets, found.waiting) == (tuple(order[2:]), ())


def test_zero_room_holds_nothing() -> None:
    assert targets([adapter("a")], [worker("worker-0", room=0)]) == {"a": ()}


def test_one_worker_in_each_zone_before_a_second_in_any() -> None:
    pool = [*workers(6, zone="a"), worker("b", zone="b"), worker("c", zone="c")]
    for i in range(20):
        found = targets([adapter(f"three-{i}", replicas=3), adapter(f"five-{i}", replicas=5)], pool)
        assert {"b", "c"} <= set(found[f"three-{i}"])
        assert set(found[f"five-{i}"][:3]) >= {"b", "c"}


def test_without_spread_only_the_score_counts() -> None:
    pool = [*workers(6, zone="a"), worker("b", zone="b"), worker("c", zone="c")]
    for i in range(20):
        one = adapter(f"a-{i}", replicas=3, spread="none")
        assert targets([one], pool)[one.name] == tuple(name for name, _ in rank(one, pool)[:3])


def test_a_full_zone_gives_its_turn_to_the_others() -> None:
    pool = [worker("b", zone="b", room=0), *workers(3, zone="a")]
    assert set(targets([adapter("a", replicas=2)], pool)["a"]) < {"worker-0", "worker-1", "worker-2"}


def test_who_avoids_an_adapter_comes_last_but_is_never_removed() -> None:
    pool = [worker("worker-0", avoids=frozenset({"default/a"})), worker("worker-1"), worker("worker-2", resting=True)]
    found = targets([adapter("a", replicas=1), adapter("b", replicas=2), adapter("all")], pool)
    assert found["a"] == ("worker-1",)
    assert found["b"][:2] in {("worker-0", "worker-1"), ("worker-1", "worker-0")}
    assert found["all"][2] == "worker-2"
    assert targets([adapter("a", replicas=1)], [pool[0]])["a"] == ("worker-0",)


def test_one_avoided_adapter_moves_no_other() -> None:
    several = [adapter(f"a-{i}", replicas=1) for i in range(20)]
    before = targets(several, workers(5))
    worst = before["a-7"][0]
    pool = [worker(w.name, avoids=frozenset({"default/a-7"} if w.name == worst else ())) for w in workers(5)]
    after = targets(several, pool)
    assert after["a-7"] != before["a-7"]
    assert {n: t for n, t in after.items() if n != "a-7"} == {n: t for n, t in before.items() if n != "a-7"}


def test_a_pod_in_several_slices_counts_once() -> None:
    twice = [worker("worker-0"), worker("worker-0"), worker("worker-1")]
    found = place([adapter("a"), adapter("b", percentage=100)], twice)
    assert [a.members for a in found.values()] == [2, 2]
    assert sorted(found["default/a"].targets) == ["worker-0", "worker-1"]


def test_a_pod_that_one_slice_calls_terminating_is_no_member() -> None:
    pair = [worker("worker-0"), worker("worker-0", terminating=True)]
    assert targets([adapter("a")], pair) == targets([adapter("a")], pair[::-1]) == {"a": ()}


def test_a_pod_under_two_names_counts_once() -> None:
    pair = [worker("worker-1", uid="same"), worker("worker-0", uid="same")]
    assert targets([adapter("a")], pair) == targets([adapter("a")], pair[::-1]) == {"a": ("worker-0",)}


def test_of_two_adapters_with_one_key_the_same_counts_for_everyone() -> None:
    pair = [adapter("a", replicas=1, uid="2"), adapter("a", replicas=2, uid="1")]
    assert targets(pair, workers(3)) == targets(pair[::-1], workers(3)) == targets(pair[1:], workers(3))


def test_of_two_pods_with_one_name_the_smaller_uid_stays() -> None:
    pair = [worker("worker-0", uid="b", labels={"is": "b"}), worker("worker-0", uid="a", labels={"is": "a"})]
    chosen = [adapter("a", selector=Selector(labels={"is": "a"})), adapter("b", selector=Selector(labels={"is": "b"}))]
    assert targets(chosen, pair) == targets(chosen, pair[::-1]) == {"a": ("worker-0",), "b": ()}


def test_thirty_adapters_spread_and_a_new_worker_takes_its_share_only() -> None:
    """Name-sorted first-N would put all of them on the first worker, and reshuffle for an early name."""
    several = [adapter(f"adapter-{i}", replicas=1) for i in range(30)]
    before = targets(several, workers(5))
    assert max(Counter(t for (t,) in before.values()).values()) <= 12
    after = targets(several, [worker("a-first"), *workers(5)])
    moved = [name for name in before if after[name] != before[name]]
    assert all(after[name] == ("a-first",) for name in moved)
    assert 1 <= len(moved) <= 10


def test_two_adapters_of_one_moment_are_both_placed() -> None:
    found = targets([adapter("a", replicas=1, created=7), adapter("b", replicas=1, created=7)], workers(3))
    assert all(len(t) == 1 for t in found.values())


def test_rank_lists_everyone_members_or_not() -> None:
    pool = [*workers(3), worker("worker-3", cordoned=True), worker("worker-4", base_models=("other",), up=False)]
    ranked = rank(adapter("a"), pool)
    assert sorted(name for name, _ in ranked) == [w.name for w in pool]
    assert [s for _, s in ranked] == sorted((s for _, s in ranked), reverse=True)
    assert ranked == rank(adapter("a"), pool[::-1])
