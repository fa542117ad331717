"""New content under one served name, on a vLLM that takes cached blocks of the old weights for those of the new.

A whole agent beside the stub engine, and beside the real thing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.vllm.agent import Agent
from tests.vllm.client import LONG, Asker, Client
from tests.vllm.fixtures import STALE_VERSION
from tests.vllm.model import HIDDEN

# As many as fit beside the prompt: such a request runs for seconds, and so across the change.
MANY = 200


STUB_AND_REAL = [pytest.param("stub", marks=pytest.mark.slow), pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=STUB_AND_REAL)
def stale_url(request: pytest.FixtureRequest, tiny: Path) -> Iterator[str]:
    """An engine of that version, in dev mode: its prefix cache can be reset."""
    if request.param == "vllm":
        yield request.getfixturevalue("stale").url
        return
    with stub(tiny, "--dev-mode", "--token-seconds", "0.01") as url:
        yield url


@pytest.fixture(params=STUB_AND_REAL)
def stubborn_url(request: pytest.FixtureRequest, tiny: Path) -> Iterator[str]:
    """An engine of that version as people run it: its prefix cache can't be reset."""
    if request.param == "stub":
        with stub(tiny) as url:
            yield url
        return
    yield request.getfixturevalue("stubborn").url


@contextmanager
def stub(tiny: Path, *flags: str) -> Iterator[str]:
    """The stub engine as a process."""
    command = [sys.executable, "-m", "sidecar.edges.stub_engine", "--version", STALE_VERSION, *flags]
    command += ["--model", str(tiny / "model"), "--served-model-name", "tiny", "alias", "--max-loras", "2"]
    command += ["--max-cpu-loras", "3", "--hidden-size", str(HIDDEN)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdout is not None
        try:
            yield stub.stdout.readline().strip()
        finally:
            stub.terminate()


def test_no_answer_mixes_old_and_new_even_with_requests_running_across_the_change(
    stale_url: str, tiny: Path, tmp_path: Path
) -> None:
    client = Client(stale_url)
    old, new = (client.direct(tiny / "adapters" / name, LONG, count=MANY)[0] for name in ("a1", "a2"))
    source = shutil.copytree(tiny / "adapters" / "a1", tmp_path / "source")
    agent = Agent(tmp_path / "agent", stale_url, "--capacity", "20")
    with agent:
        # Two others have the slots most of the time, so that requests also wait: vLLM's metrics don't name those.
        for name in ("a3", "a4"):
            agent.apply(name, f"file://{tiny / 'adapters' / name}")
            agent.wait(name, "Loaded")
        agent.apply("u", f"file://{source}", source={"refreshInterval": "1s"})
        revision = agent.wait("u", "Loaded")["revision"]
        others = Asker(client, "a3", "hello", MANY), Asker(client, "a4", "hello", MANY)
        with others[0], others[1], Asker(client, "u", LONG, MANY) as long, Asker(client, "u", LONG, 12) as short:
            agent.until(lambda: long.asked and short.asked > 3, "requests are answered from the cache", 120)
            shutil.copytree(tiny / "adapters" / "a2", source, dirs_exist_ok=True)
            agent.until(
                lambda: agent.rows()["u"]["revision"] != revision and agent.state("u") == "Loaded", "it is updated", 120
            )
            asked = long.asked, short.asked
            agent.until(
                lambda: long.asked > asked[0] + 1 and short.asked > asked[1] + 3, "requests are answered after it", 120
            )
        assert long.tokens() == [old, new]
        assert short.tokens() == [old[:12], new[:12]]
        assert long.statuses() | short.statuses() <= {200, 404}
        for name in ("u", "a3", "a4"):
            agent.delete(name)
        agent.until(lambda: client.models() == {}, "all is unloaded")


def test_where_the_cache_cannot_be_reset_the_old_keeps_serving_until_it_is_told_otherwise(
    stubborn_url: str, tiny: Path, tmp_path: Path
) -> None:
    client = Client(stubborn_url)
    old = client.direct(tiny / "adapters" / "a1", LONG)[0]
    fresh = client.direct(tiny / "adapters" / "a2", "hello")[0]
    source = shutil.copytree(tiny / "adapters" / "a1", tmp_path / "source")
    with Agent(tmp_path / "agent", stubborn_url, "--capacity", "20") as agent:
        agent.apply("u", f"file://{source}", source={"refreshInterval": "1s"})
        revision = agent.wait("u", "Loaded")["revision"]
        assert client.tokens("u", LONG) == old
        shutil.copytree(tiny / "adapters" / "a2", source, dirs_exist_ok=True)
        agent.until(lambda: agent.rows()["u"]["wantedRevision"] != revision, "the new content is known")
        agent.until(lambda: "spec.onStalePrefixCache: Replace" in agent.rows()["u"]["message"], "it says what to do")
        assert client.tokens("u", LONG) == old
        assert client.models() == {"u": f"{agent.adapters_dir}/revisions/{revision.removeprefix('sha256:')}"}
        assert agent.rows()["u"]["state"] == "Loaded"
        # At one's own risk. Prompts that share no cached block are right in any case.
        agent.apply(
            "u", f"file://{source}", source={"refreshInterval": "1s"}, onStalePrefixCache="Replace", drainSeconds=0
        )
        agent.until(
            lambda: agent.rows()["u"]["revision"] != revision and agent.state("u") == "Loaded", "it is replaced"
        )
        assert client.tokens("u") == fresh
        agent.delete("u")
        agent.until(lambda: client.models() == {}, "it is unloaded")
