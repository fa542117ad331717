"""Many workers fetch one adapter at once from an origin of limited speed, and from each other.

`python -m tests.bench.bench_tree [--record] [--workers 16] [--mib 191] [--rate 50]`. Each worker is a process of its
own with gossip, HTTP server, store and fetcher; the origin speaks S3's protocol and gives all its readers together
`rate` million bytes a second. Measured against one worker alone, with the same origin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from sidecar.core.keyring import INSECURE
from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.edges.flights import Flights
from sidecar.edges.peer_fetch import PeerTransfer
from sidecar.edges.peer_files import routes as file_routes
from sidecar.edges.peer_sync import HttpSync
from sidecar.edges.peer_sync import routes as sync_routes
from sidecar.edges.udp import UdpEndpoint
from sidecar.loops.gossip import GossipPeers
from sidecar.model import Adapter, Head, Member, Record, Source
from sidecar.settings import Settings
from tests.adapters import adapter
from tests.bench.results import record, table
from tests.edges.gossip_nodes import Later
from tests.ports import free_ports

HEADING = "One adapter for many workers"
COMMAND = "python -m tests.bench.bench_tree --record"
RUNS = 3
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Origin:
    """Enough of S3 for a listing and ranged reads, at a rate for all readers together."""

    def __init__(self, size: int, rate: float) -> None:
        config = adapter()[CONFIG]
        columns = size // (4 * 8)
        header = {
            f"base_model.model.model.layers.0.self_attn.q_proj.{side}.weight": {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": offsets,
            }
            for side, shape, offsets in (
                ("lora_A", [8, columns], [0, 32 * columns]),
                ("lora_B", [16, 8], [32 * columns, 32 * columns + 512]),
            )
        }
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        block = random.Random(size).randbytes(1024 * 1024)
        body = (block * (32 * columns // len(block) + 1))[: 32 * columns]
        self.files = {CONFIG: config, WEIGHTS: struct.pack("<Q", len(raw)) + raw + body + bytes(512)}
        self.rate = rate
        self.sent = 0
        self._free_at = 0.0

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        name = request.path.rpartition("/")[2]
        if name not in self.files:
            return web.Response(text=self._listing(), content_type="application/xml")
        data = self.files[name]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", f"bytes=0-{len(data) - 1}"))
        assert asked is not None
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
        response = web.StreamResponse(
            status=206, headers={"ETag": f'"{len(data)}"', "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        )
        response.content_length = stop - start
        await response.prepare(request)
        view = memoryview(data)
        for at in range(start, stop, 256 * 1024):
            part = view[at : min(at + 256 * 1024, stop)]
            await self._turn(len(part))
            await response.write(part)
            self.sent += len(part)
        await response.write_eof()
        return response

    async def _turn(self, size: int) -> None:
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size / self.rate
        await asyncio.sleep(self._free_at - now - 0.02 if self._free_at - now > 0.02 else 0)

    def _listing(self) -> str:
        rows = "".join(
            f"<Contents><Key>adapters/one/{name}</Key><Size>{len(data)}</Size><ETag>&quot;{len(data)}&quot;</ETag>"
            "<LastModified>2025-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for name, data in self.files.items()
        )
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
            f"<Prefix>adapters/one/</Prefix><KeyCount>2</KeyCount><IsTruncated>false</IsTruncated>{rows}"
            "</ListBucketResult>"
        )


async def worker(number: int, ports: Sequence[int], directory: str) -> None:
    """One process: fetches when it is told to on its standard input, and says how it went."""
    names = [f"worker-{n}" for n in range(len(ports))]
    side = Later()
    store = AdapterStore.open(directory)
    flights = Flights()
    app = web.Application()
    app.add_routes([*sync_routes(side), *file_routes(side, store, flights)])  # type: ignore[arg-type]  # see Later
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = ports[number]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    members = tuple(Member(name=name, address=f"127.0.0.1:{port}") for name, port in zip(names, ports, strict=True))
    peers: Any = GossipPeers(
        uid=f"uid-of-{names[number]}",
        generation=int(time.time()),
        pool="pool",
        keys=INSECURE,
        datagrams=UdpEndpoint("127.0.0.1", port),
        client=HttpSync(),
        members=lambda: members,
        clock=time.time,
    )
    side.peers = peers
    peers.announce(
        Record(head=Head(uid=f"uid-of-{names[number]}", name=names[number], pool="pool", address=f"127.0.0.1:{port}"))
    )
    running = asyncio.create_task(peers.run(lambda: None))
    transfer = PeerTransfer(peers, flights, me=names[number], targets=lambda key: names)
    fetcher = OriginFetcher(Settings(), store, peers=transfer if len(names) > 1 else None)
    while sum(observed.alive for observed in peers.view().values()) < len(names) - 1:  # noqa: ASYNC110  # a benchmark
        await asyncio.sleep(0.05)
    source = Source(uri="s3://bucket/adapters/one")
    wants = Adapter(namespace="ns", name="a", base_model="base-model", served_name="a", source=source, uid="a")
    await fetcher.listing(wants)  # boto3 is imported, as in an agent that has fetched before
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    before = resource.getrusage(resource.RUSAGE_SELF)
    fetched = await fetcher.fetch(wants, await fetcher.listing(wants), None, lambda done, total: None)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = {"user": after.ru_utime - before.ru_utime, "system": after.ru_stime - before.ru_stime}
    print(json.dumps({"revision": fetched.revision, "peak": peak(), **cpu}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    running.cancel()
    await fetcher.close()


def peak() -> float:
    """MiB; the system's count for children begins with what their parent had."""
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def touch(size: int, directory: Path) -> None:
    """Have the machine's memory for so many bytes of files there and free.

    A virtual machine whose host takes back free memory gives it again page by page, which costs more than all the rest
    of a download (2 s of CPU for a GB here, and nothing on hardware), and falls on the many much more than on the one.
    """
    path, block = directory / "touched", bytes(range(256)) * 4096
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
    path.unlink()


