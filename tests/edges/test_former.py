"""A name is free again when the requests of its former holder have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sidecar.core.metrics_vllm import Traffic
from sidecar.edges.former import PAUSE, PERHAPS_TIMEOUT, TIMEOUT, UNKNOWN_TIMEOUT, FormerHolders
from sidecar.ports import EngineUnavailable
from tests.sim.loop import run

NONE, SOME, PERHAPS, UNKNOWN = Traffic.NONE, Traffic.SOME, Traffic.PERHAPS, Traffic.UNKNOWN


def waited(traffic: Callable[[float], Traffic], *, given_up: bool) -> float:
    """Virtual seconds that a load of "a" is put off; `traffic` says what requests of it there are at which second."""

    async def wait() -> float:
        time = asyncio.get_running_loop().time

        async def ask(name: str, surely: bool) -> Traffic:
            assert name == "a"
            # Nothing is asked of the engine for a name that nobody is known to have had.
            assert not surely or given_up or traffic(0) is SOME
            return traffic(time())

        former = FormerHolders(ask)
        if given_up:
            former.gave_up("a")
        await former.ended("a")
        assert former.names == frozenset()
        return time()

    return run(wait())


def test_a_name_that_nobody_had_is_loaded_at_once() -> None:
    for traffic in (NONE, PERHAPS, UNKNOWN):
        assert waited(lambda _, traffic=traffic: traffic, given_up=False) == 0.0  # type: ignore[misc] # bound now


def test_requests_end_before_the_name_is_free() -> None:
    def traffic(now: float) -> Traffic:
        return SOME if now < 7.0 else NONE

    # Two looks in a row without it, since a request may be on its way to the engine.
    assert waited(traffic, given_up=True) == 7.0 + PAUSE
    # An earlier agent may have given it up.
    assert waited(traffic, given_up=False) == 7.0 + PAUSE
    assert waited(lambda now: SOME if now == PAUSE else NONE, given_up=True) == 3 * PAUSE


def test_what_may_wait_for_a_slot_is_waited_for_but_not_for_ever() -> None:
    assert waited(lambda now: PERHAPS if now < 7.0 else NONE, given_up=True) == 7.0 + PAUSE
    assert waited(lambda _: PERHAPS, given_up=True) == PERHAPS_TIMEOUT


def test_metrics_that_are_silent_for_a_moment_or_for_good() -> None:
    assert waited(lambda now: UNKNOWN if now < 1.0 else NONE, given_up=True) == 1.0 + PAUSE
    assert waited(lambda _: UNKNOWN, given_up=True) == UNKNOWN_TIMEOUT


def test_requests_that_do_not_end_put_the_load_off() -> None:
    with pytest.raises(EngineUnavailable, match=f"requests to the former 'a' still run after {TIMEOUT:g} s"):
        waited(lambda _: SOME, given_up=True)


def test_another_engine_process_has_no_requests_of_old() -> None:
    async def forgotten() -> float:
        async def ask(name: str, surely: bool) -> Traffic:
            return UNKNOWN

        former = FormerHolders(ask)
        former.gave_up("a")
        former.forget()
        await former.ended("a")
        return asyncio.get_running_loop().time()

    assert run(forgotten()) == 0.0
