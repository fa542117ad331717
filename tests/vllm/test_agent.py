"""Whole agents beside the real vLLM: adapters come from an S3-protocol server, clients ask the engine."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from sidecar.model import StoredFile, revision_of
from tests.s3server import S3Server
from tests.vllm.agent import Agent, MakeAgent, upload
from tests.vllm.client import LONG, Asker, Client
from tests.vllm.fixtures import KEY
from tests.vllm.model import LOADED_ALL_THE_SAME
from tests.vllm.server import VllmServer


@pytest.fixture
def client(vllm: VllmServer) -> Client:
    return Client(vllm.url)


def test_from_a_bucket_to_an_answer_and_away_again(
    make_agent: MakeAgent, vllm: VllmServer, client: Client, s3: S3Server, tiny: Path
) -> None:
    base = client.tokens("tiny")
    agent = make_agent(vllm)
    for name in ("a1", "a2"):
        agent.apply(name, upload(s3, f"first/{name}", tiny / "adapters" / name), servedName=f"Org/{name}.V2:latest")
    # The base model may be named by its alias, or by where it lies.
    agent.apply("a3", upload(s3, "first/a3", tiny / "adapters" / "a3"), baseModel="alias")
    agent.apply("a4", upload(s3, "first/a4", tiny / "adapters" / "a4"), baseModel=str(tiny / "model"))
    served = {"a1": "Org/a1.V2:latest", "a2": "Org/a2.V2:latest", "a3": "a3", "a4": "a4"}
    for name, model in served.items():
        agent.wait(name, "Loaded")
        assert [client.tokens(model)] == client.direct(tiny / "adapters" / name, "hello") != [base]
    for name in served:
        agent.delete(name)
    agent.until(lambda: client.models() == {}, "everything is unloaded")
    for model in served.values():
        assert client.complete(model)[0] == 404
    assert client.tokens("tiny") == base


def revision_of_folder(folder: Path) -> str:
    """What spec.source.digest pins an adapter to."""
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    return revision_of(
        [StoredFile(path=name, size=len(c), sha256=hashlib.sha256(c).hexdigest()) for name, c in contents.items()]
    )


# What becomes of each broken adapter, and what is said of it. Only the engine knows its model and its largest rank.
BROKEN = {
    "config-missing": ("Rejected", "adapter_config.json: is missing"),
    "config-no-r": ("Rejected", "r is missing"),
    "config-not-json": ("Rejected", "is not JSON"),
    "dora": ("Rejected", "does not serve DoRA"),
    "empty-dir": ("Failed", "no object under the prefix 'broken/empty-dir/' in bucket 'adapters'"),
    "rank-mismatch": ("Loaded", "has rank 8, but adapter_config.json says 16"),
    "rank-too-high": ("Failed", "LoRA rank 32 is greater than max_lora_rank 16. Start vLLM with --max-lora-rank 32."),
    "weights-empty": ("Rejected", "has 0 bytes"),
    "weights-flipped": ("Loaded", ""),
    "weights-garbage": ("Rejected", "announce a header of"),
    "weights-missing": ("Rejected", "adapter_model.safetensors: is missing"),
    "weights-truncated": ("Rejected", "holds 15368 bytes of data; its header describes 32768"),
    "wrong-base": ("Loaded", ""),
    "wrong-hidden": ("Failed", "The size of tensor a (64) must match the size of tensor b (128)"),
    "wrong-modules": ("Failed", "expected target modules in"),
}


def test_each_broken_adapter_is_refused_or_reported_and_stops_no_other(
    make_agent: MakeAgent, vllm: VllmServer, client: Client, s3: S3Server, tiny: Path, tmp_path: Path
) -> None:
    assert {path.name for path in (tiny / "broken").iterdir()} == BROKEN.keys()
    agent = make_agent(vllm)
    for kind in BROKEN:
        agent.apply(kind, upload(s3, f"broken/{kind}", tiny / "broken" / kind))
    for name in ("a1", "a2"):
        agent.apply(name, upload(s3, f"good/{name}", tiny / "adapters" / name))
        agent.wait(name, "Loaded")
    # One bit of a3 has changed on the way: the engine wouldn't notice, but the manifest says what it must be.
    revision = revision_of_folder(tiny / "adapters" / "a3")
    flipped = shutil.copytree(tiny / "adapters" / "a3", tmp_path / "flipped") / "adapter_model.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + bytes([flipped.read_bytes()[-1] ^ 1]))
    agent.apply("pinned", upload(s3, "good/flipped", flipped.parent), source={"digest": revision})
    agent.until(
        lambda: all(agent.state(kind) == state for kind, (state, _) in BROKEN.items()), "all are what they are", 60
    )
    agent.until(lambda: agent.state("pinned") in ("Failed", "Rejected"), "what isn't what it should be is refused", 60)
    rows = agent.rows()
    assert revision in rows["pinned"]["message"]
    for kind, (_, reason) in BROKEN.items():
        assert reason in rows[kind]["message"], kind
        assert "stack trace" not in rows[kind]["message"]
    loaded = {kind for kind, (state, _) in BROKEN.items() if state == "Loaded"}
    assert client.models().keys() == {"a1", "a2"} | loaded
    assert loaded == LOADED_ALL_THE_SAME
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


def test_an_engine_in_dev_mode_tells_how_much_fits(
    guarded: VllmServer, s3: S3Server, tiny: Path, tmp_path: Path
) -> None:
    """Three adapters, of which one is from the command line, and rank 16."""
    key = tmp_path / "key"
    key.write_text(KEY)
    client = Client(guarded.url)
    with Agent(tmp_path / "agent", guarded.url, "--engine-api-key-file", str(key), env=s3.env) as agent:
        agent.apply("high", upload(s3, "room/high", tiny / "broken" / "rank-too-high"), priority=9)
        # Before the engine saw it, that is: the rejection names the file.
        assert "adapter_config.json" in agent.wait("high", "Rejected")["message"]
        agent.delete("high")
        for number in (1, 2, 3):
            uri = upload(s3, f"room/a{number}", tiny / "adapters" / f"a{number}")
            agent.apply(f"a{number}", uri, priority=number, drainSeconds=0)
        for name, state in (("a3", "Loaded"), ("a2", "Loaded"), ("a1", "Waiting")):
            agent.wait(name, state)
        assert client.models().keys() == {"fixed", "a2", "a3"}
        agent.apply("a1", "s3://adapters/room/a1", priority=10, drainSeconds=0)
        for name, state in (("a1", "Loaded"), ("a3", "Loaded"), ("a2", "Waiting")):
            agent.wait(name, state)
        agent.until(lambda: client.models().keys() == {"fixed", "a1", "a3"}, "who was pushed out is unloaded")
        for name in ("a1", "a2", "a3"):
            agent.delete(name)
        agent.until(lambda: client.models().keys() == {"fixed"}, "only its own are unloaded")


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
    for name in ("a1", "a2", "a3"):
        agent.apply(name, upload(s3, f"again/{name}", tiny / "adapters" / name))
        agent.wait(name, "Loaded")
    expected = client.tokens("a1")
    with Asker(client, "a1", "hello") as asker:
        agent.kill()
        # While nobody watches. That the engine lists a3 is not enough then: it is loaded from where the old one lies.
        agent.delete("a2")
        agent.apply("a3", upload(s3, "again/a4", tiny / "adapters" / "a4"))
        agent.start()
        agent.wait("a1", "Loaded")
        agent.until(lambda: client.models().keys() == {"a1", "a3"}, "what was deleted meanwhile is unloaded", 60)
        agent.until(lambda: agent.rows()["a3"]["source"].endswith("a4") and agent.state("a3") == "Loaded", "a3 is new")
        (new,) = client.direct(tiny / "adapters" / "a4", "hello")
        agent.until(lambda: client.complete("a3") == (200, new), "a3 answers as the new one does")
    assert asker.answers == [(200, expected)]
