"""Gossip in a cluster: switched on by the Secret alone, its key rotated, and on its own while no API server answers."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.nodes import Nodes
from tests.kubernetes.pool import Origin, Pool

pytestmark = pytest.mark.slow

Json = dict[str, Any]
SECRET = ("create", "secret", "generic", "lora-sidecar-gossip")
OLD, NEW = "5a" * 32, "c3" * 32
# A dead worker's adapters are loaded elsewhere in 6 s; the machine that runs the tests has other things to do too.
ELSEWHERE_SECONDS = 10.0
OWN_NODES = ("node-p", "node-q", "node-r")


def gossip(pool: Pool, pods: list[Json]) -> dict[tuple[str, str], str]:
    """(Agent, peer) -> how the one sees the other by gossip; pairs that ask each other instead are missing."""
    return {
        (pod["metadata"]["name"], row["name"]): row["state"]
        for pod in pods
        for row in pool.ask(pod, "/v1/peers")["peers"]
        if row.get("incarnation") is not None
    }


def all_gossip(pool: Pool, pods: list[Json]) -> bool:
    """Whether each agent holds each other alive, by gossip."""
    names = {pod["metadata"]["name"] for pod in pods}
    pairs = {(a, b) for a in names for b in names if a != b}
    seen = gossip(pool, pods)
    return {pair for pair, state in seen.items() if state == "alive"} >= pairs


def strangers(pod: Json) -> float:
    """Messages that an agent has dropped for a key that it doesn't know."""
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8790/metrics", timeout=10) as response:
        text = response.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["lora_sidecar_gossip_dropped"].samples
    return sum(sample.value for sample in samples if sample.labels["reason"] == "stranger")


def unloads(pool: Pool, pods: list[Json]) -> int:
    """How many adapters these pods' agents have unloaded so far."""
    return sum(pool.log(pod["metadata"]["name"]).count("adapter_unloaded") for pod in pods)


class Gaps(threading.Thread):
    """Looks all the while whether each agent holds each other alive by gossip; `seen` are the moments when not."""

    def __init__(self, pool: Pool, pods: list[Json]) -> None:
        super().__init__()
        self._pool, self._pods = pool, pods
        self._end = threading.Event()
        self.looks = 0
        self.seen: list[dict[tuple[str, str], str]] = []
        self.start()

    def run(self) -> None:
        """The loop."""
        while not self._end.wait(0.2):
            self.looks += 1
            if not all_gossip(self._pool, self._pods):
                self.seen.append(gossip(self._pool, self._pods))

    def stop(self) -> None:
        """Look no more."""
        self._end.set()
        self.join(timeout=30)


def test_the_secret_switches_gossip_on_and_its_key_is_rotated_without_a_gap(cluster: ControlPlane, pool: Pool) -> None:
    cluster.kubectl(*SECRET, "-n", pool.namespace, f"--from-literal=key={OLD}")
    pool.install(3)
    pool.apply("all")
    pool.until_loaded("all", 3)
    pods = pool.pods()
    wait_until(lambda: all_gossip(pool, pods), "all agents gossip")
    gaps = Gaps(pool, pods)
    try:
        for step, keys in enumerate(([OLD, NEW], [NEW, OLD], [NEW]), 1):
            lines = "\n".join(keys)
            document = cluster.kubectl(
                *SECRET, "-n", pool.namespace, f"--from-literal=key={lines}", "--dry-run=client", "-o", "yaml"
            )
            cluster.kubectl("apply", "-n", pool.namespace, "-f", "-", stdin=document)
            logs = [pod["metadata"]["name"] for pod in pods]
            wait_until(
                lambda step=step, logs=logs: all(pool.log(name).count("gossip_keys_read") == step for name in logs),
                "every agent has read the keys",
            )
        pool.apply("later")
        pool.until_loaded("later", 3)
    finally:
        gaps.stop()
    assert gaps.looks > 3
    assert not gaps.seen, gaps.seen[:3]
    assert [strangers(pod) for pod in pods] == [0, 0, 0]
    assert all("another key" not in str(pool.ask(pod, "/v1/adapters")["problems"]) for pod in pods)


def test_a_dead_workers_adapters_move_by_gossip_alone(
    cluster: ControlPlane, namespace: str, origin: Origin, tmp_path: Path
) -> None:
    own = Nodes(cluster, tmp_path, {name: f"zone-{name}" for name in OWN_NODES})
    pool = Pool(cluster, own, namespace, origin)
    pool.each_on_its_own(OWN_NODES)
    adapters = ["a", "b", "c", "d"]
    try:
        cluster.kubectl(*SECRET, "-n", namespace, f"--from-literal=key={OLD}")
        pool.install(3)
        for adapter in adapters:
            pool.apply(adapter, distribution={"strategy": "fixed", "replicas": 1})
        pool.apply("all")
        pool.until_loaded("all", 3)
        wait_until(lambda: all_gossip(pool, pool.pods()), "all agents gossip")
        pool.settle()
        holders = {adapter: pool.until_loaded(adapter, 1)[0] for adapter in adapters}
        (worst, _), *_ = Counter(holders.values()).most_common(1)
        survivors = [pod for pod in pool.pods() if pod["metadata"]["name"] != worst]
        (dead,) = (pod for pod in pool.pods() if pod["metadata"]["name"] == worst)
        orphans = sorted(adapter for adapter, holder in holders.items() if holder == worst)
        before = unloads(pool, survivors)
        cluster.stop_api_server()
        try:
            wait_until(
                lambda: all("can't be reached" in str(pool.ask(p, "/v1/adapters")["problems"]) for p in survivors),
                "the survivors know that no API server answers",
            )
            own.kill_node(dead["spec"]["nodeName"])
            began = time.monotonic()
            wait_until(
                lambda: all(any(pool.served(pod, adapter) for pod in survivors) for adapter in orphans),
                f"{orphans} are served by others",
            )
            took = time.monotonic() - began
            print(f"{len(orphans)} adapters of a dead worker were served by others after {took:.1f} s")
            assert took <= ELSEWHERE_SECONDS
            for adapter in [*adapters, "all"]:
                wanted = sum(pool.served(pod, adapter) for pod in survivors)
                assert wanted == (2 if adapter == "all" else 1), adapter
        finally:
            again = time.time()
            cluster.start_api_server()
            cluster.start_controllers()
        assert unloads(pool, survivors) == before
        for adapter in orphans:
            wait_until(lambda adapter=adapter: set(pool.routed(adapter)) - {worst}, f"{adapter} is routed to", 60)
        pool.settle()
        answered = [e for e in pool.requests(again) if e["responseStatus"]["code"] < 300]
        asked = Counter((pool.pod_of(e), e["verb"], e["objectRef"]["resource"]) for e in answered)
        assert max(n for (_, verb, _), n in asked.items() if verb == "list") == 1, asked
        patched = {p: n for (p, verb, resource), n in asked.items() if (verb, resource) == ("patch", "pods")}
        assert max(patched.values()) == 1, asked
    finally:
        pool.remove()
        own.stop()
        for name in OWN_NODES:
            cluster.delete(f"/api/v1/nodes/{name}")
