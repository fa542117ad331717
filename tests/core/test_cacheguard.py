"""Blocks of old weights never get into new answers, whatever happened in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.cacheguard import CacheGuard
from sidecar.core.memory import LoadedOnce

from .worlds import R1, R2, adapter

A = adapter("a", served_name="name")
CARELESS = adapter("a", served_name="name", on_stale_prefix_cache="Replace")


def guard(
    *history: tuple[str, str, str], process: str = "p", stale: bool = True, resettable: bool = True
) -> CacheGuard:
    return CacheGuard([LoadedOnce(*each) for each in history], process, stale=stale, resettable=resettable)


@pytest.mark.parametrize(
    ("history", "verdict"),
    [
        ([], "free"),
        ([("p", "name", R1)], "free"),
        ([("p", "name", R2)], "reset"),
        # Moved away and back, deleted and made anew: what was loaded once may be cached still.
        ([("p", "name", R1), ("p", "name", R2)], "reset"),
        # Another resource with this served name counts, another name doesn't.
        ([("p", "other", R2)], "free"),
        # Another process has nothing of it; an unknown one may be this one.
        ([("q", "name", R2)], "free"),
        ([("", "name", R2)], "reset"),
    ],
)
def test_another_revision_under_a_name_of_this_process_needs_a_reset(
    history: list[tuple[str, str, str]], verdict: str
) -> None:
    assert guard(*history).verdict(A, R1) == verdict


def test_unknown_whether_the_engine_restarted_the_history_counts() -> None:
    assert guard(("q", "name", R2), process="").verdict(A, R1) == "reset"


def test_an_engine_that_declines_to_reset_gets_nothing_new_under_the_name() -> None:
    assert guard(("p", "name", R2), resettable=False).verdict(A, R1) == "hold"


@pytest.mark.parametrize("stale", [True, False])
def test_a_person_may_prefer_new_answers_to_right_ones(stale: bool) -> None:
    assert guard(("p", "name", R2), resettable=False, stale=stale).verdict(CARELESS, R1) == "free"


PASTS = st.tuples(st.sampled_from(["p", "q", ""]), st.sampled_from(["name", "other"]), st.sampled_from([R1, R2]))


@given(st.lists(PASTS), st.sampled_from(["p", ""]), st.booleans())
def test_an_engine_that_keys_its_cache_by_content_is_free(
    history: list[tuple[str, str, str]], process: str, resettable: bool
) -> None:
    assert guard(*history, process=process, stale=False, resettable=resettable).verdict(A, R1) == "free"


@given(st.lists(PASTS), st.sampled_from(["p", ""]), PASTS)
def test_a_longer_history_never_frees(
    history: list[tuple[str, str, str]], process: str, more: tuple[str, str, str]
) -> None:
    if guard(*history, process=process).verdict(A, R1) == "reset":
        assert guard(*history, more, process=process).verdict(A, R1) == "reset"
