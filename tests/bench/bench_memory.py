"""Resident memory and idle CPU of the standalone agent: 10 adapters from file://, 10 peers.

`python -m tests.bench.bench_memory [--record] [--peers 10] [--adapters 10]`. Starts as many real `lora-sidecar run`
processes with a stub engine each, loads every adapter on every worker, and reads /proc of all of them at rest.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys

from tests.bench.agents import AgentPool
from tests.bench.results import record, table

HEADING = "Memory of the standalone agent"
COMMAND = "python -m tests.bench.bench_memory --record"
BUDGET_MIB = 56
REST_SECONDS = 20.0
IMPORTS = {
    "a bare interpreter": "pass",
    "with asyncio": "import asyncio",
    "with aiohttp, structlog, msgspec, PyYAML, prometheus-client": (
        "import asyncio, aiohttp.web, structlog, msgspec, yaml, prometheus_client"
    ),
    "with all modules of the agent": "import sidecar.app, sidecar.cli.run",
}
SHOW = ";import re;print(re.search(r'VmRSS:\\s*(\\d+)', open('/proc/self/status').read())[1])"


def imported(code: str) -> float:
    """MiB resident in a new interpreter after these imports; the second start, which has bytecode."""
    command = [sys.executable, "-c", code + SHOW]
    subprocess.run(command, check=True, capture_output=True)
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024


async def measure(peers: int, adapters: int) -> str:
    async with AgentPool(peers + 1, capacity=max(adapters, 1)) as pool:
        await pool.settle()
        empty = [a.status("VmRSS") for a in pool.agents]
        names = {f"adapter-{i}" for i in range(adapters)}
        for name in names:
            pool.apply(name, pool.write_adapter(name))
        await pool.until(lambda: all(a.loaded == names for a in pool.agents), "all adapters loaded everywhere")
        before = [a.cpu_seconds for a in pool.agents]
        await asyncio.sleep(REST_SECONDS)
        idle = [100 * (a.cpu_seconds - b) / REST_SECONDS for a, b in zip(pool.agents, before, strict=True)]
        full = [a.status("VmRSS") for a in pool.agents]
        own = [a.status("RssAnon") for a in pool.agents]
        peak = [a.status("VmHWM") for a in pool.agents]
    rows = [[what, f"{imported(code):.1f}", ""] for what, code in IMPORTS.items()]
    rows += [
        [f"agent that knows {peers} peers, no adapters", *_middle_and_most(empty)],
        [f"the same with {adapters} adapters loaded, at rest", *_middle_and_most(full)],
        ["of that, its own (RssAnon: not shared with files)", *_middle_and_most(own)],
        ["its peak", *_middle_and_most(peak)],
    ]
    return "\n".join(
        [
            table(["what", "MiB", "most of all"], rows),
            "",
            f"Resident (VmRSS); agents: the median and the largest of {peers + 1}. Budget: {BUDGET_MIB} MiB at rest.",
            f"CPU at rest, asking {peers} peers without gossip: {statistics.median(idle):.2f} % of a core (most: "
            f"{max(idle):.2f} %), over {REST_SECONDS:.0f} s.",
        ]
    )


def _middle_and_most(values: list[float]) -> list[str]:
    return [f"{statistics.median(values):.1f}", f"{max(values):.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the section of RESULTS.md")
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--adapters", type=int, default=10)
    args = parser.parse_args()
    body = asyncio.run(measure(args.peers, args.adapters))
    print(body)
    if args.record:
        record(HEADING, COMMAND, body)


if __name__ == "__main__":
    main()
