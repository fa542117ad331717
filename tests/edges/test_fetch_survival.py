"""The fetcher and what may befall its process and its disk: SIGKILL, a full file system, other work on the loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.ports import DiskFull
from sidecar.settings import MIB, Settings
from tests.adapters import Files, adapter, revision
from tests.edges.fetching import content, fetched, fetcher, ignore, noted, proxy, s3, store, upload, wanted
from tests.edges.gossip_nodes import until
from tests.s3proxy import Fault, Proxy
from tests.s3server import S3Server

__all__ = ["fetcher", "proxy", "s3", "store"]

PROGRAM = """
import asyncio, sys
from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.settings import Settings
from tests.edges.fetching import fetched, wanted

async def main(root, uri):
    fetcher = OriginFetcher(Settings(), AdapterStore.open(root))
    print((await fetched(fetcher, wanted(uri))).revision)

asyncio.run(main(*sys.argv[1:]))
"""


async def start(root: Path, uri: str) -> asyncio.subprocess.Process:
    """A process of its own that fetches `uri`, and prints the revision last."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(root), uri, stdout=asyncio.subprocess.PIPE
    )


async def revision_by(process: asyncio.subprocess.Process) -> str:
    out, _ = await process.communicate()
    return out.decode().splitlines()[-1]


async def test_a_fetch_that_nobody_wants_any_more_takes_no_room_from_others(
    s3: S3Server, proxy: Proxy, store: AdapterStore, fetcher: OriginFetcher
) -> None:
    never = asyncio.Event()
    proxy.fault = lambda asked: Fault(after=1000, wait=never) if "safetensors" in asked.path else None
    wants = wanted(upload(s3, "unwanted", adapter("unwanted", weights_bytes=10 * MIB)))
    fetching = asyncio.create_task(fetched(fetcher, wants))
    await until(lambda: bool(proxy.gets("safetensors")), 10)
    assert store.usage() >= 10 * MIB
    fetching.cancel()
    await until(lambda: store.usage() < 10 * MIB, 10)
    never.set()


@pytest.mark.slow
async def test_killed_in_the_middle_it_fetches_no_part_again_that_was_whole(
    s3: S3Server, proxy: Proxy, tmp_path: Path
) -> None:
    files = adapter("killed", weights_bytes=100 * MIB)
    uri = upload(s3, "killed", files)
    never = asyncio.Event()
    third = f"bytes={64 * MIB}-{96 * MIB - 1}"
    proxy.fault = lambda asked: Fault(after=MIB, wait=never) if asked.range == third else None
    process = await start(tmp_path / "adapters", uri)
    await noted(tmp_path / "adapters", 4)  # the configuration, and parts 0, 1 and 3
    process.kill()
    await process.wait()
    assert list((tmp_path / "adapters/revisions").iterdir()) == []
    proxy.fault = lambda _: None
    proxy.asked.clear()
    assert await revision_by(await start(tmp_path / "adapters", uri)) == revision(files)
    assert [asked.range for asked in proxy.gets()] == [third]
    assert content(str(tmp_path / "adapters/revisions" / revision(files).removeprefix("sha256:"))) == files
    never.set()


@pytest.mark.slow
async def test_killed_at_any_moment_it_ends_with_the_same_content(s3: S3Server, proxy: Proxy, tmp_path: Path) -> None:
    files = adapter("hunted", weights_bytes=150 * MIB)
    uri = upload(s3, "hunted", files)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(8):
        process = await start(tmp_path / "adapters", uri)
        try:
            await asyncio.wait_for(process.wait(), rng.uniform(0.3, 1.2))
        except TimeoutError:
            process.kill()
        await process.communicate()
    assert await revision_by(await start(tmp_path / "adapters", uri)) == revision(files)
    assert content(str(tmp_path / "adapters/revisions" / revision(files).removeprefix("sha256:"))) == files
    # Each kill may cost the parts that were under way, and no more.
    assert sum(asked.sent for asked in proxy.gets()) <= 150 * MIB + 8 * 4 * 33 * MIB


LEAVING = """
import asyncio, contextlib, sys
from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.settings import Settings
from tests.edges.fetching import fetched, wanted

async def main(root, uri):
    fetcher = OriginFetcher(Settings(), AdapterStore.open(root))
    fetching = asyncio.create_task(fetched(fetcher, wanted(uri)))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    fetching.cancel()
    await asyncio.wait({fetching})
    await fetcher.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_origin_that_hangs_does_not_hold_up_the_exit(s3: S3Server, proxy: Proxy, tmp_path: Path) -> None:
    uri = upload(s3, "hangs", adapter("hangs", weights_bytes=MIB))
    never, reached = asyncio.Event(), asyncio.Event()
    proxy.fault = lambda asked: Fault(after=1000, wait=never, then=reached.set) if "safetensors" in asked.path else None
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEAVING, str(tmp_path / "adapters"), uri, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    await reached.wait()
    assert process.stdin is not None
    process.stdin.write(b"end\n")
    started = time.monotonic()
    assert await process.wait() == 0
    # Without the measures against it, it takes the 20 s of the read's timeout.
    assert time.monotonic() - started < 10
    never.set()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system of its own can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


async def test_a_disk_that_fills_up_on_the_way_is_said_and_then_gone_on_with(
    s3: S3Server, proxy: Proxy, small_disk: Path
) -> None:
    files: Files = adapter("full", weights_bytes=6 * MIB)
    one = wanted(upload(s3, "full", files))
    filler = small_disk / "filler"

    def fill() -> None:
        """Take what is left, also of what becomes free meanwhile, each time that a request is asked anew."""
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(64 * 1024))

    store = AdapterStore.open(str(small_disk / "adapters"))
    fetcher = OriginFetcher(Settings(), store)
    goes_on = asyncio.Event()
    goes_on.set()
    proxy.fault = lambda asked: Fault(after=2 * MIB, then=fill, wait=goes_on) if "safetensors" in asked.path else None
    with pytest.raises(DiskFull, match=r"No space left on device"):
        await fetched(fetcher, one)
    assert store.revisions() == {}
    proxy.fault = lambda _: None
    filler.unlink()
    assert content((await fetched(fetcher, one)).path) == files
    await fetcher.close()
    store.close()


async def test_the_event_loop_neither_copies_nor_hashes(
    s3: S3Server, fetcher: OriginFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    one = wanted(upload(s3, "busy", adapter("busy", weights_bytes=128 * MIB)))
    listing = await fetcher.listing(one)
    loops, everything = time.thread_time(), time.process_time()
    await fetcher.fetch(one, listing, None, ignore)
    loops, everything = time.thread_time() - loops, time.process_time() - everything
    assert loops < 0.15 * everything
