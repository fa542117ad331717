"""A whole pool on the real control plane: what `inject` produced runs, beside stub engines, read back with kubectl."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.nodes import Nodes
from tests.kubernetes.pool import ADAPTER_LABEL, BASE_MODEL, Origin, Pool

pytestmark = pytest.mark.slow


@pytest.fixture
def origin() -> Iterator[Origin]:
    made = Origin()
    yield made
    made.close()


@pytest.fixture
def pool(cluster: ControlPlane, nodes: Nodes, namespace: str, origin: Origin) -> Pool:
    return Pool(cluster, nodes, namespace, origin)


def test_all_fixed_and_percentage_are_placed_and_read_back(pool: Pool, cluster: ControlPlane) -> None:
    pool.install(5)
    pool.apply("everywhere")
    pool.apply("two", distribution={"strategy": "fixed", "replicas": 2})
    pool.apply("third", distribution={"strategy": "percentage", "percentage": 34})
    pool.apply("typo", baseModel="meta/bsae")
    for name, workers in (("everywhere", 5), ("two", 2), ("third", 1)):
        cluster.kubectl("wait", "-n", pool.namespace, "--for=condition=Ready", f"lora/{name}", "--timeout=30s")
        assert len(pool.until_loaded(name, workers)) == workers
        status = cluster.get(f"/apis/lora-sidecar.io/v1alpha1/namespaces/{pool.namespace}/adapters/{name}")["status"]
        assert (status["targets"], status["loaded"], status["failed"]) == (workers, workers, 0)
        assert status["revision"].startswith("sha256:")
        assert [w["state"] for w in status["workers"]] == ["Loaded"] * workers
    cluster.kubectl(
        *("wait", "-n", pool.namespace, "lora/typo", "--timeout=30s"),
        "--for=jsonpath={.status.conditions[?(@.type=='Placed')].reason}=NoCandidates",
    )
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
    wait_until(lambda: _quiet(pool, 5.0), "the pool is at rest", timeout=60)
    began = time.time()
    time.sleep(10.0)  # what is to be shown is that nothing happens
    assert [e["verb"] for e in pool.requests(began) if e["verb"] != "watch"] == []

    began = time.time()
    pod = pool.pods()[0]["metadata"]["name"]
    cluster.kubectl("annotate", "-n", pool.namespace, f"pod/{pod}", "lora-sidecar.io/capacity=3")
    wait_until(lambda: _worker(pool, pod)["capacity"] == 3, "the pod says so")
    wait_until(lambda: _quiet(pool, 3.0), "the pool is at rest", timeout=60)
    patches = [e["requestURI"] for e in pool.requests(began) if e["verb"] == "patch"]
    assert len(patches) == 1
    assert patches[0].startswith(f"/api/v1/namespaces/{pool.namespace}/pods/{pod}")


def test_a_restarted_engine_is_out_of_routing_at_once_and_loaded_again(pool: Pool, cluster: ControlPlane) -> None:
    pool.install(2)
    pool.apply("a")
    names = pool.until_loaded("a", 2)
    uid = {p["metadata"]["name"]: p["metadata"]["uid"] for p in pool.pods()}
    began = time.time()
    pool.nodes.kill(pool.namespace, names[0], "vllm")
    wait_until(lambda: _patched_without_label(pool, names[0], began), "the label went", timeout=30)
    assert pool.until_loaded("a", 2, timeout=60) == names
    assert {p["metadata"]["name"]: p["metadata"]["uid"] for p in pool.pods()} == uid


def _patched_without_label(pool: Pool, pod: str, since: float) -> bool:
    """Twice a patch: the label off, and on again."""
    patches = [e for e in pool.requests(since) if e["verb"] == "patch" and f"/pods/{pod}" in e["requestURI"]]
    return bool(patches)


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


def _worker(pool: Pool, name: str) -> dict[str, object]:
    pod = next(p for p in pool.pods() if p["metadata"]["name"] == name)
    found: dict[str, object] = json.loads(pod["metadata"]["annotations"]["lora-sidecar.io/worker"])
    return found


def _quiet(pool: Pool, seconds: float) -> bool:
    """No request but watches for so long."""
    return not [e for e in pool.requests(time.time() - seconds) if e["verb"] != "watch"]


def test_labels_carry_the_resource_name(pool: Pool) -> None:
    pool.install(1)
    pool.apply("named", servedName="Org/Model.v1")
    pod = pool.until_loaded("named", 1)[0]
    labels = next(p for p in pool.pods() if p["metadata"]["name"] == pod)["metadata"]["labels"]
    assert labels[f"{ADAPTER_LABEL}/named"] == "loaded"
