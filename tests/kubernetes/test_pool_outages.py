"""Nothing that goes wrong with the API server, or with what it is asked for, takes an adapter away."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY, REPOSITORY, bind_namespace
from tests.kubernetes.pool import Pool

Json = dict[str, Any]
CRD = "adapters.lora-sidecar.io"


def problems(pool: Pool) -> str:
    """What all the agents have to complain about."""
    return " ".join(str(p) for pod in pool.pods() for p in pool.ask(pod, "/v1/adapters")["problems"])


def unloads(pool: Pool) -> int:
    """How many adapters the agents have unloaded so far."""
    return sum(pool.log(pod["metadata"]["name"]).count("adapter_unloaded") for pod in pool.pods())


def test_an_outage_of_the_api_server_changes_nothing(cluster: ControlPlane, pool: Pool) -> None:
    pool.install(2)
    pool.apply("all")
    first = pool.until_loaded("all", 2)[0]
    pool.settle()
    pods = pool.pods()
    with pool.watched("all"):
        cluster.stop_api_server()
        try:
            # An agent that starts knows its pod, its peers and its adapters from its own disk.
            before = pool.nodes.pid(pool.namespace, first, "lora-sidecar")
            pool.nodes.kill(pool.namespace, first, "lora-sidecar")
            wait_until(
                lambda: pool.nodes.pid(pool.namespace, first, "lora-sidecar") not in (0, before), "it runs again"
            )
            wait_until(lambda: pool.answers(pods[0], "/readyz"), "it is ready again")
            assert all("can't be reached" in str(pool.ask(pod, "/v1/adapters")["problems"]) for pod in pods)
        finally:
            began = time.time()
            cluster.start_api_server()
            cluster.start_controllers()
        wait_until(lambda: "can't be reached" not in problems(pool), "both agents see the API server again", 60)
        pool.until_loaded("all", 2)
        pool.settle()
    assert unloads(pool) == 0
    # An API server that has just started refuses some requests before it knows the roles.
    answered = [e for e in pool.requests(began) if e["responseStatus"]["code"] < 300]
    asked = Counter((pool.pod_of(e), e["verb"], e["objectRef"]["resource"]) for e in answered)
    assert max(n for (_, verb, _), n in asked.items() if verb == "list") == 1
    patched = {pod: n for (pod, verb, resource), n in asked.items() if (verb, resource) == ("patch", "pods")}
    assert max(patched.values(), default=0) <= 1
    pool.apply("later")
    pool.until_loaded("later", 2)


def test_an_engine_that_restarts_in_an_outage_is_filled_again(cluster: ControlPlane, pool: Pool) -> None:
    pool.install(1)
    pool.apply("a")
    (name,) = pool.until_loaded("a", 1)
    (pod,) = pool.pods()
    cluster.stop_api_server()
    try:
        before = pool.nodes.pid(pool.namespace, name, "vllm")
        pool.nodes.kill(pool.namespace, name, "vllm")
        wait_until(lambda: pool.nodes.pid(pool.namespace, name, "vllm") not in (0, before), "a new process")
        wait_until(lambda: pool.served(pod, "a"), "the engine has it again")
    finally:
        cluster.start_api_server()
        cluster.start_controllers()
    pool.until_loaded("a", 1, 60)


@pytest.fixture
def definition(cluster: ControlPlane) -> Iterator[None]:
    """The custom resource's definition is there again after the test."""
    yield
    restore(cluster)


def restore(cluster: ControlPlane) -> None:
    cluster.kubectl("apply", "-k", str(REPOSITORY / "crds"))
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=30s")
    wait_until(lambda: cluster.exists("/apis/lora-sidecar.io/v1alpha1/adapters"), "the resource is served")
    cluster.forget_discovery()


@pytest.mark.usefixtures("definition")
def test_a_deleted_definition_takes_nothing_away(cluster: ControlPlane, pool: Pool) -> None:
    pool.install(2)
    for adapter in ("a", "b"):
        pool.apply(adapter)
        pool.until_loaded(adapter, 2)
    with pool.watched("a", "b"):
        cluster.kubectl("delete", "crd", CRD, "--timeout=60s")
        wait_until(lambda: problems(pool).count(f"{CRD} is missing") == 2, "both agents say so")
        restore(cluster)
        wait_until(lambda: f"{CRD} is missing" not in problems(pool), "both agents see the new one")
        # A definition that has just come back is empty for a reason: nothing is gone until it has been filled again.
        pool.apply("a")
        wait_until(lambda: pool.ready("a"), "its status is written again")
        assert pool.routed("b") == pool.routed("a")
        pool.apply("b")
        wait_until(lambda: pool.ready("b"), "its status is written again")
    assert unloads(pool) == 0


def test_missing_permission_is_said_with_the_way_out(cluster: ControlPlane, pool: Pool) -> None:
    pool.install(2)
    pool.apply("a")
    pool.until_loaded("a", 2)
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{pool.namespace}/roles/lora-sidecar"
    rules = cluster.get(role)["rules"]
    with pool.watched("a"):
        cluster.patch(role, {"rules": []})
        cluster.stop_api_server()  # so that the open watches end, which may else last for minutes
        cluster.start_api_server()
        cluster.start_controllers()
        wait_until(lambda: problems(pool).count("kubectl create rolebinding") >= 2, "both say what to apply", 60)
        cluster.patch(role, {"rules": rules})
        wait_until(lambda: not problems(pool), "all is well", 60)
    assert unloads(pool) == 0


def test_the_label_alone_makes_a_pool(policies: ControlPlane, pool: Pool, tmp_path: Path) -> None:
    bind_namespace(policies, pool.namespace, tmp_path)
    document = pool.plain(2, 4)
    document["spec"]["template"]["metadata"]["labels"]["lora-sidecar.io/pool"] = pool.label
    document["spec"]["template"]["spec"]["containers"][0]["args"].append("--enable-lora")
    service = (DEPLOY / "samples/pool-service.yaml").read_text().replace("llama-lora", pool.label)
    policies.kubectl("apply", "-n", pool.namespace, "-f", "-", stdin=service)
    policies.kubectl("apply", "-n", pool.namespace, "-f", "-", stdin=yaml.safe_dump(document))
    pool.until_ready(2)
    pool.apply("all")
    pool.until_loaded("all", 2)
    wait_until(lambda: pool.ready("all"), "its status is written")
