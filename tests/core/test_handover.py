"""Make before break: when a copy may go, and when it must not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.handover import has_wanted, is_deletion, loaded_elsewhere, may_drop, patience_ends, witnesses
from sidecar.core.plan import plan
from sidecar.core.world import World
from sidecar.model import Distribution, State

from .worlds import NOW, R1, R2, adapter, drained, entry, fixed, peer, world

A = adapter("a", distribution=fixed(2))
ONE = peer("worker-1", entry(A))
TWO = peer("worker-2", entry(A))
LATE = NOW - 600.0


def moved(*targets: str, **fields: Any) -> World:
    base: dict[str, Any] = {"targets": {"a": targets}, "wants": {"a": R1}, "owned": {"a": R1}, "disk": [R1]}
    return world(A, **(base | fields))


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ([ONE, TWO], True),
        ([ONE], False),
        ([], False),
        ([ONE, peer("worker-2", entry(A, State.LOADING))], False),
        ([ONE, peer("worker-2", entry(A, State.DRAINING))], False),
        ([ONE, peer("worker-2", entry(A, rev=R2))], False),
        # An older revision that goes on serving because this engine refused the pool's is all that it will ever have.
        ([ONE, peer("worker-2", entry(A, rev=R2, refused=R1))], True),
        # Who asks to be passed over may never have it.
        ([ONE, peer("worker-2", entry(A, State.REJECTED, "", avoid=True))], True),
        ([peer("worker-1", entry(A, State.FAILED, "", avoid=True)), TWO], True),
        # At least one must have it.
        ([peer(n, entry(A, State.FAILED, "", avoid=True)) for n in ("worker-1", "worker-2")], False),
        ([ONE, peer("worker-2", entry(A), alive=False)], False),
        ([ONE, peer("worker-2", entry(A), up=False)], False),
        ([ONE, peer("worker-2", entry(A), heard=NOW - 10.1)], False),
        ([ONE, peer("worker-2", entry(A), heard=NOW - 9.9)], True),
    ],
)
def test_every_target_that_can_must_report_the_pools_revision(peers: list[Any], expected: bool) -> None:
    assert may_drop(moved("worker-1", "worker-2", peers=peers), A, NOW) is expected


@pytest.mark.parametrize(
    "unknown", [{"adapters_fresh": False}, {"members_fresh": False}, {"isolated": True}, {"settled": False}]
)
def test_nothing_goes_while_anything_is_unknown(unknown: dict[str, Any]) -> None:
    assert not may_drop(moved("worker-1", "worker-2", peers=[ONE, TWO], **unknown), A, LATE)
    unwanted = adapter("a", distribution=fixed(0))
    assert not may_drop(world(unwanted, targets={"a": []}, **unknown), unwanted, LATE)


def test_nothing_goes_while_the_placement_is_unknown() -> None:
    assert not may_drop(msgspec.structs.replace(moved("worker-1", peers=[ONE]), assignments={}), A, LATE)


# -- patience


@pytest.mark.parametrize(
    ("peers", "since", "expected"),
    [
        ([ONE], NOW - 599.0, False),
        ([ONE], LATE, True),
        # The last copy that is known never goes.
        ([], LATE, False),
        ([peer("worker-1", entry(A, State.LOADING))], LATE, False),
        ([peer("worker-1", entry(A), alive=False)], LATE, False),
        ([peer("worker-1", entry(A), heard=NOW - 10.1)], LATE, False),
        # An old revision at a target is a copy all the same.
        ([peer("worker-1", entry(A, rev=R2))], LATE, True),
    ],
)
def test_after_ten_minutes_all_copies_but_the_last_may_go(peers: list[Any], since: float, expected: bool) -> None:
    assert may_drop(moved("worker-1", "worker-2", peers=peers), A, since) is expected


def test_of_two_that_wait_for_targets_that_never_report_one_stays() -> None:
    """Each must not count on the other."""
    here = moved("worker-8", "worker-9", peers=[ONE])
    there = moved("worker-8", "worker-9", me="worker-1", peers=[peer("worker-0", entry(A))])
    assert may_drop(here, A, LATE) != may_drop(there, A, LATE)


# -- no targets at all


def none_left(**fields: Any) -> World:
    return moved(**fields)


def test_pushed_out_by_others_the_copy_goes_once_the_own_targets_are_loaded() -> None:
    other = adapter("b")
    base: dict[str, Any] = {"targets": {"a": [], "b": ["worker-0"]}, "waiting": {"a": ["worker-0"]}}
    waiting = world(A, other, owned={"a": R1}, **base)
    assert not may_drop(waiting, A, NOW)
    loaded = world(A, other, owned={"a": R1, "b": R2}, **base)
    assert may_drop(loaded, A, NOW)


def test_no_candidates_left_changes_nothing() -> None:
    """Cordoned, down or dead: nobody waits for room, there is nobody."""
    gone = world(A, targets={"a": []}, owned={"a": R1})
    assert not may_drop(gone, A, LATE)
    down = msgspec.structs.replace(
        gone,
        assignments={A.key: msgspec.structs.replace(gone.assignments[A.key], members=2, wanted=2, short=2)},
    )
    assert not may_drop(down, A, LATE)


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        (Distribution(), False),
        (Distribution(strategy="fixed", replicas=0), True),
        (Distribution(strategy="fixed", replicas=1), False),
        (Distribution(strategy="percentage", percentage=0), True),
        (Distribution(strategy="percentage", percentage=1), False),
    ],
)
def test_only_a_will_is_a_deletion(distribution: Distribution, expected: bool) -> None:
    each = adapter("a", distribution=distribution)
    assert is_deletion(world(each, targets={"a": []}), each) is expected


def test_a_selector_that_fits_no_worker_is_a_deletion() -> None:
    seen = world(A, targets={"a": []}, unmatched=frozenset({A.key}))
    assert is_deletion(seen, A)
    assert may_drop(seen, A, NOW)


# -- nobody to hand over to


def alone(seconds: float, **fields: Any) -> World:
    """This worker's pod ends, and for so long nobody could take over."""
    gone: dict[str, Any] = {"targets": {"a": ()}, "terminating": True, "heirless": {A.key: NOW - seconds}}
    return moved(**(gone | fields))


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, False), (9.9, False), (10.0, True), (600.0, True)])
def test_the_last_worker_goes_after_the_time_that_a_replacement_needs_to_be_listed(
    seconds: float, expected: bool
) -> None:
    assert may_drop(alone(seconds), A, LATE) is expected
    # Others that it doesn't reach are ending, or gone: no ground for doubts.
    assert may_drop(alone(seconds, isolated=True), A, LATE) is expected
    assert patience_ends(alone(seconds), A.key, LATE) == NOW - seconds + 10.0


