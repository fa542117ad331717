"""`lora-sidecar demo` as a user runs it: a process of its own, which ends as it says and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from sidecar.edges.sample_adapter import write_adapter
from sidecar.edges.stub_engine import StubEngine, StubOptions

pytestmark = pytest.mark.slow

LIMIT = 240


class Demo:
    """One run with a directory for temporary files of its own, by which its processes are known."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *flags: str, terminal: int | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar", "demo", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.PIPE if terminal is None else terminal,
            env=os.environ | {"TMPDIR": str(self.place), "TERM": "xterm", "COLUMNS": "150", "LINES": "40"},
        )
        self._started.append(process)
        return process

    def processes(self) -> list[str]:
        """What runs of it, the demo itself included."""
        mine = f"TMPDIR={self.place}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mine in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it has ended meanwhile, or is somebody else's
        return [command for command in found if command]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc to see which processes are left")
    place = tmp_path / "tmp"
    place.mkdir()
    run = Demo(place)
    yield run
    run.end()


@pytest.fixture
async def engines() -> AsyncIterator[list[StubEngine]]:
    """Two engines that aren't the demo's own."""
    async with AsyncExitStack() as stack:
        options = StubOptions(model="theirs", max_loras=4, max_cpu_loras=4)
        yield [await stack.enter_async_context(StubEngine(options)) for _ in range(2)]


def of(engines: list[StubEngine], tmp_path: Path) -> tuple[str, ...]:
    """The flags for these engines."""
    adapters = [str(write_adapter(tmp_path / name, name, base="theirs")) for name in ("one", "two", "three", "four")]
    return ("--plain", "--engine-url", ",".join(e.url for e in engines), "--adapters", ",".join(adapters))


async def read_until(stream: int, pattern: str) -> str:
    """What a process writes, up to and with what was waited for."""
    text, until = "", time.monotonic() + LIMIT
    while re.search(pattern, text) is None:
        readable, _, _ = await asyncio.to_thread(select.select, [stream], [], [], 1.0)
        assert time.monotonic() < until, text
        if not readable:
            continue
        part = os.read(stream, 65536)
        assert part, f"it ended without {pattern!r}:\n{text}"
        text += part.decode(errors="replace")
    return text


def test_the_story_ends_well_and_leaves_nothing_behind(demo: Demo) -> None:
    process = demo.start("--plain")
    out, err = process.communicate(timeout=LIMIT)
    text = out.decode()
    assert process.returncode == 0, text + err.decode()
    assert text.count("  ok: ") == 8
    assert re.search(r"house-style on 3, sql-writer on 2, .*, translate-fr on 1; each answers unlike the base", text)
    assert re.search(r"worker-4.*\n +ok: .*moved: json-output from worker-2", text)
    assert re.search(r"All 8 steps went well, in \d+ s\. Of \d{3,} requests ", text)
    assert err == b""
    assert demo.processes() == []
    assert list(demo.place.iterdir()) == []


async def test_the_story_on_engines_of_somebody_else(demo: Demo, engines: list[StubEngine], tmp_path: Path) -> None:
    process = demo.start(*of(engines, tmp_path), "--keep")
    assert process.stdout is not None
    text = await read_until(process.stdout.fileno(), r"worker-2: http://\S+/|FAILED")
    assert "none is killed or restarted" in text
    assert text.count("  ok: ") == 8, text
    assert [call.kind for call in engines[1].server.calls].count("load") >= 2

    page = re.search(r"worker-1: (http://\S+/)", text)
    assert page is not None
    async with aiohttp.ClientSession() as session, session.get(page[1]) as answer:
        assert answer.status == 200

    process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(process.wait, LIMIT) == 0
    assert [engine.server.loras for engine in engines] == [{}, {}]
    assert demo.processes() == []
    assert list(demo.place.iterdir()) == []


async def test_a_step_that_fails_is_told_with_what_was_seen(
    demo: Demo, engines: list[StubEngine], tmp_path: Path
) -> None:
    for engine in engines:
        engine.faults.set(refuse={"demo-2-two": "LoRA rank 8 is greater than max_lora_rank 4."})
    process = demo.start(*of(engines, tmp_path), "--patience", "30")
    _, err = await asyncio.to_thread(process.communicate, None, LIMIT)
    text = err.decode()
    assert process.returncode == 1, text
    assert "demo: step 2 of 8, apply 3 adapters, failed after" in text
    assert "expected: every adapter is on exactly the workers that placement says, within 30 s" in text
    assert re.search(
        r"seen: +worker-1: its engine does not list demo-2-two; its agent says \w+ \(.*max_lora_rank 4", text
    )
    assert re.search(r"the end of worker-1's agent's log:\n.*adapter_load_failed", text, re.DOTALL)
    assert [engine.server.loras for engine in engines] == [{}, {}]
    assert demo.processes() == []
    assert list(demo.place.iterdir()) == []


async def test_ctrl_c_on_a_terminal_ends_everything(demo: Demo) -> None:
    ours, theirs = os.openpty()
    try:
        process = demo.start("--workers", "1", terminal=theirs)
        text = await read_until(ours, "✓")
        assert "worker-1" in text
        assert "translate-fr" in text
        process.send_signal(signal.SIGINT)
        rest = await read_until(ours, "interrupted; ending everything")
        assert await asyncio.to_thread(process.wait, LIMIT) == 130, rest
    finally:
        os.close(theirs)
        os.close(ours)
    assert demo.processes() == []
    assert list(demo.place.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of who was killed")
async def test_nothing_survives_a_demo_that_is_killed(demo: Demo) -> None:
    process = demo.start("--workers", "2", "--plain")
    assert process.stdout is not None
    await read_until(process.stdout.fileno(), "  ok: ")
    assert len(demo.processes()) == 5
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while demo.processes():
        assert time.monotonic() < deadline, demo.processes()
        await asyncio.sleep(0.05)
