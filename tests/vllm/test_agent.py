"""Whole agents beside the real vLLM: adapters come from an S3-protocol server, clients ask the engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.s3server import S3Server
from tests.vllm.agent import Agent
from tests.vllm.client import LONG, Asker, Client
from tests.vllm.fixtures import KEY
from tests.vllm.model import LOADED_ALL_THE_SAME
from tests.vllm.server import VllmServer

MakeAgent = Callable[..., Agent]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def make_agent(tmp_path: Path, s3: S3Server) -> Iterator[MakeAgent]:
    """Makes agents, started; what they loaded is unloaded in the end."""
    agents: list[Agent] = []

    def make(server: VllmServer, *flags: str, name: str = "w1", start: bool = True) -> Agent:
        agent = Agent(tmp_path / name, server.url, "--capacity", "20", *flags, name=name, env=s3.env)
        agents.append(agent)
        if start:
            agent.start()
        return agent

    yield make
    for agent in agents:
        agent.stop()
        client = Client(agent.engine_url)
        if client.post("/health")[0]:
            for name, root in client.models().items():
                if root.startswith(str(agent.adapters_dir)):
                    client.post("/v1/unload_lora_adapter", lora_name=name)


def upload(s3: S3Server, prefix: str, folder: Path) -> str:
    """Put an adapter's files behind a URI."""
    for file in sorted(folder.iterdir()):
        s3.put("adapters", f"{prefix}/{file.name}", file.read_bytes())
    return f"s3://adapters/{prefix}"


@pytest.fixture
def client(vllm: VllmServer) -> Client:
    return Client(vllm.url)


def test_from_a_bucket_to_an_answer_and_away_again(
    make_agent: MakeAgent, vllm: VllmServer, client: Client, s3: S3Server, tiny: Path
) -> None:
    base = client.tokens("tiny")
    agent = make_agent(vllm)
    for name in ("a1", "a2"):
        agent.apply(name, upload(s3, f"first/{name}", tiny / "adapters" / name), servedName=f"Org/{name}:latest")
    # The base model may be named by its alias, or by where it lies.
    agent.apply("a3", upload(s3, "first/a3", tiny / "adapters" / "a3"), baseModel="alias")
    agent.apply("a4", upload(s3, "first/a4", tiny / "adapters" / "a4"), baseModel=str(tiny / "model"))
    served = {"a1": "Org/a1:latest", "a2": "Org/a2:latest", "a3": "a3", "a4": "a4"}
    for name, model in served.items():
        agent.wait(name, "Loaded")
        assert [client.tokens(model)] == client.direct(tiny / "adapters" / name, "hello") != [base]
    for name in served:
        agent.delete(name)
    agent.until(lambda: client.models() == {}, "everything is unloaded")
    for model in served.values():
        assert client.complete(model)[0] == 404
    assert client.tokens("tiny") == base


def test_each_broken_adapter_is_refused_or_reported_and_stops_no_other(
    make_agent: MakeAgent, vllm: VllmServer, client: Client, s3: S3Server, tiny: Path
) -> None:
    agent = make_agent(vllm, "--max-lora-rank", "16")
    kinds = sorted(path.name for path in (tiny / "broken").iterdir())
    for kind in kinds:
        agent.apply(kind, upload(s3, f"broken/{kind}", tiny / "broken" / kind))
    for name in ("a1", "a2"):
        agent.apply(name, upload(s3, f"good/{name}", tiny / "adapters" / name))
        agent.wait(name, "Loaded")
    bad = [kind for kind in kinds if kind not in LOADED_ALL_THE_SAME]
    agent.until(
        lambda: all(agent.state(kind) in ("Failed", "Rejected") for kind in bad), "all bad ones are reported", 60
    )
    rows = agent.rows()
    for kind in bad:
        assert rows[kind]["message"], kind
        assert "stack trace" not in rows[kind]["message"]
    assert not client.models().keys() & set(bad)
    for name in ("a1", "a2"):
        assert [client.tokens(name)] == client.direct(tiny / "adapters" / name, "hello")
    assert agent.get("/healthz")[0] == 200


