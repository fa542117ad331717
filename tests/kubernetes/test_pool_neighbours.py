"""Two pools of one base model in one namespace, and an engine whose key is in a Secret."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.nodes import Nodes
from tests.kubernetes.pool import Origin, Pool

Json = dict[str, Any]
KEY = "the-engines-own-key"


def managers(pool: Pool, adapter: str) -> set[str]:
    """Who has written the adapter's status."""
    fields = pool.adapter(adapter)["metadata"]["managedFields"]
    return {entry["manager"] for entry in fields if entry.get("subresource") == "status"}


def happened(cluster: ControlPlane, pool: Pool, adapter: str) -> list[Json]:
    events = cluster.get(f"/api/v1/namespaces/{pool.namespace}/events")["items"]
    return [e for e in events if e["involvedObject"].get("name") == adapter]


def test_two_pools_of_one_base_model_leave_each_other_alone(
    cluster: ControlPlane, nodes: Nodes, namespace: str, origin: Origin
) -> None:
    pools = [Pool(cluster, nodes, namespace, origin, name) for name in ("chat", "batch")]
    chat, batch = pools
    try:
        for pool in pools:
            pool.install(1)
        # Told apart by spec.workers, as the documentation says: each pool's own manager writes.
        for pool in pools:
            pool.apply(f"for-{pool.name}", workers={"matchLabels": {"app": pool.name}})
        for pool in pools:
            pool.until_loaded(f"for-{pool.name}", 1)
        wait_until(lambda: chat.ready("for-chat") and batch.ready("for-batch"), "both are ready", 60)
        wait_until(
            lambda: all(managers(p, f"for-{p.name}") == {f"lora-sidecar-{p.label}"} for p in pools),
            "each is written by its own pool",
        )
        assert (chat.states("for-batch"), batch.states("for-chat")) == ({}, {})
        # One for both: each loads it, one of them writes, and the other says so in an Event.
        chat.apply("for-all")
        for pool in pools:
            pool.until_loaded("for-all", 1)
        wait_until(lambda: chat.ready("for-all"), "its status is written")
        wait_until(
            lambda: [e for e in happened(cluster, chat, "for-all") if "spec.workers" in e["message"]],
            "the other pool says how to tell them apart",
        )
        assert len(managers(chat, "for-all")) == 1
        chat.settle()
    finally:
        for pool in pools:
            pool.remove()


class Guarded(Pool):
    """A pool whose engines take their key from a Secret."""

    def plain(self, replicas: int, capacity: int, **env: str) -> Json:
        """See Pool."""
        workload = super().plain(replicas, capacity, **env)
        (engine,) = workload["spec"]["template"]["spec"]["containers"]
        reference = {"name": "engine-key", "key": "token"}
        engine["env"].append({"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": reference}})
        return workload


def test_the_engines_key_comes_from_the_secret_that_its_container_names(
    cluster: ControlPlane, nodes: Nodes, namespace: str, origin: Origin
) -> None:
    data = {"token": base64.b64encode(KEY.encode()).decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "engine-key"}, "data": data}
    cluster.post(f"/api/v1/namespaces/{namespace}/secrets", secret)
    pool = Guarded(cluster, nodes, namespace, origin)
    try:
        pool.install(1)
        pool.apply("a")
        (worker,) = pool.until_loaded("a", 1)
        # No Role lets the agent read a Secret: the kubelet mounts this one.
        asked = {e["objectRef"]["resource"] for e in pool.requests(0) if "objectRef" in e}
        assert "secrets" not in asked
        (pod,) = pool.pods()
        assert not pool.served(pod, "a"), "an engine that asks for its key answers nobody without"
        assert KEY not in pool.log(worker) + json.dumps(pod)
    finally:
        pool.remove()
