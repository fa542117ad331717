"""What a download from S3 costs: `python -m tests.bench.bench_download [--record]`.

CPU against a bare copy from a socket to a file with its sha256 (the same bytes from the same server), each in a process
of its own so that neither pays for the other, and how late the event loop's ticks come meanwhile. The server is another
process and isn't counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.settings import MIB, Settings
from tests.adapters import adapter
from tests.bench.results import record, table
from tests.edges.fetching import ignore, upload, wanted
from tests.s3server import S3Server

MEBIBYTES = 1000
TICK = 0.005
RUNS = 5


def touch_memory(size: int, directory: str) -> None:
    """Use and free as much page cache as will be needed. A virtual machine's host takes free memory back after a while,
    and its return would be counted as the time of whoever writes next."""
    block = bytes(MIB)
    path = Path(directory, "touched")
    with path.open("wb") as file:
        for _ in range(size // MIB + 64):
            file.write(block)
    path.unlink()


def bare(url: str, size: int, directory: str) -> dict[str, float]:
    """Socket to file with sha256: recv_into one 1 MiB buffer, no HTTP client, no thread."""
    touch_memory(size, directory)
    before = time.process_time()
    host, _, rest = url.removeprefix("http://").partition(":")
    port, _, path = rest.partition("/")
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(MIB))
    with socket.create_connection((host, int(port))) as connection, Path(directory, "bare").open("wb") as file:
        connection.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1)
        assert head.startswith(b"HTTP/1.1 200 "), head
        left = size
        while left:
            count = connection.recv_into(buffer, min(left, MIB))
            assert count, left
            digest.update(buffer[:count])
            file.write(buffer[:count])
            left -= count
        file.flush()
        os.fsync(file.fileno())
    return {"cpu": time.process_time() - before}


async def ticks(late: list[float]) -> None:
    """How much later than asked for each tick comes, in seconds."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK
        await asyncio.sleep(TICK)
        late.append(loop.time() - due)


async def ours(uri: str, directory: str) -> dict[str, float]:
    """The fetcher: listing, download, sha256, checks, publication."""
    store = AdapterStore.open(f"{directory}/adapters")
    fetcher = OriginFetcher(Settings(), store)
    listing = await fetcher.listing(wanted(uri))  # the import of boto3 is paid once a process, not once an adapter
    await asyncio.to_thread(touch_memory, listing.size, directory)
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    late: list[float] = []
    ticking = asyncio.create_task(ticks(late))
    cpu, wall = time.process_time(), time.perf_counter()
    await fetcher.fetch(wanted(uri), listing, None, ignore)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    ticking.cancel()
    await fetcher.close()
    store.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "cpu": cpu,
        "wall": wall,
        "latest": max(late),
        "p99": statistics.quantiles(late, n=100)[98],
        "rss_mib": (peak - idle) / 1024,
    }


async def idle() -> dict[str, float]:
    """How late the ticks of a loop come that does nothing else, until the standard input ends."""
    late: list[float] = []
    ticking = asyncio.create_task(ticks(late))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    ticking.cancel()
    return {"latest": max(late)}


def beside_an_idle_loop(*arguments: str) -> dict[str, float]:
    """As `child`, with the latest tick of a loop in another process meanwhile: that much is the machine's doing."""
    command = [sys.executable, "-m", "tests.bench.bench_download", "idle"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as control:
        measured = child(*arguments)
        out, _ = control.communicate()
    return {**measured, "control": json.loads(out)["latest"]}


def child(*arguments: str) -> dict[str, float]:
    """One measurement in a process and a directory of its own."""
    directory = tempfile.mkdtemp(prefix="bench-download-")
    try:
        out = subprocess.run(
            [sys.executable, "-m", "tests.bench.bench_download", *arguments, directory],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    measured: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return measured


def main(record_it: bool) -> None:
    """Print, and record if asked to."""
    with S3Server() as s3:
        os.environ.update(s3.env)
        files = adapter("bench", weights_bytes=MEBIBYTES * MIB)
        uri = upload(s3, "bench", files)
        size = len(files["adapter_model.safetensors"])
        del files
        url = s3.client.generate_presigned_url(
            "get_object", Params={"Bucket": "bucket", "Key": "bench/adapter_model.safetensors"}
        )
        bares, ourses = [], []
        for _ in range(RUNS):  # alternating: the machine's mood changes
            bares.append(child("bare", url, str(size)))
            ourses.append(beside_an_idle_loop("ours", uri))
    body = report(size / 1e9, bares, ourses)
    print(body)
    if record_it:
        record("Download from S3", "python -m tests.bench.bench_download --record", body)


def report(gigabytes: float, bares: list[dict[str, float]], ourses: list[dict[str, float]]) -> str:
    """As it is recorded."""
    low_bare, low = (min(run["cpu"] for run in runs) / gigabytes for runs in (bares, ourses))
    middle_bare, middle = (statistics.median(run["cpu"] for run in runs) / gigabytes for runs in (bares, ourses))
    rows = [
        ("bare socket to file, with sha256", f"{low_bare:.2f}", f"{middle_bare:.2f}"),
        ("the fetcher: parts, sha256, checks, publication", f"{low:.2f}", f"{middle:.2f}"),
        ("ratio (budget 1.5)", f"{low / low_bare:.2f}", f"{middle / middle_bare:.2f}"),
    ]
    latest, control = ([1000 * run[kind] for run in ourses] for kind in ("latest", "control"))
    return "\n".join(
        [
            f"{gigabytes:.2f} GB in one file, {RUNS} runs each, taking turns, each in a process of its own.",
            "",
            table(("CPU s/GB", "best", "median"), rows),
            "",
            f"The event loop's latest tick while that was downloaded and hashed (budget 50 ms): best {min(latest):.0f},"
            f" median {statistics.median(latest):.0f}, worst {max(latest):.0f} ms;"
            f" median of the 99th percentiles {1000 * statistics.median(run['p99'] for run in ourses):.0f} ms."
            f" The latest of an idle loop in another process at the same time: best {min(control):.0f},"
            f" median {statistics.median(control):.0f}, worst {max(control):.0f} ms.",
            f"{gigabytes * 1000 / min(run['wall'] for run in ourses):.0f} MB/s at best;"
            f" {max(run['rss_mib'] for run in ourses):.0f} MiB more than after the listing at most.",
        ]
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bare", url, size, directory]:
            print(json.dumps(bare(url, int(size), directory)))
        case ["idle"]:
            print(json.dumps(asyncio.run(idle())))
        case ["ours", uri, directory]:
            print(json.dumps(asyncio.run(ours(uri, directory))))
        case arguments:
            main("--record" in arguments)
