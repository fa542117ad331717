"""A pool whose agents reach the API server by a bad way: slow, cut at any byte, refused for seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.pool import Pool
from tests.kubernetes.proxy import BadWay
from tests.kubernetes.test_pool_outages import problems, unloads

pytestmark = pytest.mark.slow


@pytest.fixture
def way(cluster: ControlPlane) -> Iterator[BadWay]:
    """The way that a test's agents take; as good as any until the test makes it bad."""
    made = BadWay()
    yield made
    made.stop()


def test_nothing_is_lost_and_what_is_applied_meanwhile_is_loaded(
    cluster: ControlPlane, pool: Pool, way: BadWay
) -> None:
    way.delay = 0.1
    pool.agent_env |= {"KUBERNETES_SERVICE_HOST": way.host, "KUBERNETES_SERVICE_PORT": str(way.port)}
    pool.install(3)
    pool.apply("all")
    pool.apply("one", distribution={"strategy": "fixed", "replicas": 1})
    pool.until_loaded("all", 3)
    (holder,) = pool.placed("one", 1)
    before = unloads(pool)
    with pool.watched("all", "one"):
        way.flap(True)
        wait_until(lambda: "can't be reached" in problems(pool), "an agent notices")
        pool.apply("during")
        began = time.monotonic()
        pool.until_loaded("during", 3, 90)
        print(f"applied behind a flapping API server, loaded and routed to after {time.monotonic() - began:.1f} s")
        # An agent that starts now begins with what it knows (another than the holder, whose adapter might move).
        name = next(pod["metadata"]["name"] for pod in pool.pods() if pod["metadata"]["name"] != holder)
        agent = pool.nodes.pid(pool.namespace, name, "lora-sidecar")
        pool.nodes.kill(pool.namespace, name, "lora-sidecar")
        wait_until(lambda: pool.nodes.pid(pool.namespace, name, "lora-sidecar") not in (0, agent), "it runs again")
        pool.apply("after-a-restart")
        pool.until_loaded("after-a-restart", 3, 90)
        pool.until_ready(3)
        wait_until(lambda: way.cuts >= 5 and way.closings >= 3, "it was bad enough")
        way.delay = 0.0
        way.flap(False)
        wait_until(lambda: "can't be reached" not in problems(pool), "all see the API server again")
        pool.settle()
    assert unloads(pool) == before
    for adapter, workers in (("all", 3), ("one", 1), ("during", 3), ("after-a-restart", 3)):
        pool.until_loaded(adapter, workers)
        wait_until(lambda adapter=adapter: pool.ready(adapter), f"the status of {adapter} says so")
    print(f"{way.cuts} connections were cut, and for {way.closings} times nothing listened")
