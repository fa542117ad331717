"""More adapters than the engine keeps in memory, asked for at once, while the agent updates, deletes and evicts them.

SOAK_SECONDS says how long (60): an hour by hand.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sidecar.edges.sample_adapter import write_adapter
from tests.s3server import S3Server
from tests.vllm.agent import Agent
from tests.vllm.client import LONG, Client
from tests.vllm.server import VllmServer

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
NAMES = tuple(f"n{number}" for number in range(8))
PROMPTS = ("hello", "To be, or not to be", LONG)
ASKERS = 4


@dataclass
class Truth:
    """What each name may answer to each prompt: the tokens of every content that it was ever given, and of no other."""

    allowed: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    ended: threading.Event = field(default_factory=threading.Event)

    def learn(self, name: str, answers: list[list[int]]) -> None:
        for prompt, tokens in zip(PROMPTS, answers, strict=True):
            self.allowed.setdefault((name, prompt), []).append(tokens)

    def judge(self, name: str, prompt: str, status: int, answer: object) -> None:
        self.statuses[status] += 1
        if status == 200 and answer not in self.allowed.get((name, prompt), []):
            self.wrong.append(f"{name} gave {answer} to {prompt[:20]!r}: no content of its own does")
        elif status not in (200, 404):
            self.wrong.append(f"{name} gave {status}: {answer}")


def ask(truth: Truth, client: Client, seed: int) -> None:
    """One client: any name, any prompt, again and again."""
    rng = random.Random(seed)
    while not truth.ended.is_set():
        name, prompt = rng.choice(NAMES), rng.choice(PROMPTS)
        try:
            status, answer = client.complete(name, prompt, 8)
        except OSError as error:
            status, answer = 0, repr(error)
        truth.judge(name, prompt, status, answer)


@dataclass
class Publisher:
    """New content for a name: never the same twice, its answers learnt from the engine past the agent."""

    folder: Path
    s3: S3Server
    client: Client
    truth: Truth
    count: int = 0

    def publish(self, agent: Agent, name: str) -> None:
        self.count += 1
        made = write_adapter(self.folder / f"v{self.count}", f"soak-{self.count}")
        for file in made.iterdir():
            self.s3.put("soak", f"{self.count}/{file.name}", file.read_bytes())
        self.truth.learn(name, self.client.direct(made, *PROMPTS, count=8))
        agent.apply(name, f"s3://soak/{self.count}")


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def test_soak(vllm: VllmServer, s3: S3Server, tmp_path: Path) -> None:
    client, truth, rng = Client(vllm.url), Truth(), random.Random(7)
    publisher = Publisher(tmp_path / "made", s3, client, truth)
    # Room for ten minutes of updates, which is how long the files of what was unloaded are kept; then some must go.
    agent = Agent(tmp_path / "agent", vllm.url, "--capacity", "20", "--disk-quota", "20M", env=s3.env)
    with agent:
        for name in NAMES:
            publisher.publish(agent, name)
        for name in NAMES:
            agent.wait(name, "Loaded", 120)
        askers = [threading.Thread(target=ask, args=(truth, client, seed), daemon=True) for seed in range(ASKERS)]
        for asker in askers:
            asker.start()
        try:
            _disturb(agent, publisher, rng, time.monotonic() + SECONDS)
            agent.until(lambda: _settled(agent), "every adapter is loaded with its last content", 120)
        except OSError as error:
            raise AssertionError(f"the engine is gone: {error}\n{vllm.tail()}") from error
        finally:
            truth.ended.set()
            for asker in askers:
                asker.join(60)
        assert vllm.exited() is None, vllm.tail()
        assert truth.wrong == []
        for name in NAMES:
            expected = [truth.allowed[name, prompt][-1] for prompt in PROMPTS]
            assert [client.tokens(name, prompt, 8) for prompt in PROMPTS] == expected
        for name in NAMES:
            agent.delete(name)
        agent.until(lambda: client.models() == {}, "everything is unloaded", 120)
    assert truth.statuses[200] > 20
    print(f"{SECONDS:g} s: {dict(truth.statuses)} answers, {publisher.count} contents")


def _disturb(agent: Agent, publisher: Publisher, rng: random.Random, until: float) -> None:
    gone: set[str] = set()
    while time.monotonic() < until and not publisher.truth.wrong:
        name = rng.choice(NAMES)
        if name not in gone and rng.random() < 0.25:
            agent.delete(name)
            gone.add(name)
        else:
            publisher.publish(agent, name)
            gone.discard(name)
        time.sleep(rng.uniform(0.2, 2.0))
    for name in sorted(gone):
        publisher.publish(agent, name)


def _settled(agent: Agent) -> bool:
    rows = agent.rows()
    return all(
        rows.get(name, {}).get("state") == "Loaded" and rows[name]["revision"] == rows[name]["wantedRevision"]
        for name in NAMES
    )
