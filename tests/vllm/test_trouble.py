"""An agent beside the real vLLM when others are there first, and when requests wait."""

from __future__ import annotations

import re
import threading
import urllib.request
from pathlib import Path

from tests.s3server import S3Server
from tests.vllm.agent import MakeAgent, upload
from tests.vllm.client import Client
from tests.vllm.server import VllmServer


def requests(server: VllmServer, which: str) -> float:
    """Requests that are `running` or `waiting` now."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        found = re.search(rf"^vllm:num_requests_{which}{{.*}} (\S+)$", answer.read().decode(), re.M)
    assert found is not None
    return float(found[1])


def test_a_name_that_somebody_else_loaded_is_left_to_them(
    make_agent: MakeAgent, vllm: VllmServer, s3: S3Server, tiny: Path
) -> None:
    client, theirs = Client(vllm.url), str(tiny / "adapters" / "a5")
    assert client.post("/v1/load_lora_adapter", lora_name="mine", lora_path=theirs)[0] == 200
    agent = make_agent(vllm)
    agent.apply("mine", upload(s3, "trouble/a1", tiny / "adapters" / "a1"))
    assert "already serves 'mine' from outside this agent's directory" in agent.wait("mine", "Failed")["message"]
    assert client.models() == {"mine": theirs}
    agent.apply("other", upload(s3, "trouble/a2", tiny / "adapters" / "a2"))
    agent.wait("other", "Loaded")
    assert client.post("/v1/unload_lora_adapter", lora_name="mine")[0] == 200
    agent.wait("mine", "Loaded")
    assert [client.tokens("mine")] == client.direct(tiny / "adapters" / "a1", "hello")


def test_a_request_that_waits_outlives_the_unload_since_the_files_stay(
    make_agent: MakeAgent, vllm: VllmServer, s3: S3Server, tiny: Path
) -> None:
    client = Client(vllm.url)
    # Room for hardly anything: files would go at once if they might.
    agent = make_agent(vllm, "--disk-quota", "300k")
    for number in (1, 2, 3):
        agent.apply(f"a{number}", upload(s3, f"waits/a{number}", tiny / "adapters" / f"a{number}"), drainSeconds=0)
        agent.wait(f"a{number}", "Loaded")
    expected, files = client.tokens("a3"), Path(client.models()["a3"])
    answers: list[tuple[int, object]] = []
    threads = [threading.Thread(target=client.complete, args=(name, "hi", 480)) for name in ("a1", "a2")]
    waits = threading.Thread(target=lambda: answers.append(client.complete("a3")))
    for thread in threads:
        thread.start()
    agent.until(lambda: requests(vllm, "running") == 2, "both slots are taken")
    waits.start()
    agent.until(lambda: requests(vllm, "waiting") == 1, "a request waits")
    agent.delete("a3")
    # Three others take its place in the engine's memory, so that its files are read again when its turn comes.
    for number in (4, 5, 6):
        agent.apply(f"a{number}", upload(s3, f"waits/a{number}", tiny / "adapters" / f"a{number}"))
    agent.until(lambda: "a3" not in client.models(), "it is unloaded")
    for number in (4, 5, 6):
        agent.wait(f"a{number}", "Loaded")
    waits.join(120)
    for thread in threads:
        thread.join(120)
    assert answers == [(200, expected)]
    assert files.is_dir()
    assert client.complete("a3")[0] == 404
    assert vllm.exited() is None
