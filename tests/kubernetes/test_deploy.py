"""Every shipped manifest is accepted by a real API server, and says what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar import __version__
from sidecar.core.injection_parts import IMAGE
from sidecar.core.manifest import parse_adapter
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.manifests import DEPLOY, POOL, REPOSITORY, bind_namespace, rendered

Json = dict[str, Any]


@pytest.mark.parametrize("directory", ["deploy/base", "deploy/samples/vllm"])
def test_a_directory_is_applied_into_any_namespace(cluster: ControlPlane, namespace: str, directory: str) -> None:
    said = cluster.kubectl("apply", "-n", namespace, "-k", str(REPOSITORY / directory), "--validate=strict")
    assert "created" in said
    assert cluster.kubectl("diff", "-n", namespace, "-k", str(REPOSITORY / directory)) == ""


@pytest.mark.parametrize("directory", ["crds", "deploy/policy"])
def test_what_is_cluster_wide_is_applied_as_it_is(cluster: ControlPlane, directory: str) -> None:
    cluster.kubectl("apply", "-k", str(REPOSITORY / directory), "--validate=strict")


@pytest.mark.parametrize("name", ["adapters.yaml", "pool-service.yaml", "secrets-role.yaml"])
def test_a_sample_is_applied(cluster: ControlPlane, namespace: str, name: str) -> None:
    said = cluster.kubectl("apply", "-n", namespace, "-f", str(DEPLOY / "samples" / name), "--validate=strict")
    assert "created" in said


def test_no_expression_of_a_policy_is_warned_of(policies: ControlPlane) -> None:
    for policy in json.loads(policies.kubectl("get", "validatingadmissionpolicies", "-o", "json"))["items"]:
        assert not policy.get("status", {}).get("typeChecking", {}).get("expressionWarnings"), policy["metadata"][
            "name"
        ]


def test_sample_adapters_are_good_for_files_too() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "samples" / "adapters.yaml").read_text()))
    assert {parse_adapter(d).distribution.strategy for d in documents} == {"all", "fixed", "percentage"}


def test_the_namespace_binding_is_for_that_namespace_alone(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    bind_namespace(cluster, namespace, tmp_path)

    def may(user: str) -> bool:
        attributes = {"namespace": namespace, "verb": "list", "group": "lora-sidecar.io", "resource": "adapters"}
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}", "system:authenticated"]
        review = {"spec": {"user": user, "groups": groups, "resourceAttributes": attributes}}
        answer = cluster.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    assert may(f"system:serviceaccount:{namespace}:anyone")
    assert not may("system:serviceaccount:default:default")


def test_another_namespace_is_refused_rather_than_bound_wrongly(cluster: ControlPlane, namespace: str) -> None:
    said = cluster.kubectl("apply", "-n", namespace, "-k", str(DEPLOY / "namespace"), check=False)
    assert "does not match the namespace" in said


def test_the_role_is_no_larger_than_the_agent(cluster: ControlPlane) -> None:
    role = next(d for d in rendered(cluster, DEPLOY / "base") if d["kind"] == "Role")
    verbs = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    assert verbs == {
        "adapters": {"get", "list", "watch"},
        "adapters/status": {"patch"},
        "endpointslices": {"list", "watch"},
        "pods": {"get", "list", "watch", "patch"},
        "events": {"create", "patch"},
    }


def test_the_network_policy_closes_the_agents_port_and_no_other(cluster: ControlPlane) -> None:
    policy = next(d for d in rendered(cluster, DEPLOY / "base") if d["kind"] == "NetworkPolicy")["spec"]
    anywhere = [rule for rule in policy["ingress"] if "from" not in rule]
    for protocol in ("TCP", "UDP"):
        ranges = [(p["port"], p["endPort"]) for rule in anywhere for p in rule["ports"] if p["protocol"] == protocol]
        open_ports = {port for first, last in ranges for port in range(first, last + 1)}
        assert set(range(1, 65536)) - open_ports == {8790}
    peers = next(rule for rule in policy["ingress"] if "podSelector" in rule.get("from", [{}])[0])
    assert {(p["protocol"], p["port"]) for p in peers["ports"]} == {("TCP", 8790), ("UDP", 8790)}
    assert peers["from"][0]["podSelector"] == policy["podSelector"]


def test_every_image_is_this_version(cluster: ControlPlane) -> None:
    wanted = f"{IMAGE}:{__version__}"
    agent = next(d for d in rendered(cluster, DEPLOY / "samples" / "vllm") if d["kind"] == "Deployment")
    assert [c["image"] for c in agent["spec"]["template"]["spec"]["initContainers"]] == [wanted]
    policy = next(d for d in rendered(cluster, DEPLOY / "policy") if d["kind"] == "MutatingAdmissionPolicy")
    assert next(v["expression"] for v in policy["spec"]["variables"] if v["name"] == "image") == f"'{wanted}'"


def test_the_inference_pools_select_what_the_agents_label() -> None:
    pools = list(yaml.safe_load_all((DEPLOY / "samples" / "inferencepool.yaml").read_text()))
    adapters = {d["metadata"]["name"] for d in yaml.safe_load_all((DEPLOY / "samples" / "adapters.yaml").read_text())}
    workload = yaml.safe_load((DEPLOY / "samples" / "vllm" / "deployment.yaml").read_text())
    pool = workload["spec"]["template"]["metadata"]["labels"][POOL]
    for document in pools:
        labels = dict(document["spec"]["selector"]["matchLabels"])
        assert labels.pop(POOL) == pool
        for key, value in labels.items():
            assert (key.partition("/")[0], value) == ("adapter.lora-sidecar.io", "loaded")
            assert key.partition("/")[2] in adapters