async def fetch_all(count: int, origin: Origin, endpoint: str) -> dict[str, float]:
    """Start that many workers, have all fetch at the same moment, wait for the last."""
    ports = free_ports(count)
    origin.sent = 0
    environment = os.environ | {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for number in range(count):
            arguments = [str(number), ",".join(map(str, ports)), str(Path(directory, str(number)))]
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tests.bench.bench_tree",
                    "--worker",
                    *arguments,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=environment,
                )
            )
        try:
            for process in processes:
                assert process.stdout is not None
                while (await process.stdout.readline()).strip() not in (b"ready", b""):
                    pass
            touch(count * sum(map(len, origin.files.values())) * 5 // 4, Path(directory))
            started = time.monotonic()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(b"go\n")
            results = await asyncio.gather(*(_result(process) for process in processes))
            took = time.monotonic() - started
        finally:
            for process in processes:
                process.kill()
            await asyncio.gather(*(process.wait() for process in processes))
    assert len({result["revision"] for result in results}) == 1
    return {
        "seconds": took,
        "origin": origin.sent / sum(map(len, origin.files.values())),
        "user": sum(float(result["user"]) for result in results),
        "system": sum(float(result["system"]) for result in results),
        "peak": max(float(result["peak"]) for result in results),
    }


async def _result(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    while True:
        line = await process.stdout.readline()
        if line.startswith(b"{"):
            found: dict[str, Any] = json.loads(line)
            return found
        if not line:
            raise RuntimeError("a worker has ended early")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--mib", type=int, default=191)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--worker", nargs=3, default=None)
    options = parser.parse_args()
    if options.worker:
        number, ports, directory = options.worker
        await worker(int(number), [int(port) for port in ports.split(",")], directory)
        return
    origin = Origin(options.mib * 1024 * 1024, options.rate * 1e6)
    endpoint = await origin.start()
    rows: list[list[str]] = []
    best: dict[int, float] = {}
    for count in (1, options.workers):
        runs = [await fetch_all(count, origin, endpoint) for _ in range(RUNS)]
        quickest = min(runs, key=lambda run: run["seconds"])
        best[count] = quickest["seconds"]
        rows.append(
            [
                f"{count}",
                f"{quickest['seconds']:.2f}",
                f"{quickest['seconds'] / best[1]:.2f}",
                f"{max(run['origin'] for run in runs):.3f}",
                f"{quickest['user']:.1f} + {quickest['system']:.1f}",
                f"{max(run['peak'] for run in runs):.0f}",
            ]
        )
    await origin.stop()
    size = sum(map(len, origin.files.values()))
    head = [
        "workers",
        "s until the last has it",
        "of one alone",
        "bytes from the origin",
        "CPU s, user + system",
        "MiB peak",
    ]
    text = (
        f"{table(head, rows)}\n\n"
        f"{size / 1e6:.0f} MB from an origin that gives {options.rate:.0f} MB/s to all its readers together; the "
        f"quickest of {RUNS} runs,\nbut the most bytes (as a multiple of the size) and memory of any. CPU is the "
        "workers' from the moment when they\nbegin, without their start; the machine's memory has been touched before. "
        "The budget is 1.4 times one worker's time\nand 1.05 times its bytes."
    )
    print(text)
    if options.record:
        record(HEADING, COMMAND, text)


if __name__ == "__main__":
    asyncio.run(main())
