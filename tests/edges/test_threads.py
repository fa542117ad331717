"""Blocking calls on threads: outcomes, reuse, and nobody who waits at the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from sidecar.edges.threads import in_thread


async def test_the_result_and_the_error_come_back() -> None:
    assert await in_thread(lambda: 7) == 7
    assert await in_thread(lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_calls_one_after_the_other_share_a_thread() -> None:
    first = await in_thread(threading.get_ident)
    assert {await in_thread(threading.get_ident) for _ in range(50)} == {first}


async def test_calls_at_the_same_time_have_a_thread_each() -> None:
    together = threading.Barrier(20, timeout=10)

    def meet() -> int:
        together.wait()
        return threading.get_ident()

    assert len(set(await asyncio.gather(*(in_thread(meet) for _ in range(20))))) == 20


async def test_a_cancelled_caller_goes_on_at_once() -> None:
    release, ended = threading.Event(), threading.Event()

    def hang() -> None:
        release.wait(10)
        ended.set()

    task = asyncio.ensure_future(in_thread(hang))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    # Its thread is not free meanwhile: nobody else's call waits behind it.
    assert await in_thread(lambda: 1) == 1
    release.set()
    await in_thread(lambda: ended.wait(10))


def test_a_call_that_hangs_holds_up_no_exit() -> None:
    program = (
        "import asyncio, threading; from sidecar.edges.threads import in_thread\n"
        "async def main():\n"
        "    hung = asyncio.ensure_future(in_thread(lambda: threading.Event().wait(60)))\n"
        "    await asyncio.sleep(0); hung.cancel()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
