"""Two agents, two real engines, one served name: clients are sent where the agents say, as a label selector would."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_ports
from tests.s3server import S3Server
from tests.vllm.agent import Agent, MakeAgent, Row, upload
from tests.vllm.client import LONG, Client
from tests.vllm.server import VllmServer

# Between taking a worker out of routing and unloading: who looked where to ask has so long to ask.
DRAIN = 5.0


class Pair:
    """Two agents that know each other, with the same manifests."""

    def __init__(self, make_agent: MakeAgent, servers: list[VllmServer]) -> None:
        ports = free_ports(2)
        self.clients = [Client(server.url) for server in servers]
        self.agents: list[Agent] = []
        for number, server in enumerate(servers):
            other = f"127.0.0.1:{ports[1 - number]}"
            agent = make_agent(server, "--seeds", other, name=f"w{number}", port=ports[number], start=False)
            agent.start()
            self.agents.append(agent)

    def apply(self, name: str, uri: str, **spec: object) -> None:
        for agent in self.agents:
            agent.apply(name, uri, **spec)

    def rows(self, name: str) -> list[Row]:
        """What each agent says of an adapter; empty for one that doesn't know it."""
        return [agent.rows().get(name, {}) for agent in self.agents]

    def until(self, name: str, states: list[str], source: str, seconds: float = 120) -> list[str]:
        """Wait for these states of this source; the revisions then."""

        def there() -> bool:
            rows = self.rows(name)
            return [row.get("state") for row in rows] == states and all(row["source"] == source for row in rows)

        self.agents[0].until(there, f"{name} of {source} is {states}", seconds)
        return [row["revision"] for row in self.rows(name)]

    def until_updated(self, name: str, old: list[str], which: tuple[int, ...] = (0, 1)) -> None:
        """Wait until these workers have something else loaded than `old`, as the pool wants it."""

        def updated() -> bool:
            rows = self.rows(name)
            return all(rows[i].get("state") == "Loaded" and rows[i]["revision"] != old[i] for i in which)

        self.agents[which[0]].until(updated, f"{name} is updated on {which}", 120)

    def delete(self, name: str) -> None:
        for agent in self.agents:
            agent.delete(name)
        for agent, client in zip(self.agents, self.clients, strict=True):
            agent.until(lambda client=client: client.models() == {}, f"{name} is unloaded")  # type: ignore[misc] # bound