def test_an_update_under_one_served_name_never_mixes(
    make_agent: MakeAgent, vllm: VllmServer, client: Client, s3: S3Server, tiny: Path
) -> None:
    old, new = (client.direct(tiny / "adapters" / name, LONG)[0] for name in ("a1", "a2"))
    agent = make_agent(vllm)
    uri = upload(s3, "updated", tiny / "adapters" / "a1")
    agent.apply("u", uri, source={"refreshInterval": "1s"})
    revision = agent.wait("u", "Loaded")["revision"]
    assert client.tokens("u", LONG) == old
    with Asker(client, "u", LONG) as asker:
        agent.until(lambda: asker.asked > 3, "requests are answered from the cache")
        upload(s3, "updated", tiny / "adapters" / "a2")
        agent.until(lambda: agent.rows()["u"]["revision"] != revision and agent.state("u") == "Loaded", "it is updated")
        asked = asker.asked
        agent.until(lambda: asker.asked > asked + 3, "requests are answered after the update")
    assert asker.tokens() == [old, new]
    assert asker.statuses() <= {200, 404}
    assert client.tokens("u", LONG) == new


def test_a_hung_engine_holds_up_its_load_and_nothing_else(
    make_agent: MakeAgent, vllm: VllmServer, client: Client, s3: S3Server, tiny: Path
) -> None:
    agent = make_agent(vllm)
    agent.apply("a1", upload(s3, "hung/a1", tiny / "adapters" / "a1"))
    agent.wait("a1", "Loaded")
    workers = vllm.workers()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        agent.apply("a2", upload(s3, "hung/a2", tiny / "adapters" / "a2"))
        agent.wait("a2", "Loading")
        assert agent.get("/healthz")[0] == 200
        assert agent.state("a1") == "Loaded"
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    agent.wait("a2", "Loaded")
    assert [client.tokens("a2")] == client.direct(tiny / "adapters" / "a2", "hello")


def test_an_engine_that_takes_no_adapters_is_named(
    make_agent: MakeAgent, static: VllmServer, s3: S3Server, tiny: Path
) -> None:
    agent = make_agent(static)
    agent.apply("a1", upload(s3, "static/a1", tiny / "adapters" / "a1"))
    row = agent.wait("a1", "Failed")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in row["message"]
    assert Client(static.url).models().keys() == {"fixed"}


def test_with_an_api_key_beside_adapters_of_others_and_over_a_death_of_the_engine(
    make_agent: MakeAgent, guarded: VllmServer, s3: S3Server, tiny: Path, tmp_path: Path
) -> None:
    client = Client(guarded.url)
    fixed = client.tokens("fixed")
    key = tmp_path / "key"
    key.write_text("wrong-key")
    agent = make_agent(guarded, "--engine-api-key-file", str(key))
    uri = upload(s3, "guarded/a1", tiny / "adapters" / "a1")
    agent.apply("a1", uri)
    agent.apply("taken", uri, servedName="fixed")
    agent.until(lambda: "--engine-api-key-file" in agent.log.read_text(), "the key is refused")
    assert "wrong-key" not in agent.log.read_text()
    key.write_text(f"{KEY}\n")
    agent.wait("a1", "Loaded")
    assert "fixed" in agent.wait("taken", "Failed")["message"]
    assert client.tokens("fixed") == fixed
    first = client.tokens("a1")

    guarded.kill()
    agent.until(lambda: agent.state("a1") != "Loaded", "the death is noticed")
    # While the engine is down and while it starts, files are fetched all the same.
    agent.apply("a2", upload(s3, "guarded/a2", tiny / "adapters" / "a2"))
    guarded.start(wait=False)
    agent.wait("a1", "Loaded", 180)
    agent.wait("a2", "Loaded")
    assert client.tokens("a1") == first
    assert client.tokens("fixed") == fixed
    agent.delete("taken")
    agent.delete("a1")
    agent.delete("a2")
    agent.until(lambda: client.models().keys() == {"fixed"}, "only its own are unloaded")


def test_an_agent_that_is_killed_and_started_again_disturbs_nothing(
    make_agent: MakeAgent, vllm: VllmServer, client: Client, s3: S3Server, tiny: Path
) -> None:
    agent = make_agent(vllm)
    agent.apply("a1", upload(s3, "again/a1", tiny / "adapters" / "a1"))
    agent.apply("a2", upload(s3, "again/a2", tiny / "adapters" / "a2"))
    for name in ("a1", "a2"):
        agent.wait(name, "Loaded")
    expected = client.tokens("a1")
    with Asker(client, "a1", "hello") as asker:
        agent.kill()
        agent.delete("a2")  # while nobody watches
        agent.start()
        agent.wait("a1", "Loaded")
        agent.until(lambda: client.models().keys() == {"a1"}, "what was deleted meanwhile is unloaded", 60)
    assert asker.answers == [(200, expected)]
