"""Which revision a pool takes: the same answer wherever the same decisions are known."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.decide import better, decided, same_content
from sidecar.model import Adapter, Decision, Listing, RemoteFile

from .worlds import R1, R2, R3, adapter, decision

A = adapter("a")
B = adapter("b")
DECISIONS = st.builds(
    lambda refresh, rev, listed: decision(A, rev, refresh=refresh, listed=listed),
    st.integers(0, 3),
    st.sampled_from([R1, R2, R3]),
    st.booleans(),
)


def what(chosen: Decision | None) -> tuple[int, str] | None:
    return (chosen.refresh, chosen.revision) if chosen else None


def test_the_highest_refresh_number_counts() -> None:
    assert decided(A, [decision(A, R1, refresh=1), decision(A, R2, refresh=2), None]) == decision(A, R2, refresh=2)


def test_of_equal_numbers_the_smaller_revision_counts() -> None:
    smaller = min(R1, R2)
    assert what(decided(A, [decision(A, R1), decision(A, R2)])) == (0, smaller)


def test_of_equal_decisions_the_one_with_the_list_of_files_counts() -> None:
    bare, listed = decision(A, R1, listed=False), decision(A, R1)
    assert better(bare, listed) == better(listed, bare) == listed


@given(st.lists(st.none() | DECISIONS, max_size=6))
def test_the_order_of_hearing_has_no_say(known: list[Decision | None]) -> None:
    assert what(decided(A, known)) == what(decided(A, reversed(known)))


@given(DECISIONS, DECISIONS, DECISIONS)
def test_news_in_any_grouping_lead_to_the_same(one: Decision, two: Decision, three: Decision) -> None:
    assert better(better(one, two), three) == better(one, better(two, three))


def test_decisions_about_another_source_dont_count() -> None:
    assert decided(A, [decision(B, R1, refresh=9)]) is None


def test_an_adapter_deleted_and_made_anew_is_decided_anew() -> None:
    """The UID is part of the source's identity: bytes decided for one resource are not for its successor."""
    older, newer = adapter("a", uid="1"), adapter("a", uid="2")
    assert decided(newer, [decision(older, R1)]) is None


@pytest.mark.parametrize("known", [[], [None], [decision(B, R1)]])
def test_without_a_decision_nothing_is_wanted_yet(known: list[Decision | None]) -> None:
    assert decided(A, known) is None


def test_the_revision_of_the_status_serves_when_nobody_knows_better() -> None:
    told = adapter("a", status_revision=R1)
    assert what(decided(told, [])) == (0, R1)
    assert what(decided(told, [decision(told, R2)])) == (0, R2)


def test_a_pinned_digest_is_the_decision_whatever_others_say() -> None:
    pinned = adapter("a", digest=R1, status_revision=R2)
    assert what(decided(pinned, [decision(pinned, R2, refresh=7)])) == (0, R1)
    listed = decision(pinned, R1, refresh=3)
    assert decided(pinned, [decision(pinned, R2, refresh=7), listed]) == listed


# -- is it still the same


def listing(*files: tuple[str, int, str]) -> Listing:
    return Listing(files=tuple(RemoteFile(path=p, size=s, etag=e) for p, s, e in files))


def of(adapter_: Adapter, found: Listing) -> Decision:
    return msgspec.structs.replace(decision(adapter_, R1), listing=found.files)


SEEN = listing(("adapter_config.json", 10, "e1"), ("adapter_model.safetensors", 99, "e2"))


@pytest.mark.parametrize(
    ("now", "same"),
    [
        (SEEN, True),
        (listing(*reversed([("adapter_config.json", 10, "e1"), ("adapter_model.safetensors", 99, "e2")])), True),
        (listing(("adapter_config.json", 10, "e1"), ("adapter_model.safetensors", 99, "other")), False),
        (listing(("adapter_config.json", 10, "e1"), ("adapter_model.safetensors", 98, "e2")), False),
        (listing(("adapter_config.json", 10, "e1")), False),
        (listing(("adapter_config.json", 10, "e1"), ("x.safetensors", 99, "e2")), False),
        (listing(("adapter_config.json", 10, ""), ("adapter_model.safetensors", 99, "e2")), False),
    ],
)
def test_a_listing_is_the_same_if_every_path_size_and_etag_is(now: Listing, same: bool) -> None:
    assert same_content(now, of(A, SEEN)) is same


def test_without_etags_a_listing_cannot_tell() -> None:
    bare = listing(("adapter_config.json", 10, ""))
    assert not same_content(bare, of(A, bare))


def test_a_decision_without_a_listing_cannot_tell() -> None:
    assert not same_content(SEEN, decision(A, R1, listed=False))