@pytest.mark.parametrize("unknown", [{"adapters_fresh": False}, {"members_fresh": False}, {"settled": False}])
def test_whether_there_is_nobody_must_be_known(unknown: dict[str, Any]) -> None:
    assert not may_drop(alone(600.0, **unknown), A, LATE)


def test_an_heir_that_is_listed_in_time_is_waited_for() -> None:
    assert not may_drop(alone(600.0, heirless={}), A, LATE)


def test_the_planner_takes_the_label_away_in_time_and_unloads_nothing() -> None:
    waiting = plan(alone(4.0))
    assert waiting.statuses[A.key].routed
    assert waiting.wake_at == NOW + 6.0
    going = plan(alone(10.0))
    assert not going.statuses[A.key].routed
    assert plan(alone(60.0, **drained())).actions == ()


@given(
    heirless_for=st.none() | st.floats(0, 1000),
    since=st.floats(0, 1000),
    fields=st.fixed_dictionaries(
        {name: st.booleans() for name in ("adapters_fresh", "members_fresh", "isolated", "settled")}
    ),
    here=st.lists(st.sampled_from([ONE, TWO, peer("worker-1", entry(A, State.LOADING))]), max_size=2),
)
def test_law_the_last_copy_goes_only_where_nobody_is_left_for_long_enough(
    heirless_for: float | None, since: float, fields: dict[str, bool], here: list[Any]
) -> None:
    keys = {} if heirless_for is None else {A.key: NOW - heirless_for}
    seen = moved("worker-1", peers=here, terminating=True, heirless=keys, **fields)
    if not may_drop(seen, A, NOW - since):
        return
    assert fields["adapters_fresh"]
    assert fields["members_fresh"]
    copies = [p for p in here if loaded_elsewhere(seen, A.key, p.head.name, NOW - 10)]
    assert copies or (heirless_for is not None and heirless_for >= 10.0 - 1e-6)


# -- words


def test_loaded_elsewhere_means_serving_now_whatever_the_revision() -> None:
    seen = moved(
        "worker-1", peers=[ONE, peer("worker-2", entry(A, State.DRAINING)), peer("worker-3", entry(A, rev=R2))]
    )
    assert [n for n in (*seen.peers, "worker-4") if loaded_elsewhere(seen, A.key, n, NOW - 10)] == [
        "worker-1",
        "worker-3",
    ]


def test_without_a_decision_any_revision_will_do() -> None:
    seen = moved("worker-1", peers=[peer("worker-1", entry(A, rev=R2))], decisions={})
    assert has_wanted(seen, A.key, "worker-1", None, NOW - 10)
    assert may_drop(seen, A, NOW)


def test_the_witnesses_are_the_targets_and_whoever_holds_a_copy() -> None:
    peers = [ONE, peer("worker-3", entry(A, State.DRAINING)), peer("worker-4", entry(A, State.FAILED, ""))]
    seen = moved("worker-2", "worker-1", peers=peers)
    assert witnesses(seen, A) == ("worker-1", "worker-3")