class Traffic:
    """Sends requests to each worker that is to get some, all the while, and notes what happened."""

    def __init__(self, pair: Pair, name: str, prompt: str) -> None:
        self.pair, self.name, self.prompt = pair, name, prompt
        # Different answers of each worker in the order in which they came, and statuses other than 200.
        self.answers: list[list[list[int]]] = [[], []]
        self.failures: list[object] = []
        self.nobody = 0
        # Which of the two are out, in the order of the changes.
        self.out: list[tuple[bool, ...]] = []
        self.asked = 0
        self._looked = 0.0

    def run(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self._looked = time.monotonic()
            routed = [bool(row.get("routed")) for row in self.pair.rows(self.name)]
            if not any(routed):
                # They are asked one after the other: who was out first may be back by now.
                routed = [bool(row.get("routed")) for row in reversed(self.pair.rows(self.name))][::-1]
            self.nobody += not any(routed)
            out = tuple(not each for each in routed)
            if self.out[-1:] != [out]:
                self.out.append(out)
            for number, client in enumerate(self.pair.clients):
                if routed[number]:
                    self._ask(number, client)

    def _ask(self, number: int, client: Client) -> None:
        status, answer = client.complete(self.name, self.prompt)
        self.asked += 1
        late = time.monotonic() - self._looked > DRAIN
        if status != 200 and not (late and status == 404):
            self.failures.append((number, status, answer))
        elif answer not in self.answers[number]:
            self.answers[number].append(answer)

    def more(self, agent: Agent, count: int = 6) -> None:
        """Until so many more requests have been answered."""
        asked = self.asked
        agent.until(lambda: self.asked >= asked + count, "requests are answered", 120)


@contextmanager
def traffic(pair: Pair, name: str, prompt: str = LONG) -> Iterator[Traffic]:
    made, ended = Traffic(pair, name, prompt), threading.Event()
    thread = threading.Thread(target=made.run, args=(ended,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        thread.join(60)


def test_an_update_goes_from_worker_to_worker_and_what_an_engine_refuses_goes_nowhere(
    make_agent: MakeAgent, vllm: VllmServer, second: VllmServer, s3: S3Server, tiny: Path
) -> None:
    old, new = (Client(vllm.url).direct(tiny / "adapters" / name, LONG)[0] for name in ("a1", "a2"))
    pair = Pair(make_agent, [vllm, second])
    first = upload(s3, "pair/1", tiny / "adapters" / "a1")
    pair.apply("u", first)
    before = pair.until("u", ["Loaded", "Loaded"], first)
    with traffic(pair, "u") as seen:
        seen.more(pair.agents[0])
        # Files that pass every check beforehand, and that the engine refuses: made for another hidden size.
        pair.apply("u", upload(s3, "pair/refused", tiny / "broken" / "wrong-hidden"))
        for agent in pair.agents:
            agent.until(lambda agent=agent: "refused" in agent.rows()["u"]["message"], "the refusal is said", 120)  # type: ignore[misc] # bound
        pair.agents[0].until(
            lambda: [(row["state"], row["revision"]) for row in pair.rows("u")] == [("Loaded", r) for r in before],
            "the old one serves on both",
            120,
        )
        seen.more(pair.agents[0])
        assert seen.answers == [[old], [old]]
        # One engine was tried, and no other.
        refusals = [agent.log.read_text().count('"event": "adapter_load_failed"') for agent in pair.agents]
        assert sorted(refusals) == [0, 1]

        seen.out.clear()
        pair.apply("u", upload(s3, "pair/2", tiny / "adapters" / "a2"))
        pair.until_updated("u", before)
        seen.more(pair.agents[0])
    assert seen.answers == [[old, new], [old, new]]
    assert (seen.failures, seen.nobody) == ([], 0)
    # Both serve, one is out, both serve, the other is out, both serve.
    both = (False, False)
    assert [out for out in seen.out if out != both] in ([(True, False), (False, True)], [(False, True), (True, False)])
    assert [len(client.models()) for client in pair.clients] == [1, 1]
    pair.delete("u")


def test_an_old_vllm_is_held_back_without_holding_up_the_other(
    make_agent: MakeAgent, stale: VllmServer, stubborn: VllmServer, s3: S3Server, tiny: Path
) -> None:
    """The first can reset its prefix cache, the second can't."""
    old, new = (Client(stale.url).direct(tiny / "adapters" / name, LONG)[0] for name in ("a1", "a2"))
    fresh = Client(stale.url).direct(tiny / "adapters" / "a2", "hello")[0]
    pair = Pair(make_agent, [stale, stubborn])
    first, then = (upload(s3, f"held/{name}", tiny / "adapters" / name) for name in ("a1", "a2"))
    pair.apply("u", first)
    before = pair.until("u", ["Loaded", "Loaded"], first)
    with traffic(pair, "u") as seen:
        seen.more(pair.agents[0])
        pair.apply("u", then)
        pair.until_updated("u", before, (0,))
        held = pair.agents[1]
        held.until(lambda: "onStalePrefixCache: Replace" in held.rows()["u"]["message"], "it says what to do", 120)
        seen.more(pair.agents[0])
    assert (seen.answers, seen.nobody) == ([[old, new], [old]], 0)
    assert seen.failures == []
    assert (held.rows()["u"]["state"], held.rows()["u"]["revision"]) == ("Loaded", before[1])
    # At one's own risk; prompts that share no cached block are right in any case.
    pair.apply("u", then, onStalePrefixCache="Replace")
    pair.until_updated("u", before, (1,))
    assert [client.tokens("u") for client in pair.clients] == [fresh, fresh]
    pair.delete("u")
