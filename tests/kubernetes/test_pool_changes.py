"""What changes the workers of a pool never costs an adapter its last one, as a client from the outside sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.nodes import Nodes, is_ready
from tests.kubernetes.pool import Origin, Outside, Pool

Json = dict[str, Any]


def fixed(replicas: int) -> Json:
    return {"strategy": "fixed", "replicas": replicas}


def names(pool: Pool) -> list[str]:
    return [pod["metadata"]["name"] for pod in pool.pods()]


def test_scaling_up_and_down(pool: Pool) -> None:
    pool.install(2)
    pool.apply("one", distribution=fixed(1))
    pool.apply("all")
    pool.until_loaded("one", 1)
    pool.until_loaded("all", 2)
    with pool.watched("one", "all"):
        pool.scale(4)
        pool.until_loaded("all", 4)
        pool.scale(1)
        assert pool.until_loaded("all", 1) == pool.until_loaded("one", 1) == names(pool)


def test_a_rollout(pool: Pool) -> None:
    pool.install(3)
    pool.apply("one", distribution=fixed(1))
    pool.apply("two", distribution=fixed(2))
    pool.until_loaded("one", 1)
    pool.until_loaded("two", 2)
    old = {pod["metadata"]["uid"] for pod in pool.pods()}
    with pool.watched("one", "two"):
        pool.cluster.kubectl("rollout", "restart", "-n", pool.namespace, f"deployment/{pool.name}")
        wait_until(lambda: not old & {pod["metadata"]["uid"] for pod in pool.pods()}, "the old pods are gone", 180)
        pool.until_ready(3)
        pool.until_loaded("one", 1)
        pool.until_loaded("two", 2)


def test_the_only_pod_is_deleted_and_hands_over_to_its_replacement(pool: Pool) -> None:
    pool.install(1)
    pool.apply("one")
    (holder,) = pool.until_loaded("one", 1)
    with pool.watched("one"):
        pool.cluster.kubectl("delete", "pod", "-n", pool.namespace, holder, "--timeout=100s")
        assert holder not in pool.until_loaded("one", 1)
        pool.until_ready(1)
    assert f"preStop hook of {holder}/vllm failed" not in pool.nodes.log_of_kubelet()


def test_a_pod_removed_by_force_costs_nothing_that_has_two_copies(pool: Pool) -> None:
    pool.install(3)
    pool.apply("two", distribution=fixed(2))
    first, _ = pool.until_loaded("two", 2)
    with pool.watched("two", sudden=True):
        pool.end_now(first)
        pool.until_ready(3)
        assert first not in pool.until_loaded("two", 2)


def test_a_dead_node_is_replaced_before_kubernetes_knows(
    cluster: ControlPlane, namespace: str, origin: Origin, tmp_path: Path
) -> None:
    own = Nodes(cluster, tmp_path, {"node-x": "zone-x", "node-y": "zone-y", "node-z": "zone-z"})
    pool = Pool(cluster, own, namespace, origin)
    pool.each_on_its_own(("node-x", "node-y", "node-z"))
    try:
        pool.install(3)
        pool.apply("one", distribution=fixed(1))
        pool.apply("two", distribution=fixed(2))
        (holder,) = pool.until_loaded("one", 1)
        pool.until_loaded("two", 2)
        (dead,) = (pod for pod in pool.pods() if pod["metadata"]["name"] == holder)
        with pool.watched("two", sudden=True):
            own.kill_node(dead["spec"]["nodeName"])
            # Its pod stays Ready, and keeps its labels, until the node's lease has run out.
            wait_until(lambda: set(pool.routed("one")) - {holder}, "another worker has it", timeout=20)
            wait_until(lambda: len(set(pool.routed("two")) - {holder}) == 2, "two others have it", timeout=20)
            (dead,) = (pod for pod in pool.pods() if pod["metadata"]["name"] == holder)
            assert is_ready(dead)
    finally:
        pool.remove()
        own.stop()
        for name in ("node-x", "node-y", "node-z"):
            cluster.delete(f"/api/v1/nodes/{name}")


def killed(pool: Pool, pod: Json, container: str) -> None:
    """Kill a container of a pod; returns when the pod's engine has the adapter `all` again."""
    name = pod["metadata"]["name"]
    before = pool.nodes.pid(pool.namespace, name, container)
    pool.nodes.kill(pool.namespace, name, container)
    wait_until(lambda: pool.nodes.pid(pool.namespace, name, container) not in (0, before), "a new process")
    wait_until(lambda: pool.served(pod, "all"), "the engine has it")
    pool.until_loaded("all", 2)
    pool.until_ready(2)


def test_a_killed_agent_leaves_its_engine_alone(pool: Pool) -> None:
    pool.install(2)
    pool.apply("all")
    both = pool.until_loaded("all", 2)
    with pool.watched("all"):
        killed(pool, pool.pods()[0], "lora-sidecar")
    assert names(pool) == both


def test_a_killed_engine_gets_its_adapters_back(pool: Pool) -> None:
    pool.install(2)
    pool.apply("all")
    both = pool.until_loaded("all", 2)
    client = Outside(pool, ("all",))
    try:
        killed(pool, pool.pods()[0], "vllm")
    finally:
        client.stop()
    assert names(pool) == both
    # Between the first answer of the empty engine and the agent's next look at it, its label is still there.
    wrong = [float(fault.partition(":")[0]) for fault in client.faults]
    assert all(f"on {both[0]}: 404" in fault for fault in client.faults)
    assert not wrong or wrong[-1] - wrong[0] < 2
