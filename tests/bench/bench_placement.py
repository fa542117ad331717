"""How long placement takes, and how late it makes the event loop beside it.

`python -m tests.bench.bench_placement [--record]`. Every case runs in a process of its own, in a thread beside an event
loop that ticks each millisecond, as the agent runs it. The budget is 0.5 s and 20 ms for 10,000 adapters on 1,000
workers with capacities.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sidecar.core.placement import Assignment, Worker, in_order, place, place_plainly
from sidecar.core.pool import Pool
from sidecar.model import Adapter, Distribution, Source
from tests.bench.results import record, table

HEADING = "Placement"
COMMAND = "python -m tests.bench.bench_placement --record"
BUDGET_CASE = "3 of 1,000, rooms 80 % used, 3 zones"
Placed = dict[str, Assignment]


def fixed(count: int) -> Distribution:
    return Distribution(strategy="fixed", replicas=count)


def mixed(i: int) -> Distribution:
    """Three in four want one to three; some a percentage; one in a hundred wants everyone."""
    if i % 100 == 0:
        return Distribution()
    return Distribution(strategy="percentage", percentage=1) if i % 4 == 0 else fixed(1 + i % 3)


def adapters(count: int, distribution: Callable[[int], Distribution]) -> list[Adapter]:
    return [
        Adapter(
            namespace="default",
            name=f"adapter-{i}",
            base_model="base",
            served_name=f"adapter-{i}",
            source=Source(uri=f"s3://bucket/adapter-{i}/"),
            distribution=distribution(i),
            created=i // 10,
        )
        for i in range(count)
    ]


def workers(count: int, room: int, zones: int) -> list[Worker]:
    return [
        Worker(name=f"vllm-{i}", uid=f"uid-{i}", zone=f"zone-{i % zones}", base_models=("base",), room=room)
        for i in range(count)
    ]


# name -> adapters, workers, room of each worker, zones, distribution
CASES: dict[str, tuple[int, int, int, int, Callable[[int], Distribution]]] = {
    "3 of 10, 10 adapters": (10, 10, 4, 1, lambda _: fixed(3)),
    "3 of 20, 1,000 adapters": (1_000, 20, 190, 3, lambda _: fixed(3)),
    "3 of 1,000, 1,000 adapters": (1_000, 1_000, 4, 3, lambda _: fixed(3)),
    BUDGET_CASE: (10_000, 1_000, 38, 3, lambda _: fixed(3)),
    "3 of 1,000, rooms 95 % used, 3 zones": (10_000, 1_000, 32, 3, lambda _: fixed(3)),
    "3 of 1,000, room for 80 % of them": (10_000, 1_000, 24, 3, lambda _: fixed(3)),
    "3 of 1,000, no zones": (10_000, 1_000, 38, 1, lambda _: fixed(3)),
    "8 of 1,000, rooms 80 % used, 3 zones": (10_000, 1_000, 100, 3, lambda _: fixed(8)),
    "all of 1,000, room for 30": (10_000, 1_000, 30, 3, lambda _: Distribution()),
    "mixed, rooms 95 % used, 3 zones": (10_000, 1_000, 146, 3, mixed),
}


def memory(field: str) -> float:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


async def beside_a_loop(work: Callable[[], Placed]) -> tuple[Placed, float, float, float]:
    """(result, wall seconds, CPU seconds, seconds by which the latest tick of the loop came late)."""
    latest = 0.0

    async def tick() -> None:
        nonlocal latest
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            latest = max(latest, time.perf_counter() - due)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    latest = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    result = await asyncio.to_thread(work)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await asyncio.sleep(0.002)
    ticking.cancel()
    return result, wall, cpu, latest


def scores_alone(some: list[Adapter], pool: list[Worker]) -> float:
    """CPU seconds for nothing but the scores of all pairs and the best worker of each adapter."""
    import numpy as np

    from sidecar.core.hashing import adapter_hash
    from sidecar.core.placement_blocks import BLOCK_SCORES, _scores

    own = np.array([adapter_hash(a.namespace, a.name) for a in some], dtype=np.uint64)
    hashes = np.array(Pool(pool).hashes, dtype=np.uint64)
    rows = BLOCK_SCORES // len(hashes)
    began = time.process_time()
    for start in range(0, len(own), rows):
        _scores(own[start : start + rows], hashes).argmax(axis=1)
    return time.process_time() - began


def run_case(name: str) -> dict[str, Any]:
    """Measure one case in this process."""
    count, size, room, zones, distribution = CASES[name]
    some, pool = adapters(count, distribution), workers(size, room, zones)
    if count * size > 20_000:
        import sidecar.core.placement_blocks  # noqa: F401  # its import is paid once, not by each placement
    gc.collect()
    before = memory("VmRSS")
    cold, *_, cold_cpu, _late = asyncio.run(beside_a_loop(lambda: place(some, pool)))
    after, peak = memory("VmRSS"), memory("VmHWM")
    runs: list[list[float]] = []
    for _ in range(5):
        placed, *numbers = asyncio.run(beside_a_loop(lambda: place(some, pool)))
        assert placed == cold
        runs.append(numbers)
    return {
        "targets": sum(len(a.targets) for a in cold.values()),
        "short": sum(a.short for a in cold.values()),
        "cold_cpu": cold_cpu,
        "wall": min(runs)[0],
        "cpu": min(runs)[1],
        "late": min(runs)[2],
        "kept": after - before,
        "peak": peak - before,
    }


def run_ratios() -> dict[str, float]:
    """CPU of what can be compared, measured one after the other in this process."""
    some, pool = adapters(1_000, lambda _: fixed(3)), workers(1_000, 4, 3)
    began = time.process_time()
    plain = place_plainly(in_order(some), Pool(pool))
    plain_cpu = time.process_time() - began
    began = time.process_time()
    assert place(some, pool) == plain
    cold_blocks = time.process_time() - began
    began = time.process_time()
    place(some, pool)
    blocks = time.process_time() - began
    many, large = adapters(10_000, lambda _: fixed(3)), workers(1_000, 38, 3)
    place(many, large)
    whole = min(_cpu(lambda: place(many, large)) for _ in range(3))
    alone = min(scores_alone(many, large) for _ in range(3))
    return {"plain": plain_cpu, "blocks": blocks, "first": cold_blocks, "whole": whole, "alone": alone}


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def in_a_process(argument: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_placement", "--case", argument],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]  # our own output


def report() -> str:
    rows = []
    for name, (count, size, *_rest) in CASES.items():
        m = in_a_process(name)
        rows.append(
            [
                name,
                f"{count:,} x {size:,}",
                f"{m['targets']:,}",
                f"{m['short']:,}",
                f"{m['wall'] * 1e3:.1f}",
                f"{m['cpu'] * 1e3:.1f}",
                f"{m['late'] * 1e3:.1f}",
                f"{m['kept']:.1f}",
                f"{m['peak']:.1f}",
            ]
        )
    r = in_a_process("ratios")
    head = ["case", "pairs", "targets", "short", "wall ms", "CPU ms", "latest tick ms", "kept MiB", "peak MiB"]
    return "\n".join(
        [
            table(head, rows),
            "",
            "Full placements from nothing, the quickest run of five; memory is of the first, without numpy's import.",
            "The latest tick is of a loop that ticks each millisecond beside it, and includes waiting for the CPU.",
            f"The budget is 500 ms and 20 ms for '{BUDGET_CASE}'.",
            "",
            f"Ratios of CPU: 1,000 x 1,000 in plain Python takes {r['plain'] / r['blocks']:.0f} times as long as in",
            f"blocks ({r['plain'] * 1e3:.0f} and {r['blocks'] * 1e3:.0f} ms, once numpy is imported). 10,000 x 1,000",
            f"with room given out takes {r['whole'] / r['alone']:.1f} times as long as the bare scores with the best",
            f"worker of each ({r['whole'] * 1e3:.0f} and {r['alone'] * 1e3:.0f} ms).",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the section of RESULTS.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_ratios() if args.case == "ratios" else run_case(args.case)))
        return
    body = report()
    print(body)
    if args.record:
        record(HEADING, COMMAND, body)


if __name__ == "__main__":
    main()
