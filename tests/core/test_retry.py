"""Backoff: the table a person would write down, and the laws that hold for any parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.retry import Backoff

FIRST_TO_CAP = st.tuples(st.floats(1e-3, 1e4), st.floats(1e-3, 1e4)).map(sorted)
FACTORS = st.floats(1, 100)
UNIT = st.floats(0, 1)


@pytest.mark.parametrize(
    ("failures", "lowest", "highest"),
    [(0, 0, 0), (1, 0.5, 1), (2, 1, 2), (3, 2, 4), (6, 16, 32), (7, 30, 60), (100, 30, 60), (10**9, 30, 60)],
)
def test_doubles_up_to_the_cap(failures: int, lowest: float, highest: float) -> None:
    backoff = Backoff(first=1, factor=2, cap=60)
    assert backoff.delay(failures, 0) == pytest.approx(lowest)
    assert backoff.delay(failures, 1) == pytest.approx(highest)


def test_a_factor_of_one_waits_equally_long_for_ever() -> None:
    backoff = Backoff(first=5, factor=1, cap=60)
    assert [backoff.delay(n, 1) for n in (1, 2, 50)] == [5, 5, 5]


@given(limits=FIRST_TO_CAP, factor=FACTORS, failures=st.integers(1, 10_000), unit=UNIT)
def test_bounded_by_half_the_first_wait_and_the_cap(
    limits: list[float], factor: float, failures: int, unit: float
) -> None:
    first, cap = limits
    delay = Backoff(first=first, factor=factor, cap=cap).delay(failures, unit)
    assert first / 2 <= delay <= cap


@given(limits=FIRST_TO_CAP, factor=FACTORS, failures=st.integers(0, 10_000), unit=UNIT)
def test_never_shorter_after_one_more_failure(limits: list[float], factor: float, failures: int, unit: float) -> None:
    first, cap = limits
    backoff = Backoff(first=first, factor=factor, cap=cap)
    assert backoff.delay(failures, unit) <= backoff.delay(failures + 1, unit)


@given(limits=FIRST_TO_CAP, factor=FACTORS, failures=st.integers(1, 10_000), units=st.tuples(UNIT, UNIT).map(sorted))
def test_grows_with_the_random_number(limits: list[float], factor: float, failures: int, units: list[float]) -> None:
    first, cap = limits
    backoff = Backoff(first=first, factor=factor, cap=cap)
    assert backoff.delay(failures, units[0]) <= backoff.delay(failures, units[1])


@pytest.mark.parametrize(
    ("first", "factor", "cap"),
    [(0, 2, 60), (-1, 2, 60), (1, 0.5, 60), (61, 2, 60), (1, 2, float("inf")), (1, float("nan"), 60)],
)
def test_parameters_that_make_no_sense_are_refused(first: float, factor: float, cap: float) -> None:
    with pytest.raises(ValueError, match="backoff needs"):
        Backoff(first=first, factor=factor, cap=cap)


@pytest.mark.parametrize("unit", [-0.1, 1.1, float("nan")])
def test_a_random_number_outside_the_unit_interval_is_refused(unit: float) -> None:
    with pytest.raises(ValueError, match="unit_random"):
        Backoff(first=1, cap=2).delay(1, unit)
