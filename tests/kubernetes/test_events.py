"""What happens to adapters as Events, the way people look at them: kubectl get events, kubectl describe."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from sidecar.edges.sample_adapter import write_adapter
from tests.kubernetes.controlplane import wait_until
from tests.kubernetes.pool import BASE_MODEL, Pool

pytestmark = pytest.mark.slow

Json = dict[str, Any]
RETRIES = 3


def events(pool: Pool, adapter: str) -> list[tuple[str, str, str]]:
    """Type, reason and message of each, by `kubectl get events`."""
    about = f"involvedObject.kind=Adapter,involvedObject.name={adapter}"
    text = pool.cluster.kubectl("get", "events", "-n", pool.namespace, "--field-selector", about, "-o", "json")
    return sorted((e["type"], e["reason"], e["message"]) for e in json.loads(text)["items"])


def described(pool: Pool, adapter: str) -> str:
    """The Events that `kubectl describe` shows."""
    return pool.cluster.kubectl("describe", "-n", pool.namespace, f"lora/{adapter}").partition("\nEvents:")[2]


def refused_loads(pod: Json, adapter: str) -> int:
    """How often the pod's engine has refused it."""
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8000/stub/calls", timeout=10) as response:
        calls = json.load(response)
    return sum(call["name"] == adapter and call["kind"] == "load" and call["status"] != 200 for call in calls)


def test_each_thing_that_happens_is_one_event(pool: Pool) -> None:
    pool.install(2)
    workers = [pod["metadata"]["name"] for pod in pool.pods()]
    pool.apply("good")
    pool.apply("one", distribution={"strategy": "fixed", "replicas": 1})
    files = pool.origin.directory / "with-pickle"
    write_adapter(files, 1, base=BASE_MODEL)
    (files / "adapter_model.safetensors").rename(files / "adapter_model.bin")
    pool.apply("pickled", source={"uri": f"file://{files}"})
    # The engine refuses it each time that it is tried; that may be mended at any time, so that it is tried again.
    files = pool.origin.directory / "of-rank-64"
    write_adapter(files, 2, 64, base=BASE_MODEL)
    pool.apply("too-wide", source={"uri": f"file://{files}"})

    pool.until_loaded("good", 2)
    ((kind, reason, loaded),) = wait_until(lambda: events(pool, "good"), "it is told that it is loaded")
    assert (kind, reason) == ("Normal", "Loaded")
    # Of all workers, or of those that were up when it was placed for the first time.
    assert set(loaded.removeprefix("loaded on ").split(", ")) <= set(workers)
    assert loaded in described(pool, "good")

    wait_until(lambda: len(events(pool, "pickled")) == 2, "both workers reject it")
    for worker, (kind, reason, message) in zip(workers, events(pool, "pickled"), strict=True):
        assert (kind, reason) == ("Warning", "Rejected")
        assert message.startswith(f"{worker}: ")
        assert "adapter_model.bin" in message
        assert message in described(pool, "pickled")

    (holder,) = pool.placed("one", 1)
    pool.cluster.kubectl("annotate", "-n", pool.namespace, f"pod/{holder}", "lora-sidecar.io/cordon=true")
    (other,) = set(workers) - {holder}
    moved = ("Normal", "Moved", f"from {holder}; loaded on {other}")
    wait_until(lambda: moved in events(pool, "one"), "it is told that it moved")
    assert moved[2] in described(pool, "one")
    assert [reason for _, reason, _ in events(pool, "one")].count("Moved") == 1

    wait_until(
        lambda: max(refused_loads(pod, "too-wide") for pod in pool.pods()) >= RETRIES, "it was tried often", timeout=60
    )
    pool.settle(2.0)
    failures = events(pool, "too-wide")
    assert {(kind, reason) for kind, reason, _ in failures} == {("Warning", "Failed")}
    assert {message.partition(":")[0] for _, _, message in failures} <= set(workers)
    assert len(failures) == len({message.partition(":")[0] for _, _, message in failures}) >= 1
    assert all("rank 64" in message and message in described(pool, "too-wide") for _, _, message in failures)
