"""A StatefulSet as a pool: names come back with other UIDs, and each worker hands over before its name does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY, POOL, REPOSITORY, bind_namespace
from tests.kubernetes.nodes import Nodes
from tests.kubernetes.pool import Origin, Pool

Json = dict[str, Any]


def fixed(replicas: int) -> Json:
    return {"strategy": "fixed", "replicas": replicas}


class Ordered(Pool):
    """The pool as a StatefulSet."""

    def plain(self, replicas: int, capacity: int, **env: str) -> Json:
        document = super().plain(replicas, capacity, **env)
        spec = {k: v for k, v in document["spec"].items() if k != "strategy"} | {"serviceName": self.name}
        # As large models have it: they start together; what rolls, rolls one by one all the same.
        return document | {"kind": "StatefulSet", "spec": spec | {"podManagementPolicy": "Parallel"}}

    def by_inject(self, document: Json, scratch: Path) -> None:
        """deploy/base and what `lora-sidecar inject` writes."""
        command = [sys.executable, "-m", "sidecar", "inject"]
        done = subprocess.run(
            command, input=yaml.safe_dump(document), capture_output=True, text=True, check=True, cwd=REPOSITORY
        )
        self.cluster.kubectl("apply", "-n", self.namespace, "-k", str(DEPLOY / "base"))
        self.cluster.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=done.stdout)

    def by_label(self, document: Json, scratch: Path) -> None:
        """deploy/namespace, the label and the headless Service."""
        bind_namespace(self.cluster, self.namespace, scratch)
        document["spec"]["template"]["metadata"]["labels"][POOL] = self.label
        service = (DEPLOY / "samples" / "pool-service.yaml").read_text().replace("llama-lora", self.label)
        text = service + "\n---\n" + yaml.safe_dump(document)
        self.cluster.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=text)

    def remove(self) -> None:
        self.cluster.kubectl("delete", "statefulset", "--all", "-n", self.namespace, "--wait=false")
        super().remove()

    def uids(self) -> dict[str, str]:
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.pods()}


@pytest.fixture
def ordered(policies: ControlPlane, nodes: Nodes, namespace: str, origin: Origin) -> Iterator[Ordered]:
    made = Ordered(policies, nodes, namespace, origin)
    yield made
    made.remove()


@pytest.mark.slow
@pytest.mark.parametrize("way", [Ordered.by_inject, Ordered.by_label], ids=["inject", "label"])
def test_a_rolling_restart_keeps_the_service_and_comes_home(ordered: Ordered, way: Any, tmp_path: Path) -> None:
    pool, namespace = ordered, ordered.namespace
    way(pool, pool.plain(3, 8), tmp_path)
    pool.until_ready(3)
    pool.apply("all")
    pool.apply("one", distribution=fixed(1))
    pool.apply("two", distribution=fixed(2))
    wanted = {"all": 3, "one": 1, "two": 2}
    home = {name: pool.until_loaded(name, count) for name, count in wanted.items()}
    old = pool.uids()
    with pool.watched(*wanted):
        pool.cluster.kubectl("rollout", "restart", "-n", namespace, f"statefulset/{pool.name}")
        wait_until(lambda: len(pool.uids()) == 3 and not set(old.values()) & set(pool.uids().values()), "rolled", 240)
        pool.until_ready(3)
        for name, count in wanted.items():
            wait_until(lambda n=name, c=count: pool.until_loaded(n, c) == home[n], f"{name} is at home again")
    new = pool.uids()
    assert new.keys() == old.keys() == {f"{pool.name}-{i}" for i in range(3)}
    for pod in pool.pods():
        # Nobody believes what the pod that had the name before has said.
        seen = {row["name"]: row["uid"] for row in pool.ask(pod, "/v1/peers")["peers"]}
        assert seen == new
        for row in pool.ask(pod, "/v1/adapters")["adapters"]:
            assert set(row["targets"]) <= new.keys()
    wait_until(lambda: all(pool.ready(name) for name in wanted), "the status says so")
