"""A whole pool on the real control plane: what `inject` produced runs, beside stub engines, read back with kubectl."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.pool import ADAPTER_LABEL, BASE_MODEL, Pool

Json = dict[str, Any]


def test_all_fixed_and_percentage_are_placed_and_read_back(pool: Pool, cluster: ControlPlane) -> None:
    pool.install(5)
    three = [pod["metadata"]["name"] for pod in pool.pods()][:3]
    cluster.kubectl("label", "pods", "-n", pool.namespace, *three, "tier=gold")
    pool.apply("everywhere")
    pool.apply("two", distribution={"strategy": "fixed", "replicas": 2})
    third = {"strategy": "percentage", "percentage": 34}
    pool.apply("third", distribution=third, workers={"matchLabels": {"tier": "gold"}})
    pool.apply("typo", baseModel="meta/bsae")
    for name, workers in (("everywhere", 5), ("two", 2), ("third", 1)):
        cluster.kubectl("wait", "-n", pool.namespace, "--for=condition=Ready", f"lora/{name}", "--timeout=30s")
        assert len(pool.until_loaded(name, workers)) == workers
        # The first placement may be by the labels of some workers alone; copies that it made go when they may.
        _until_told(pool, name, workers)
        assert pool.adapter(name)["status"]["revision"].startswith("sha256:")
    cluster.kubectl(
        *("wait", "-n", pool.namespace, "lora/typo", "--timeout=30s"),
        "--for=jsonpath={.status.conditions[?(@.type=='Placed')].reason}=NoCandidates",
    )
    assert set(pool.routed("third")) <= set(three)
    assert BASE_MODEL in cluster.kubectl("describe", "-n", pool.namespace, "lora/typo")
    table = cluster.kubectl("get", "loras", "-n", pool.namespace).splitlines()
    assert [line.split()[4] for line in table[1:]] == ["5/5", "1/1", "2/2", "0/0"]
    events = cluster.get(f"/api/v1/namespaces/{pool.namespace}/events")["items"]
    loaded = [e for e in events if e["involvedObject"]["kind"] == "Adapter" and e["reason"] == "Loaded"]
    assert {e["involvedObject"]["name"] for e in loaded} == {"everywhere", "two", "third"}


def test_at_rest_only_watches_and_one_change_is_one_patch(pool: Pool, cluster: ControlPlane) -> None:
    pool.install(3)
    pool.apply("a")
    pool.until_loaded("a", 3)
    cluster.kubectl("wait", "-n", pool.namespace, "--for=condition=Ready", "lora/a", "--timeout=30s")
    pool.settle(5.0)
    began = time.time()
    time.sleep(10.0)  # what is to be shown is that nothing happens
    assert [e["verb"] for e in pool.requests(began) if e["verb"] != "watch"] == []

    began = time.time()
    pod = pool.pods()[0]["metadata"]["name"]
    cluster.kubectl("annotate", "-n", pool.namespace, f"pod/{pod}", "lora-sidecar.io/capacity=3")
    wait_until(lambda: _worker(pool, pod)["capacity"] == 3, "the pod says so")
    pool.settle()
    patches = [e["requestURI"] for e in pool.requests(began) if e["verb"] == "patch"]
    assert len(patches) == 1
    assert patches[0].startswith(f"/api/v1/namespaces/{pool.namespace}/pods/{pod}")


def test_a_deletion_is_one_patch(pool: Pool) -> None:
    pool.install(1)
    pool.apply("a")
    pool.until_loaded("a", 1)
    pool.settle()
    began = time.time()
    pool.delete("a")
    wait_until(lambda: not pool.states("a"), "a is gone from the pod")
    assert pool.routed("a") == []
    (pod,) = pool.pods()
    wait_until(lambda: not pool.served(pod, "a"), "a is gone from the engine")
    pool.settle()
    changes = [(e["verb"], e["objectRef"]["resource"]) for e in pool.requests(began) if e["verb"] != "watch"]
    # Whether the definition is still there is asked before a deletion is believed.
    assert sorted(changes) == [("list", "adapters"), ("patch", "pods")]


def test_a_pod_that_stands_in_two_slices_counts_once(cluster: ControlPlane, pool: Pool) -> None:
    pool.install(3)
    half = {"strategy": "percentage", "percentage": 50}
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{pool.namespace}/endpointslices"
    pods = pool.pods()
    endpoints = [
        {
            "addresses": [pod["status"]["podIP"]],
            "targetRef": {"kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]},
        }
        for pod in pods
    ]
    # Nobody answers as this one; that it is listed shows that the slice has been read.
    ghost: Json = {"addresses": ["10.244.127.1"], "targetRef": {"kind": "Pod", "name": "ghost", "uid": "no-such-pod"}}
    labels = {"kubernetes.io/service-name": pool.label, "endpointslice.kubernetes.io/managed-by": "a-test"}
    document: Json = {"metadata": {"name": "twice", "labels": labels}, "addressType": "IPv4"}
    cluster.post(slices, document | {"endpoints": [*endpoints, ghost], "ports": [{"port": 8790}]})
    wait_until(
        lambda: all("ghost" in str(pool.ask(pod, "/v1/peers")) for pod in pods), "every agent has read the slice"
    )
    pool.apply("half", distribution=half)
    (holder,) = pool.until_loaded("half", 1)
    for pod in pods:
        (row,) = pool.ask(pod, "/v1/adapters")["adapters"]
        assert (row["members"], row["wanted"], row["targets"]) == (3, 1, [holder])
        named = [peer["name"] for peer in pool.ask(pod, "/v1/peers")["peers"] if peer["state"] == "alive"]
        assert named == [pod["metadata"]["name"] for pod in pods]


def test_an_annotated_capacity_counts(cluster: ControlPlane, pool: Pool) -> None:
    pool.install(1, capacity=4)
    for adapter in ("a", "b"):
        pool.apply(adapter)
        pool.until_loaded(adapter, 1)
    (pod,) = pool.pods()
    name = pod["metadata"]["name"]
    cluster.kubectl("annotate", "pod", "-n", pool.namespace, name, "lora-sidecar.io/capacity=1")
    wait_until(lambda: (pool.states("a"), pool.states("b")) == ({name: "Loaded"}, {name: "Waiting"}), "room for one")
    cluster.kubectl("annotate", "pod", "-n", pool.namespace, name, "lora-sidecar.io/capacity-")
    pool.until_loaded("b", 1)


def test_cordon_moves_an_adapter_make_before_break(pool: Pool, cluster: ControlPlane) -> None:
    pool.install(3)
    pool.apply("one", distribution={"strategy": "fixed", "replicas": 1})
    before = pool.until_loaded("one", 1)[0]
    with pool.watched("one"):
        cluster.kubectl("annotate", "-n", pool.namespace, f"pod/{before}", "lora-sidecar.io/cordon=true")
        wait_until(lambda: before not in pool.routed("one") and len(pool.routed("one")) == 1, "it moved", timeout=60)
        wait_until(lambda: before not in pool.states("one"), "the old copy is gone", timeout=60)
    events = cluster.get(f"/api/v1/namespaces/{pool.namespace}/events")["items"]
    assert any(e["reason"] == "Moved" and before in e["message"] for e in events)


def test_labels_carry_the_resource_name(pool: Pool) -> None:
    pool.install(1)
    pool.apply("named", servedName="Org/Model.v1")
    pod = pool.until_loaded("named", 1)[0]
    labels = next(p for p in pool.pods() if p["metadata"]["name"] == pod)["metadata"]["labels"]
    assert labels[f"{ADAPTER_LABEL}/named"] == "loaded"


def _until_told(pool: Pool, adapter: str, workers: int) -> None:
    """Wait for a status that says: wanted and loaded on so many workers, and on no other."""

    def told() -> bool:
        status = pool.adapter(adapter)["status"]
        states = [w["state"] for w in status["workers"]]
        counts = (status["targets"], status["loaded"], status["failed"])
        return counts == (workers, workers, 0) and states == ["Loaded"] * workers

    wait_until(told, f"the status of {adapter}")


def _worker(pool: Pool, name: str) -> dict[str, object]:
    pod = next(p for p in pool.pods() if p["metadata"]["name"] == name)
    found: dict[str, object] = json.loads(pod["metadata"]["annotations"]["lora-sidecar.io/worker"])
    return found
