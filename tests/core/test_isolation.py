"""What a worker holds that reaches less than half of its pool."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.placement import Worker, isolated, place, place_isolated
from sidecar.model import Adapter
from tests.core.placing import FEWER, adapter, some_adapters, some_workers, targets, worker, workers


@pytest.mark.parametrize(
    ("reached", "listed", "doubts"),
    [(1, 1, False), (1, 2, False), (1, 3, True), (2, 4, False), (2, 5, True), (10, 10, False), (3, 2, False)],
)
def test_doubts_itself_below_half(reached: int, listed: int, doubts: bool) -> None:
    assert isolated(reached, listed) == doubts


def alone(pool: list[Worker], me: str) -> list[Worker]:
    """The pool as `me` sees it when it reaches nobody."""
    return [w if w.name == me else worker(w.name, zone=w.zone, room=w.room, up=False) for w in pool]


def test_ten_workers_cut_off_from_each_other_still_hold_everything() -> None:
    """If each believed that it is alone, ten would hold the same four adapters and nobody the other thirty-six."""
    pool = workers(10, room=4)
    several = [adapter(f"a-{i}", replicas=1) for i in range(40)]
    before = targets(several, pool)
    held = {w.name: frozenset(f"default/{n}" for n, who in before.items() if w.name in who) for w in pool}
    after = {w.name: place_isolated(several, pool, alone(pool, w.name), w.name, held[w.name]) for w in pool}
    assert after == held
    naive = Counter(t for w in pool for t, who in targets(several, alone(pool, w.name)).items() if w.name in who)
    assert len(naive) == 4


def test_free_room_takes_over_what_the_unreachable_held() -> None:
    pool = workers(3, room=10)
    several = [adapter(f"a-{i}", replicas=1) for i in range(8)]
    assert len(place_isolated(several, pool, alone(pool, "worker-0"), "worker-0", frozenset())) == 8


def test_free_room_goes_to_the_first_in_order() -> None:
    pool = workers(5, room=3)
    several = [adapter(f"a-{i}", replicas=1, created=i) for i in range(15)]
    me = "worker-1"
    own = {key for key, a in place(several, pool).items() if me in a.targets}
    held = frozenset(sorted(own)[:1])
    hold = place_isolated(several, pool, alone(pool, me), me, held)
    added = [i for i in range(15) if f"default/a-{i}" in hold - own]
    others = [i for i in range(15) if f"default/a-{i}" not in own]
    assert added == others[: len(added)]


@given(
    adapters=some_adapters(),
    pool=some_workers(least=1, room=st.integers(0, 6)),
    down=st.sets(st.integers(0, 8)),
    held=st.sets(st.integers(0, 11)),
)
@FEWER
def test_keeps_and_takes_what_it_should_and_no_more(
    adapters: list[Adapter], pool: list[Worker], down: set[int], held: set[int]
) -> None:
    me = pool[0].name
    kept = frozenset(a.key for i, a in enumerate(adapters) if i in held)
    reachable = [w for i, w in enumerate(pool) if i == 0 or i not in down]
    hold = place_isolated(adapters, pool, reachable, me, kept)
    given_by_all = {key for key, a in place(adapters, pool).items() if me in a.targets}
    given_by_reachable = {key for key, a in place(adapters, reachable).items() if me in a.targets}
    assert kept | given_by_all <= hold <= kept | given_by_all | given_by_reachable
    assert len(hold) <= max(pool[0].room, len(kept | given_by_all))
