"""More adapters than the engine keeps in memory, asked for at once, while the agent updates, deletes and evicts them.

SOAK_SECONDS says how long (60): an hour by hand, which SOAK_RECORD=1 writes down among the recorded results.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.edges.sample_adapter import write_adapter
from tests.bench.results import record, table
from tests.s3server import S3Server
from tests.vllm.agent import Agent, Row
from tests.vllm.client import LONG, Client
from tests.vllm.server import VllmServer

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
HOUR = SECONDS >= 1800
NAMES = tuple(f"n{number}" for number in range(8))
# Two names always wait for room, and twice as many fit as the engine keeps in memory.
CAPACITY = 6
PROMPTS = ("hello", "To be, or not to be", LONG)
COUNTS = (8, 24)
ASKERS = 4
# A content has 36 KB, and there is one every three seconds or so. Files of what was unloaded stay for ten minutes, so
# the hour needs room for 300; the minute can't wait so long.
QUOTA, KEEP_SECONDS = ("14M", 600.0) if HOUR else ("550k", 10.0)


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

    def judge(self, name: str, prompt: str, count: int, status: int, answer: object) -> None:
        self.statuses[status] += 1
        right = [tokens[:count] for tokens in self.allowed.get((name, prompt), [])]
        if status == 200 and answer not in right:
            self.wrong.append(f"{name} gave {answer} to {prompt[:20]!r}: no content of its own does")
        elif status not in (200, 404):
            self.wrong.append(f"{name} gave {status}: {answer}")


def ask(truth: Truth, client: Client, seed: int) -> None:
    """One client: any name, any prompt, again and again."""
    rng = random.Random(seed)
    while not truth.ended.is_set():
        name, prompt, count = rng.choice(NAMES), rng.choice(PROMPTS), rng.choice(COUNTS)
        try:
            status, answer = client.complete(name, prompt, count)
        except OSError as error:
            status, answer = 0, repr(error)
        truth.judge(name, prompt, count, status, answer)
        if status == 404:
            time.sleep(0.05)


@dataclass
class Publisher:
    """New content for a name: never the same twice, its answers learnt from the engine past the agent."""

    folder: Path
    s3: S3Server
    client: Client
    truth: Truth
    did: Counter[str] = field(default_factory=Counter)
    uris: dict[str, str] = field(default_factory=dict)
    priorities: Counter[str] = field(default_factory=Counter)

    def publish(self, agent: Agent, name: str) -> None:
        """New content under `name`, whether it is there or not."""
        self.did["contents"] += 1
        number = self.did["contents"]
        made = write_adapter(self.folder / f"v{number}", f"soak-{number}")
        for file in made.iterdir():
            self.s3.put("soak", f"{number}/{file.name}", file.read_bytes())
        self.truth.learn(name, self.client.direct(made, *PROMPTS, count=max(COUNTS)))
        self.did["updates" if name in self.uris else "creations"] += 1
        self.uris[name] = f"s3://soak/{number}"
        self._apply(agent, name)

    def promote(self, agent: Agent, name: str) -> None:
        """Put `name` before all others: who was the last to have room loses it."""
        self.did["promotions"] += 1
        self.priorities[name] = max(self.priorities.values(), default=0) + 1
        self._apply(agent, name)

    def delete(self, agent: Agent, name: str) -> None:
        self.did["deletions"] += 1
        del self.uris[name]
        agent.delete(name)

    def best(self) -> list[str]:
        """Names in the order in which they are given room."""
        return sorted(self.uris, key=lambda name: (-self.priorities[name], name))

    def _apply(self, agent: Agent, name: str) -> None:
        agent.apply(name, self.uris[name], priority=self.priorities[name], drainSeconds=1)


@dataclass
class Watcher:
    """Looks at the agent and the engine all the time."""

    agent: Agent
    client: Client
    truth: Truth
    displaced: int = 0
    before: dict[str, Row] = field(default_factory=dict)

    def run(self) -> None:
        while not self.truth.ended.wait(0.2):
            rows = self.agent.rows()
            for name, row in rows.items():
                had = self.before.get(name, {}).get("state") in ("Loaded", "Draining")
                self.displaced += had and row["state"] == "Waiting"
            self.before = rows or self.before
            try:
                roots = self.client.models()
            except OSError as error:
                self.truth.wrong.append(f"the engine doesn't answer: {error!r}")
                return
            for name, root in roots.items():
                if not Path(root).is_dir():
                    self.truth.wrong.append(f"{name} is loaded, and its files at {root} are gone")


def test_soak(vllm: VllmServer, s3: S3Server, tmp_path: Path) -> None:
    client, truth, rng = Client(vllm.url), Truth(), random.Random(7)
    publisher = Publisher(tmp_path / "made", s3, client, truth)
    flags = ("--capacity", str(CAPACITY), "--disk-quota", QUOTA)
    hasty = None if HOUR else {"keep_files_seconds": KEEP_SECONDS}
    with Agent(tmp_path / "agent", vllm.url, *flags, env=s3.env, hasty=hasty) as agent:
        for name in NAMES:
            publisher.publish(agent, name)
        agent.until(lambda: _settled(agent, publisher), "all that fit are loaded", 120)
        watcher = Watcher(agent, client, truth)
        threads = [threading.Thread(target=ask, args=(truth, client, seed), daemon=True) for seed in range(ASKERS)]
        threads.append(threading.Thread(target=watcher.run, daemon=True))
        for thread in threads:
            thread.start()
        try:
            _disturb(agent, publisher, rng, time.monotonic() + SECONDS)
            agent.until(lambda: _settled(agent, publisher), "what fits is loaded with its last content", 240)
        except OSError as error:
            raise AssertionError(f"the engine is gone: {error}\n{vllm.tail()}") from error
        finally:
            truth.ended.set()
            for thread in threads:
                thread.join(60)
        assert vllm.exited() is None, vllm.tail()
        assert truth.wrong == []
        for name in publisher.best()[:CAPACITY]:
            expected = [truth.allowed[name, prompt][-1] for prompt in PROMPTS]
            assert [client.tokens(name, prompt, max(COUNTS)) for prompt in PROMPTS] == expected
        for name in list(publisher.uris):
            publisher.delete(agent, name)
        agent.until(lambda: client.models() == {}, "everything is unloaded", 120)
        events = Counter(json.loads(line).get("event") for line in agent.log.read_text().splitlines())
    assert truth.statuses[200] > 20
    assert watcher.displaced > 0
    assert events["revision_evicted"] > 0
    _report(publisher, watcher, events)


def _disturb(agent: Agent, publisher: Publisher, rng: random.Random, until: float) -> None:
    publisher.promote(agent, publisher.best()[-1])  # a minute may have no other
    while time.monotonic() < until and not publisher.truth.wrong:
        name, dice = rng.choice(NAMES), rng.random()
        if name in publisher.uris and dice < 0.2:
            publisher.delete(agent, name)
        elif name in publisher.uris and dice < 0.4:
            publisher.promote(agent, publisher.best()[-1])
        else:
            publisher.publish(agent, name)
        time.sleep(rng.uniform(0.5, 3.0))
    for name in NAMES:
        if name not in publisher.uris:
            publisher.publish(agent, name)


def _settled(agent: Agent, publisher: Publisher) -> bool:
    rows, best = agent.rows(), publisher.best()
    return all(
        rows.get(name, {}).get("state") == "Loaded"
        and rows[name]["source"] == publisher.uris[name]
        and rows[name]["revision"] == rows[name]["wantedRevision"]
        for name in best[:CAPACITY]
    ) and all(rows.get(name, {}).get("state") == "Waiting" for name in best[CAPACITY:])


def _report(publisher: Publisher, watcher: Watcher, events: Counter[str]) -> None:
    truth, did = publisher.truth, publisher.did
    rows = [
        ["requests answered (200)", truth.statuses[200]],
        ["requests for a name that was not loaded just then (404)", truth.statuses[404]],
        ["answers that no content of the name gives, and other failures", len(truth.wrong)],
        ["contents published", did["contents"]],
        ["updates under a name", did["updates"]],
        ["deletions", did["deletions"]],
        ["priorities raised", did["promotions"]],
        ["adapters pushed out by others", watcher.displaced],
        ["loads by the agent", events["adapter_loaded"]],
        ["unloads by the agent, updates not counted", events["adapter_unloaded"]],
        ["revisions evicted from the disk", events["revision_evicted"]],
        ["times that the engine ended or was restarted", 0],
    ]
    text = table([f"over {SECONDS:g} s", "count"], rows)
    print(f"\n{text}")
    if os.environ.get("SOAK_RECORD"):
        note = (
            f"vLLM on the CPU, two slots and three adapters in memory; {len(NAMES)} names, room for {CAPACITY}; "
            f"{ASKERS} clients\nthat ask all the time, one prompt in three longer than two cache blocks. "
            f"--disk-quota {QUOTA}; files of what was unloaded\nare kept for {KEEP_SECONDS:g} s."
        )
        command = f"SOAK_RECORD=1 SOAK_SECONDS={SECONDS:g} python -m pytest -s tests/vllm/test_soak.py"
        record("Soak on the real vLLM", command, f"{text}\n\n{note}")
