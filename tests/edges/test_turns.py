"""One holder per key at a time, and no lock that outlives its use or is dropped with somebody waiting."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.edges.turns import Shared, Turns
from sidecar.ports import EngineUnavailable


async def test_one_holder_per_key_whoever_gives_up_or_is_cancelled() -> None:
    turns = Turns()
    inside: dict[str, int] = {"a": 0, "b": 0}
    entered = 0

    async def visit(key: str, wait: float) -> None:
        nonlocal entered
        async with turns.hold(key, wait):
            inside[key] += 1
            assert inside[key] == 1
            entered += 1
            await asyncio.sleep(0)
            inside[key] -= 1

    tasks = [asyncio.create_task(visit("ab"[n % 2], 5.0)) for n in range(200)]
    await asyncio.sleep(0)
    for task in tasks[50:100]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(task.exception()) for task in tasks if not task.cancelled()] == [type(None)] * 150
    assert entered == 150
    assert len(turns) == 0


async def test_who_waits_too_long_is_told_what_it_waited_for() -> None:
    turns = Turns()
    async with turns.hold("load", 1.0):
        with pytest.raises(EngineUnavailable, match=r"not sent: .*\(load\)"):
            async with turns.hold("load", 0.01):
                raise AssertionError("two at once")
        assert len(turns) == 1
        async with turns.hold("name a", 0.01):
            assert len(turns) == 2
    assert len(turns) == 0


async def test_who_holds_on_too_long_lets_the_next_one_in_and_ends_in_peace() -> None:
    turns = Turns()
    hangs, ended = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        async with turns.hold("load", 1.0, longest=0.02):
            await hangs.wait()
        ended.set()

    task = asyncio.create_task(hang())
    await asyncio.sleep(0)
    async with turns.hold("load", 5.0):
        hangs.set()
        await ended.wait()
        # The one that hung has given back only what was its own.
        with pytest.raises(EngineUnavailable):
            async with turns.hold("load", 0.01):
                raise AssertionError("two at once")
    await task
    assert len(turns) == 0


async def test_calls_are_shared_by_those_who_came_before_they_began() -> None:
    begun: list[int] = []
    began = asyncio.Event()
    gates = [asyncio.Event() for _ in range(3)]

    async def call() -> int:
        number = len(begun)
        begun.append(number)
        began.set()
        await gates[number].wait()
        return number

    shared = Shared(call)
    first = asyncio.create_task(shared())
    await began.wait()
    others = [asyncio.create_task(shared()) for _ in range(5)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert begun == [0]
    others.pop().cancel()
    gates[0].set()
    assert await first == 0
    gates[1].set()
    assert await asyncio.gather(*others) == [1] * 4
    gates[2].set()
    assert await shared() == 2
