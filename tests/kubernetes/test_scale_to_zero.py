"""Where nobody is left to hand over to, a pod ends soon; where somebody comes in time, it waits as ever."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.kubernetes.controlplane import wait_until
from tests.kubernetes.pool import Outside, Pool

# The limit of a hand-over, of which a wait for nobody must stay far away.
LIMIT = 60.0


def gone(pool: Pool) -> None:
    wait_until(lambda: not pool.pods(), "all pods are gone", 2 * LIMIT)


def strategy(pool: Pool, **wanted: Any) -> None:
    """Give the Deployment another strategy: a change that restarts nothing."""
    patch = json.dumps([{"op": "replace", "path": "/spec/strategy", "value": wanted}])
    pool.cluster.kubectl("patch", "-n", pool.namespace, f"deployment/{pool.name}", "--type=json", "-p", patch)


def restart(pool: Pool, replicas: int) -> float:
    """`kubectl rollout restart`; the seconds until the new pods were ready and the old ones gone."""
    old = {pod["metadata"]["uid"] for pod in pool.pods()}
    began = time.monotonic()
    pool.cluster.kubectl("rollout", "restart", "-n", pool.namespace, f"deployment/{pool.name}")
    wait_until(lambda: not old & {pod["metadata"]["uid"] for pod in pool.pods()}, "the old pods are gone", 4 * LIMIT)
    pool.until_ready(replicas)
    return time.monotonic() - began


@pytest.mark.slow
def test_scaled_to_zero(pool: Pool) -> None:
    pool.install(3)
    pool.apply("all")
    pool.apply("one", distribution={"strategy": "fixed", "replicas": 1})
    pool.until_loaded("all", 3)
    pool.until_loaded("one", 1)
    client = Outside(pool, ("all", "one"))
    began = time.monotonic()
    pool.cluster.kubectl("scale", "-n", pool.namespace, f"deployment/{pool.name}", "--replicas=0")
    gone(pool)
    took = time.monotonic() - began
    client.stop()
    assert took < LIMIT / 2
    # Nobody was left at the end, and until then whoever had the label answered.
    assert not client.unreachable
    assert all("no worker" in fault for fault in client.faults), client.faults[:5]


@pytest.mark.slow
def test_a_rollout_without_surge_keeps_the_laws(pool: Pool) -> None:
    pool.install(2)
    strategy(pool, type="RollingUpdate", rollingUpdate={"maxSurge": 0, "maxUnavailable": 1})
    pool.apply("all")
    pool.apply("one", distribution={"strategy": "fixed", "replicas": 1})
    pool.until_loaded("all", 2)
    pool.until_loaded("one", 1)
    with pool.watched("all", "one"):
        restart(pool, 2)
        pool.until_loaded("all", 2)
        pool.until_loaded("one", 1)


@pytest.mark.slow
def test_the_only_worker_hands_over_to_the_one_that_comes_after_it_and_waits_for_none_that_cannot(pool: Pool) -> None:
    pool.install(1)
    strategy(pool, type="RollingUpdate", rollingUpdate={"maxSurge": 0, "maxUnavailable": 1})
    pool.apply("one")
    pool.until_loaded("one", 1)
    with pool.watched("one"):
        restart(pool, 1)
        pool.until_loaded("one", 1)
    strategy(pool, type="Recreate")
    took = restart(pool, 1)
    assert took < LIMIT / 2
    pool.until_loaded("one", 1)
