"""What a worker writes on its own pod, on a real API server: one patch a change, ours alone, by UID."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sidecar.edges.kubernetes.api import ApiError
from sidecar.ports import Report
from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.workers import ACCOUNT, backend_of, make_pod, prepare

A = "adapter.lora-sidecar.io/a"
B = "adapter.lora-sidecar.io/b"
SUMMARY = "lora-sidecar.io/summary"


def patches(cluster: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    user = f"system:serviceaccount:{namespace}:{ACCOUNT}"
    return [e for e in cluster.audit() if e["user"]["username"] == user and e["verb"] == "patch"]


def metadata(cluster: ControlPlane, namespace: str, name: str = "w-0") -> dict[str, Any]:
    found: dict[str, Any] = cluster.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["metadata"]
    return found


async def test_a_change_is_one_patch_and_no_change_is_none(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    cluster.kubectl("annotate", "-n", namespace, "pod/w-0", "lora-sidecar.io/cordon=false", "mine=1")
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        await seen.until(lambda v: v.members_fresh and v.adapters_fresh, "all is seen")
        first = Report(labels={A: "loaded"}, annotations={A: "{}", SUMMARY: "loaded=1"})
        assert await seen.backend.publish(first) is True
        assert await seen.backend.publish(first) is False
        second = Report(labels={B: "loaded"}, annotations={A: "{}", B: "{}", SUMMARY: "loaded=1"})
        assert await seen.backend.publish(second) is True
        assert await seen.backend.publish(second) is False
        wait_until(lambda: len(patches(cluster, namespace)) >= 2, "the audit log has both")
        assert len(patches(cluster, namespace)) == 2
        found = metadata(cluster, namespace)
        assert {k for k in found["labels"] if k.startswith("adapter.")} == {B}
        assert found["labels"]["gpu"] == "a100"
        assert {k: v for k, v in found["annotations"].items() if not k.startswith("adapter.")} == {
            SUMMARY: "loaded=1",
            "lora-sidecar.io/cordon": "false",
            "mine": "1",
        }
        # Somebody takes the label away: it is seen, and written again.
        cluster.kubectl("label", "-n", namespace, "pod/w-0", f"{B}-")
        await seen.until(lambda _: B not in seen.backend.labels(), "the label is gone")
        assert await seen.backend.publish(second) is True
        assert B in metadata(cluster, namespace)["labels"]


async def test_a_pod_of_the_same_name_is_never_patched(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        await seen.backend.publish(Report(labels={A: "loaded"}))
        cluster.kubectl("delete", "pod", "w-0", "-n", namespace, "--force", "--grace-period=0")
        await seen.until(lambda v: v.steering.terminating, "our pod is gone")
        make_pod(cluster, namespace, "w-0", "10.244.1.3")
        with pytest.raises(ApiError):
            await seen.backend.publish(Report(labels={B: "loaded"}))
        assert B not in metadata(cluster, namespace)["labels"]


async def test_a_forbidden_patch_is_a_problem_with_the_way_out(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/lora-sidecar"
    rules = cluster.get(role)["rules"]
    reading = [r | {"verbs": [v for v in r["verbs"] if v != "patch"]} for r in rules if r["verbs"] != ["patch"]]
    cluster.patch(role, {"rules": reading})
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        await seen.until(lambda v: v.members_fresh, "all is seen")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not any("rolebinding" in p.message for p in seen.backend.view().problems):
            with pytest.raises(ApiError):
                await seen.backend.publish(Report(labels={A: "loaded"}))
        assert any("kubectl create rolebinding" in p.message for p in seen.backend.view().problems)
        cluster.patch(role, {"rules": rules})
        wait_until(lambda: cluster.get(role)["rules"] == rules, "the role is whole again")
        await _until_published(seen.backend, Report(labels={A: "loaded"}))
        assert seen.backend.view().problems == ()


async def _until_published(backend: Any, report: Report) -> None:
    """RBAC changes take a moment to be in force."""
    deadline = time.monotonic() + 10
    while True:
        try:
            await backend.publish(report)
        except ApiError:
            assert time.monotonic() < deadline
        else:
            return
