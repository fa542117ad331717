"""Whether all workers want the same adapters: the digest, and what of a difference is seen."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.adapter_lists import MOST_NAMED, Difference, differences, digest, placed_on, verdict
from sidecar.core.placement import Assignment
from sidecar.model import Adapter, Head, Requirement, Selector, State

from .random_worlds import WORLDS
from .worlds import R1, adapter, decision, entry, fixed, peer

A, B, C = adapter("a"), adapter("b"), adapter("c")
RESOURCE = adapter("a", uid="u", generation=3)


@given(WORLDS, st.randoms())
def test_the_digest_is_the_same_in_any_order_and_another_for_any_other_list(seen: object, dice: object) -> None:
    adapters = list(seen.catalog.active)  # type: ignore[attr-defined]  # a World
    told = digest(adapters)
    dice.shuffle(adapters)  # type: ignore[attr-defined]  # a Random
    assert digest(adapters) == told
    assert digest([*adapters, adapter("one-more")]) != told
    assert not adapters or digest(adapters[1:]) != told


@pytest.mark.parametrize(
    "change",
    [
        {"served_name": "other"},
        {"base_model": "other"},
        {"source": adapter("other").source},
        {"distribution": fixed(2)},
        {"selector": Selector(labels={"gpu": "big"})},
        {"selector": Selector(expressions=(Requirement(key="gpu", operator="Exists"),))},
        {"priority": 1},
        {"created": 1},
        {"drain_seconds": 6},
        {"on_stale_prefix_cache": "Replace"},
        {"name": "other"},
        {"namespace": "other"},
        {"uid": "u"},
        {"generation": 1},
    ],
)
def test_whatever_is_wanted_of_a_manifest_counts(change: dict[str, object]) -> None:
    assert digest([msgspec.structs.replace(A, **change)]) != digest([A])


def test_the_order_of_labels_does_not_count() -> None:
    one, two = ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    assert digest([adapter("a", selector=Selector(labels=one))]) == digest(
        [adapter("a", selector=Selector(labels=two))]
    )


@pytest.mark.parametrize("each", [A, RESOURCE])
def test_the_status_does_not_count(each: Adapter) -> None:
    assert digest([msgspec.structs.replace(each, status_revision=R1)]) == digest([each])


def test_a_resource_is_told_by_its_uid_and_generation() -> None:
    """Agents of two versions may read one resource differently: that is no other list."""
    assert digest([msgspec.structs.replace(RESOURCE, drain_seconds=7)]) == digest([RESOURCE])
    for change in ({"uid": "v"}, {"generation": 4}):
        assert digest([msgspec.structs.replace(RESOURCE, **change)]) != digest([RESOURCE])


def test_no_adapters_are_a_list_and_no_list_is_none() -> None:
    assert digest(None) == ""
    assert digest([]) == digest(()) != ""


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ("x", "x", "same"),
        ("x", "y", "differs"),
        ("", "y", "unknown"),
        ("x", "", "unknown"),
        ("", "", "unknown"),
    ],
)
def test_who_tells_no_digest_is_unknown(mine: str, theirs: str, said: str) -> None:
    assert verdict(mine, theirs) == said


def placed(*targets: tuple[Adapter, str]) -> dict[str, list[str]]:
    return placed_on({a.key: Assignment(adapter=a.key, members=2, wanted=1, targets=(name,)) for a, name in targets})


def test_what_differs_is_named_as_far_as_entries_tell() -> None:
    moved = adapter("a", uri="s3://bucket/elsewhere")
    there = peer("worker-1", entry(A, decision=decision(moved, R1)), entry(C))
    mine = {each.key: each for each in (A, B)}
    found = differences(mine, placed((A, "worker-1"), (B, "worker-1"))["worker-1"], there)
    assert found == (
        Difference(A.key, "another source"),
        Difference(B.key, "not there"),
        Difference(C.key, "only there"),
    )


def test_what_it_downloads_to_decide_on_tells_the_source_too() -> None:
    coming = decision(adapter("a", uri="s3://bucket/elsewhere"), "")
    there = peer("worker-1", entry(A, State.DOWNLOADING, "", coming=coming))
    assert differences({A.key: A}, [A.key], there) == (Difference(A.key, "another source"),)


def test_an_adapter_that_is_none_of_its_business_is_no_difference() -> None:
    assert differences({A.key: A, B.key: B}, [A.key], peer("worker-1", entry(A, decision=decision(A, R1)))) == ()


def test_only_the_first_are_named() -> None:
    many = [adapter(f"a-{n:03}") for n in range(MOST_NAMED + 5)]
    assert len(differences({}, [], peer("worker-1", *[entry(each) for each in many]))) == MOST_NAMED


class OldHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head as an agent without digests knows it."""

    uid: str
    name: str


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack])
def test_heads_with_and_without_the_digest_are_understood_on_both_sides(codec: object) -> None:
    encode, decode = codec.encode, codec.decode  # type: ignore[attr-defined]  # both modules have them
    new = Head(uid="u", name="w", adapter_list="0123456789abcdef")
    assert decode(encode(new), type=Head) == new
    assert decode(encode(new), type=OldHead) == OldHead(uid="u", name="w")
    assert decode(encode(OldHead(uid="u", name="w")), type=Head).adapter_list == ""
    with pytest.raises(msgspec.ValidationError):
        decode(encode(msgspec.structs.replace(new, adapter_list="x" * 1000)), type=Head)
