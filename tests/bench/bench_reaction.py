"""How soon the pool reacts: a manifest applied, an engine restarted, a worker that dies.

`python -m tests.bench.bench_reaction [--record] [--rounds 20]`. Three real agents with stub engines that load at once;
adapters of 34 KB from file://. The clock runs from the rename of the manifest (or from the engine's first answer, or
the kill) until the last of the engines concerned serves the name.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time

from tests.bench.agents import AgentPool
from tests.bench.results import record, table

HEADING = "Reaction of the standalone pool"
COMMAND = "python -m tests.bench.bench_reaction --record"
AT_ONCE = 100


async def applied(pool: AgentPool, rounds: int) -> list[float]:
    """One manifest for all three workers -> loaded on all."""
    seconds = []
    for i in range(rounds):
        name = f"applied-{i}"
        uri = pool.write_adapter(name)
        await asyncio.sleep(0.3 + 0.037 * i)  # so that rounds don't fall in step with any of the agents' timers
        pool.apply(name, uri)
        seconds.append(await pool.until(lambda n=name: all(n in a.loaded for a in pool.agents), name))  # type: ignore[misc]  # mypy can't infer a lambda with a default
    return seconds


async def applied_together(pool: AgentPool) -> tuple[float, float]:
    """A hundred manifests at once, two workers each -> all loaded; and the CPU seconds that it cost an agent."""
    names = [f"together-{i}" for i in range(AT_ONCE)]
    uris = {name: pool.write_adapter(name) for name in names}
    cpu = sum(a.cpu_seconds for a in pool.agents)
    began = time.perf_counter()
    for name, uri in uris.items():
        pool.apply(name, uri, distribution={"strategy": "fixed", "replicas": 2})
    await pool.until(lambda: all(holders(pool, n) == 2 for n in names), "a hundred manifests")
    return time.perf_counter() - began, (sum(a.cpu_seconds for a in pool.agents) - cpu) / pool.size


async def engine_restarted(pool: AgentPool, rounds: int) -> list[float]:
    """An engine process ends and another one answers -> its adapters loaded again."""
    seconds = []
    for i in range(rounds):
        agent = pool.agents[i % pool.size]
        before = agent.loaded
        await agent.engine.stop()
        await asyncio.sleep(1.5 + 0.2 * (i % 5))
        await agent.engine.restart()
        seconds.append(await pool.until(lambda a=agent, b=before: b <= a.loaded, "an engine's adapters"))  # type: ignore[misc]  # as above
    return seconds


async def worker_died(rounds: int) -> list[float]:
    """A worker's agent and engine are killed -> its adapters loaded on others; a new pool each time."""
    return [await one_death(0.5 + 0.31 * i) for i in range(rounds)]


async def one_death(after: float) -> float:
    names = [f"adapter-{j}" for j in range(12)]
    async with AgentPool(3, capacity=50) as pool:
        await pool.settle()
        for name in names:
            pool.apply(name, pool.write_adapter(name), distribution={"strategy": "fixed", "replicas": 1})
        await pool.until(lambda: all(holders(pool, n) for n in names), "twelve adapters")
        await asyncio.sleep(after)
        victim = max(pool.agents, key=lambda a: len(a.loaded))
        began = time.perf_counter()
        await victim.kill()
        left = [a for a in pool.agents if a is not victim]
        await pool.until(lambda: all(any(n in a.loaded for a in left) for n in names), "the dead worker's adapters")
        return time.perf_counter() - began


def holders(pool: AgentPool, name: str) -> int:
    return sum(name in a.loaded for a in pool.agents)


async def fetches(pool: AgentPool) -> float:
    """How many fetches the agents have made, by their own metrics."""
    texts = [await pool.text(agent, "/metrics") for agent in pool.agents]
    return sum(
        float(value) for text in texts for value in re.findall(r"(?m)^lora_sidecar_fetches_total\{.*\} (\S+)$", text)
    )


async def measure(rounds: int) -> str:
    async with AgentPool(3) as pool:
        await pool.settle()
        await asyncio.sleep(1)
        one = await applied(pool, rounds)
        fetched = await fetches(pool)
        restarts = await engine_restarted(pool, rounds)
        if await fetches(pool) != fetched:
            raise AssertionError("an engine restart made an agent fetch")
        together, cpu = await applied_together(pool)
    deaths = await worker_died(max(3, rounds // 4))
    rows = [
        ["manifest applied -> loaded on all 3", *numbers(one), "0.1, worst 0.5 *"],
        [f"{AT_ONCE} manifests at once -> loaded on 2 of 3 each", *numbers([together]), "3"],
        [f"engine answers again -> its {rounds} adapters loaded", *numbers(restarts), "2"],
        ["worker killed -> its adapters loaded elsewhere (no gossip)", *numbers(deaths), "6"],
    ]
    return "\n".join(
        [
            table(["from -> to", "runs", "p50 s", "worst s", "budget s"], rows),
            "",
            "* is the budget for custom resources, which are watched; the manifests are looked at each 0.25 s.",
            f"A hundred at once cost each agent {cpu:.2f} s of CPU; all three share the machine here.",
            f"The agents had made {fetched:.0f} fetches before the engines restarted, and not one more after.",
        ]
    )


def numbers(seconds: list[float]) -> list[str]:
    ordered = sorted(seconds)
    return [str(len(ordered)), f"{ordered[len(ordered) // 2]:.3f}", f"{ordered[-1]:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the section of RESULTS.md")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    body = asyncio.run(measure(args.rounds))
    print(body)
    if args.record:
        record(HEADING, COMMAND, body)


if __name__ == "__main__":
    main()
