"""Every worker gets a reason, and the right one."""

from __future__ import annotations

from hypothesis import given

from sidecar.core.explain import Explained, explain
from sidecar.core.placement import Worker, place, rank
from sidecar.model import Adapter, Selector
from tests.core import reference
from tests.core.placing import FEWER, adapter, some_adapters, some_workers, worker, workers


def explained(one: Adapter, pool: list[Worker], *before: Adapter) -> dict[str, Explained]:
    placed = place([one, *before], pool)
    return {row.worker: row for row in explain(one, pool, placed[one.key])}


def test_every_reason_not_to_be_a_candidate_is_told() -> None:
    pool = [
        worker("worker-0"),
        worker("cordoned", cordoned=True),
        worker("ending", terminating=True),
        worker("stranger", base_models=("llama", "llama-70b")),
        worker("unlabelled", labels={"gpu": "a10"}),
        worker("mute", up=False, labels={"gpu": "h100"}),
    ]
    pool[0] = worker("worker-0", labels={"gpu": "h100"})
    rows = explained(adapter("a", selector=Selector(labels={"gpu": "h100"})), pool)
    assert {name: row.why for name, row in rows.items()} == {
        "worker-0": "target 1 of 2 wanted",
        "cordoned": "it is cordoned",
        "ending": "its pod is terminating",
        "stranger": "it serves llama, llama-70b, not base",
        "unlabelled": "its labels don't match spec.workers",
        "mute": "it is not heard, or its engine does not answer",
    }
    assert [name for name, row in rows.items() if row.member] == ["worker-0", "mute"]
    assert [name for name, row in rows.items() if row.candidate] == ["worker-0"]


def test_a_full_worker_is_told_from_one_that_is_beaten() -> None:
    one = adapter("a", replicas=1, created=2)
    first, second, third = (name for name, _ in rank(one, workers(3)))
    pool = [worker(first, room=0), worker(second), worker(third)]
    rows = explained(one, pool)
    assert list(rows) == [second, first, third]
    assert rows[first].why == "full: its room for 0 goes to adapters that come before this one"
    assert rows[second].why == "target 1 of 1 wanted"
    assert rows[third].why == "1 wanted, and as many have higher scores"
    assert [row.rank for row in rows.values()] == [0, None, None]


def test_a_worker_passed_over_for_another_zone_says_so() -> None:
    one = adapter("a", replicas=2)
    names = [name for name, _ in rank(one, workers(3))]
    pool = [worker(name, zone="far" if i == 2 else "near") for i, name in enumerate(names)]
    assert explained(one, pool)[names[1]].why == "2 wanted, and its zone 'near' has its share already"


def test_avoiding_and_resting_are_told_for_targets_as_well() -> None:
    pool = [worker("a", avoids=frozenset({"default/x"})), worker("b", resting=True), worker("c")]
    assert explained(adapter("x", replicas=1), pool)["a"].why == "it asked to be passed over for it"
    rows = explained(adapter("x"), pool)
    assert [row.why.partition(", ")[0] for row in rows.values()] == [f"target {i} of 3 wanted" for i in (1, 2, 3)]
    assert rows["a"].why.endswith("although it asked to be passed over for it: there is nobody else")
    assert rows["b"].why.endswith("although it rests after its engine died twice: there is nobody else")


def test_replicas_zero_is_told() -> None:
    assert explained(adapter("a", replicas=0), workers(1))["worker-0"].why.startswith("none are wanted")


@given(adapters=some_adapters(), pool=some_workers(least=1))
@FEWER
def test_agrees_with_the_placement(adapters: list[Adapter], pool: list[Worker]) -> None:
    placed = place(adapters, pool)
    used = {w.name: 0 for w in pool}
    for key, assignment in placed.items():
        one = next(a for a in adapters if a.key == key)
        rows = explain(one, pool, assignment)
        assert sorted(row.worker for row in rows) == sorted(w.name for w in pool)
        assert tuple(row.worker for row in rows if row.target) == assignment.targets
        assert [row.rank for row in rows if row.target] == list(range(len(assignment.targets)))
        assert {row.worker: row.score for row in rows} == {n: f"{s:016x}" for n, s in rank(one, pool)}
        for row in rows:
            w = next(w for w in pool if w.name == row.worker)
            assert row.member == reference.fits(one, w)
            full = used[w.name] >= w.room
            assert not row.why.startswith("full") or full
            assert row.worker not in assignment.waiting or row.why.startswith("full")
        for t in assignment.targets:
            used[t] += 1
