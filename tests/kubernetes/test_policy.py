"""Least privilege on a real API server: what an agent's pod-bound token may do, and what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kubernetes.controlplane import ApiError, ControlPlane, wait_until
from tests.kubernetes.manifests import POOL, bind_namespace, create_pod, pod

Json = dict[str, Any]
ADAPTER = {
    "apiVersion": "lora-sidecar.io/v1alpha1",
    "kind": "Adapter",
    "metadata": {"name": "sql"},
    "spec": {"baseModel": "m", "source": {"uri": "s3://bucket/x"}},
}


class Agents(NamedTuple):
    """A namespace with two pods, and the token that is bound to the first."""

    cluster: ControlPlane
    namespace: str
    token: str
    own: str
    neighbour: str

    def patch(self, path: str, body: Json, media: str = "application/merge-patch+json") -> Json:
        """PATCH as the agent. Raises ApiError."""
        return self.cluster.patch(path, body, token=self.token, media=media)

    def refused(self, path: str, body: Json) -> str:
        """The reason why the agent may not PATCH."""
        with pytest.raises(ApiError) as refused:
            self.patch(path, body, "application/strategic-merge-patch+json")
        assert refused.value.code == 403
        return str(refused.value)


@pytest.fixture(scope="module")
def agents(policies: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Agents:
    """Pods of a bound namespace, the policy in force."""
    cluster = policies
    namespace = "agents"
    cluster.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_until(lambda: cluster.exists(account), "the default service account")
    bind_namespace(cluster, namespace, tmp_path_factory.mktemp("bound"))
    cluster.post(f"/apis/lora-sidecar.io/v1alpha1/namespaces/{namespace}/adapters", ADAPTER)
    own = create_pod(cluster, namespace, pod("w-0"))
    create_pod(cluster, namespace, pod("w-1"))
    token = cluster.pod_token(namespace, "default", "w-0", own["metadata"]["uid"])
    paths = [f"/api/v1/namespaces/{namespace}/pods/{name}" for name in ("w-0", "w-1")]
    made = Agents(cluster, namespace, token, *paths)
    body = {"metadata": {"annotations": {"lora-sidecar.io/summary": "probe"}}}

    def in_force() -> bool:
        try:
            made.patch(made.neighbour + "?dryRun=All", body)
        except ApiError as error:
            return "own pod" in str(error)
        return False

    wait_until(in_force, "the policy is in force")
    return made


def metadata(**fields: Any) -> Json:
    return {"metadata": fields}


def test_own_annotations_and_labels_are_written_and_taken_back(agents: Agents) -> None:
    keys = {"lora-sidecar.io/worker": "{}", "adapter.lora-sidecar.io/sql": "{}"}
    patched = agents.patch(agents.own, metadata(annotations=keys, labels={"adapter.lora-sidecar.io/sql": "loaded"}))
    assert patched["metadata"]["annotations"].items() >= keys.items()
    assert patched["metadata"]["labels"]["adapter.lora-sidecar.io/sql"] == "loaded"
    nothing = dict.fromkeys(keys)
    patched = agents.patch(agents.own, metadata(annotations=nothing, labels={"adapter.lora-sidecar.io/sql": None}))
    assert not keys.keys() & patched["metadata"].get("annotations", {}).keys()
    assert "adapter.lora-sidecar.io/sql" not in patched["metadata"]["labels"]


def test_a_patch_for_an_earlier_pod_of_that_name_is_invalid(agents: Agents) -> None:
    body = metadata(uid="00000000-0000-0000-0000-000000000000", annotations={"lora-sidecar.io/summary": "x"})
    with pytest.raises(ApiError, match="field is immutable") as invalid:
        agents.patch(agents.own, body)
    assert invalid.value.code == 422


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (metadata(labels={"app": "y"}), "labels of lora-sidecar.io only"),
        (metadata(labels={"app": None}), "labels of lora-sidecar.io only"),
        (metadata(labels={"other": "z"}), "labels of lora-sidecar.io only"),
        (metadata(labels={"lora-sidecar.io.evil": "z"}), "labels of lora-sidecar.io only"),
        (metadata(labels={POOL: "elsewhere"}), "not lora-sidecar.io/pool"),
        (metadata(labels={POOL: None}), "not lora-sidecar.io/pool"),
        (metadata(labels={"$patch": "delete"}), "labels of lora-sidecar.io only"),
        (metadata(annotations={"other": "z"}), "annotations of lora-sidecar.io only"),
        (
            metadata(annotations={"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}),
            "annotations of lora-sidecar.io",
        ),
        (metadata(finalizers=["lora-sidecar.io/hold"]), "finalizers or owners"),
        (
            metadata(ownerReferences=[{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y"}]),
            "finalizers or owners",
        ),
        ({"spec": {"activeDeadlineSeconds": 1}}, "a pod's spec"),
        ({"spec": {"containers": [{"name": "vllm", "image": "mine"}]}}, "a pod's spec"),
    ],
)
def test_everything_else_of_the_own_pod_is_refused(agents: Agents, body: Json, reason: str) -> None:
    assert reason in agents.refused(agents.own, body)


def test_a_neighbours_pod_is_refused_by_name(agents: Agents) -> None:
    said = agents.refused(agents.neighbour, metadata(annotations={"lora-sidecar.io/summary": "x"}))
    assert "its own pod w-0 only, not w-1" in said


def test_what_the_role_does_not_hold_is_refused_before_any_policy(agents: Agents) -> None:
    cluster, namespace, token = agents.cluster, agents.namespace, agents.token
    adapters = f"/apis/lora-sidecar.io/v1alpha1/namespaces/{namespace}/adapters"
    for method, path, body in (
        ("DELETE", agents.own, None),
        ("DELETE", f"{adapters}/sql", None),
        ("POST", adapters, ADAPTER | {"metadata": {"name": "more"}}),
        ("POST", f"/api/v1/namespaces/{namespace}/pods", pod("more")),
        ("GET", f"/api/v1/namespaces/{namespace}/secrets", None),
        ("GET", f"/api/v1/namespaces/{namespace}/configmaps", None),
        ("GET", "/api/v1/nodes", None),
        ("GET", "/api/v1/namespaces/default/pods", None),
        ("PATCH", f"{agents.own}/status", {"status": {"phase": "Failed"}}),
        ("PATCH", f"{agents.own}/ephemeralcontainers", {}),
        ("PATCH", f"{adapters}/sql", {"spec": {"priority": 9}}),
    ):
        media = "application/merge-patch+json" if method == "PATCH" else ""
        with pytest.raises(ApiError) as refused:
            cluster.raw(method, path, body, token=token, media=media)
        assert refused.value.code == 403, (method, path)


def test_what_the_agent_reads_is_allowed(agents: Agents) -> None:
    cluster, namespace, token = agents.cluster, agents.namespace, agents.token
    for path in (
        f"/apis/lora-sidecar.io/v1alpha1/namespaces/{namespace}/adapters",
        f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
        f"/api/v1/namespaces/{namespace}/pods?fieldSelector=metadata.name=w-0",
        agents.own,
    ):
        cluster.get(path, token=token)


def test_an_event_can_be_told(agents: Agents) -> None:
    event = {
        "metadata": {"generateName": "sql."},
        "involvedObject": {"kind": "Adapter", "name": "sql", "namespace": agents.namespace},
        "reason": "Loaded",
        "message": "loaded",
        "type": "Normal",
    }
    made = agents.cluster.post(f"/api/v1/namespaces/{agents.namespace}/events", event, token=agents.token)
    agents.patch(f"/api/v1/namespaces/{agents.namespace}/events/{made['metadata']['name']}", {"count": 2})


def status_path(agents: Agents, manager: str) -> str:
    adapter = f"/apis/lora-sidecar.io/v1alpha1/namespaces/{agents.namespace}/adapters/sql/status"
    return f"{adapter}?fieldManager={manager}"


def apply_status(agents: Agents, manager: str, body: Json) -> Json:
    document = {"apiVersion": ADAPTER["apiVersion"], "kind": "Adapter", "metadata": {"name": "sql"}} | body
    return agents.patch(status_path(agents, manager) + "&force=true", document, "application/apply-patch+yaml")


def test_the_status_is_written_as_the_pools_manager(agents: Agents) -> None:
    written = apply_status(agents, "lora-sidecar-p", {"status": {"targets": 1, "loaded": 1}})
    assert written["status"] == {"targets": 1, "loaded": 1}


@pytest.mark.parametrize("manager", ["kubectl", "lora", "argocd-controller"])
def test_the_status_is_not_written_in_anothers_name(agents: Agents, manager: str) -> None:
    with pytest.raises(ApiError, match="as the field manager lora-sidecar-POOL") as refused:
        apply_status(agents, manager, {"status": {"targets": 7}})
    assert refused.value.code == 403


def test_the_spec_does_not_change_by_way_of_the_status(agents: Agents) -> None:
    written = agents.patch(
        status_path(agents, "lora-sidecar-p"), {"spec": {"priority": 9}, "metadata": {"finalizers": ["a/b"]}}
    )
    assert written["spec"]["priority"] == 0
    assert "finalizers" not in written["metadata"]


def test_an_operator_that_may_delete_pods_goes_on_as_before(agents: Agents) -> None:
    cluster, namespace = agents.cluster, agents.namespace
    cluster.post(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "operator"}})
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]}]
    cluster.post(f"{rbac}/roles", {"metadata": {"name": "operator"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "operator"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"}
    cluster.post(
        f"{rbac}/rolebindings", {"metadata": {"name": "operator"}, "subjects": [subject], "roleRef": reference}
    )
    made = create_pod(cluster, namespace, pod("operator", None, serviceAccountName="operator"))
    token = cluster.pod_token(namespace, "operator", "operator", made["metadata"]["uid"])

    def patched() -> Json:
        return cluster.patch(agents.neighbour, metadata(labels={"by": "operator"}), token=token)

    assert patched()["metadata"]["labels"]["by"] == "operator"


def test_a_deleted_pods_token_is_worth_nothing(agents: Agents) -> None:
    cluster, namespace = agents.cluster, agents.namespace
    made = create_pod(cluster, namespace, pod("short"))
    path = f"/api/v1/namespaces/{namespace}/pods/short"
    token = cluster.pod_token(namespace, "default", "short", made["metadata"]["uid"])
    cluster.patch(path, metadata(annotations={"lora-sidecar.io/summary": "x"}), token=token)
    cluster.raw("DELETE", path, {"gracePeriodSeconds": 0})
    create_pod(cluster, namespace, pod("short"))

    def refused() -> bool:
        try:
            cluster.patch(path, metadata(annotations={"lora-sidecar.io/summary": "y"}), token=token)
        except ApiError as error:
            return error.code in (401, 403)
        return False

    # The authenticator keeps a token's answer for some seconds; then the policy, which compares the UID, stands alone.
    assert refused()


def test_without_a_binding_nothing_is_allowed(policies: ControlPlane, namespace: str, tmp_path: Path) -> None:
    made = create_pod(policies, namespace, pod("w-0"))
    token = policies.pod_token(namespace, "default", "w-0", made["metadata"]["uid"])
    with pytest.raises(ApiError, match="cannot list resource") as refused:
        policies.get(f"/apis/lora-sidecar.io/v1alpha1/namespaces/{namespace}/adapters", token=token)
    assert refused.value.code == 403
