"""A pool of real agent processes that gossip, and what a test reads from them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.agents import Agent, AgentPool

ONE, TWO = "the first key of this pool, for tests", "the second key of this pool, for tests"


def key_file(path: Path, *keys: str) -> str:
    """Write a key file as a mounted Secret is written, at once; returns its path."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text("".join(f"{key}\n" for key in keys))
    hidden.rename(path)
    return str(path)


async def rows(pool: AgentPool, agent: Agent) -> dict[str, dict[str, Any]]:
    """What the agent says about the pool's workers, by name."""
    return {row["name"]: row for row in json.loads(await pool.text(agent, "/v1/peers"))["peers"]}


async def states(pool: AgentPool, agent: Agent) -> dict[str, str]:
    """The state of each worker in the agent's eyes."""
    return {name: row["state"] for name, row in (await rows(pool, agent)).items()}


async def problems(pool: AgentPool, agent: Agent) -> str:
    """All that it shows to people, as one text."""
    return json.dumps(json.loads(await pool.text(agent, "/v1/adapters"))["problems"])


async def counted(pool: AgentPool, agent: Agent, series: str) -> float:
    """The value of one series of its metrics."""
    found = re.search(rf"(?m)^{re.escape(series)} (\S+)$", await pool.text(agent, "/metrics"))
    assert found, f"no {series}"
    return float(found[1])


async def eventually(condition: Callable[[], Awaitable[bool]], within: float, what: str) -> float:
    """Seconds until it holds. An agent that doesn't listen yet is waited for."""

    async def holds() -> bool:
        try:
            return await condition()
        except aiohttp.ClientConnectionError:
            return False

    began = time.monotonic()
    while not await holds():
        assert time.monotonic() - began < within, f"{what}: not within {within:g} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


def holders(pool: AgentPool, name: str) -> set[str]:
    """The workers whose engines serve it."""
    return {agent.name for agent in pool.agents if name in agent.loaded}
