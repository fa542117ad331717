"""The shipped manifests as the tests use them: rendered, put into a namespace, changed where a person would."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.controlplane import ApiError, ControlPlane, wait_until

Json = dict[str, Any]
REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
POOL = "lora-sidecar.io/pool"
# Nobody has such a node, so pods with this selector stay what the API server made of them.
NOWHERE = {"nodeSelector": {"nowhere": "true"}}


def rendered(cluster: ControlPlane, directory: Path) -> list[Json]:
    """What `kubectl kustomize` makes of a directory."""
    return list(yaml.safe_load_all(cluster.kubectl("kustomize", str(directory))))


def bind_namespace(cluster: ControlPlane, namespace: str, scratch: Path) -> None:
    """deploy/base and deploy/namespace in a namespace, the latter with its one line edited."""
    cluster.kubectl("apply", "-n", namespace, "-k", str(DEPLOY / "base"))
    copied = scratch / "namespace"
    shutil.copytree(DEPLOY / "namespace", copied)
    text = (copied / "kustomization.yaml").read_text()
    (copied / "kustomization.yaml").write_text(re.sub(r"(?m)^namespace: .*$", f"namespace: {namespace}", text))
    cluster.kubectl("apply", "-k", str(copied))


def pod(name: str, pool: str | None = "p", **spec: Any) -> Json:
    """A pod of the pool that is never scheduled, with a vLLM container unless `spec` says otherwise."""
    containers = [{"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["--model=m", "--max-loras=4"]}]
    labels = {"app": "x"} | ({POOL: pool} if pool else {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": containers, **NOWHERE, **spec},
    }


def create_pod(cluster: ControlPlane, namespace: str, document: Json, query: str = "") -> Json:
    """POST a pod. Raises ApiError."""
    return cluster.post(f"/api/v1/namespaces/{namespace}/pods{query}", document)


def apply_policies(cluster: ControlPlane) -> None:
    """deploy/policy, in force: a new policy takes up to a second or two."""
    cluster.kubectl("apply", "-k", str(DEPLOY / "policy"))
    probe = pod("probe", containers=[{"name": "web", "image": "nginx"}])

    def in_force() -> bool:
        try:
            made = create_pod(cluster, "default", pod("probe"), "?dryRun=All")
        except ApiError:
            return False  # the policy that looks came before the one that injects
        try:
            create_pod(cluster, "default", probe, "?dryRun=All")
        except ApiError as error:
            return "asks for the sidecar" in str(error) and "initContainers" in made["spec"]
        return False

    wait_until(lambda: cluster.exists("/api/v1/namespaces/default/serviceaccounts/default"), "a service account")
    wait_until(in_force, "the injection policies are in force")
