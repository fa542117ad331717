"""A name is free again when the requests of its former holder have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sidecar.edges.former import PAUSE, TIMEOUT, UNKNOWN_TIMEOUT, FormerHolders
from sidecar.ports import EngineUnavailable
from tests.sim.loop import run


def waited(busy: Callable[[float], frozenset[str] | None], *, given_up: bool) -> float:
    """Virtual seconds that a load of "a" is put off; `busy` says what is in flight at which second."""

    async def wait() -> float:
        time = asyncio.get_running_loop().time

        async def in_flight() -> frozenset[str] | None:
            return busy(time())

        former = FormerHolders(in_flight)
        if given_up:
            former.gave_up("a")
        await former.ended("a")
        assert former.names == frozenset()
        return time()

    return run(wait())


def test_a_name_that_nobody_had_is_loaded_at_once() -> None:
    assert waited(lambda _: frozenset({"b"}), given_up=False) == 0.0
    assert waited(lambda _: None, given_up=False) == 0.0


def test_requests_end_before_the_name_is_free() -> None:
    def busy(now: float) -> frozenset[str]:
        return frozenset({"a", "b"} if now < 7.0 else {"b"})

    # Two looks in a row without it, since a request may be on its way to the metrics.
    assert waited(busy, given_up=True) == 7.0 + PAUSE
    # An earlier agent may have given it up.
    assert waited(busy, given_up=False) == 7.0 + PAUSE
    assert waited(lambda now: frozenset({"a"} if now == PAUSE else ()), given_up=True) == 3 * PAUSE


def test_metrics_that_are_silent_for_a_moment_or_for_good() -> None:
    assert waited(lambda now: None if now < 1.0 else frozenset(), given_up=True) == 1.0 + PAUSE
    assert waited(lambda _: None, given_up=True) == UNKNOWN_TIMEOUT


def test_requests_that_do_not_end_put_the_load_off() -> None:
    with pytest.raises(EngineUnavailable, match=f"requests to the former 'a' still run after {TIMEOUT:g} s"):
        waited(lambda _: frozenset({"a"}), given_up=True)


def test_another_engine_process_has_no_requests_of_old() -> None:
    async def forgotten() -> float:
        async def in_flight() -> None:
            return None

        former = FormerHolders(in_flight)
        former.gave_up("a")
        former.forget()
        await former.ended("a")
        return asyncio.get_running_loop().time()

    assert run(forgotten()) == 0.0
