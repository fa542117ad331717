"""Injected pods in a namespace that enforces the Pod Security Standards' strictest profile."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from sidecar import __version__
from sidecar.core.injection import Options, inject
from sidecar.core.injection_parts import IMAGE as NAME
from tests.kubernetes.controlplane import ApiError, ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY, create_pod, pod, rendered
from tests.kubernetes.pool import Pool

Json = dict[str, Any]
IMAGE = f"{NAME}:{__version__}"
DRY = "?dryRun=All"
STRICT = {
    "runAsNonRoot": True,
    "runAsUser": 2000,
    "runAsGroup": 2000,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture
def restricted(cluster: ControlPlane, namespace: str) -> str:
    """The namespace, in which by now a pod that doesn't comply is refused."""
    labels = ["enforce=restricted", "warn=restricted", "enforce-version=latest"]
    words = [f"pod-security.kubernetes.io/{label}" for label in labels]
    cluster.kubectl("label", "namespace", namespace, *words)
    lax = pod("lax", None, containers=[engine() | {"securityContext": {}}])
    wait_until(lambda: "restricted" in refusal(cluster, namespace, lax), "the profile is enforced")
    return namespace


def refusal(cluster: ControlPlane, namespace: str, document: Json) -> str:
    """Why the API server takes no such pod, "" if it does."""
    try:
        create_pod(cluster, namespace, document, DRY)
    except ApiError as error:
        return str(error)
    return ""


def engine() -> Json:
    """A vLLM container that complies by itself."""
    args = ["--model=m", "--max-loras=4"]
    return {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": args, "securityContext": STRICT}


def injected(document: Json) -> Json:
    made: Json = inject([copy.deepcopy(document)], Options(image=IMAGE)).documents[0]
    return made


def test_what_inject_writes_complies(cluster: ControlPlane, restricted: str) -> None:
    document = injected(pod("w", containers=[engine()]))
    assert refusal(cluster, restricted, document) == ""
    # The profile asks for a user other than root, not for numbers.
    for key in STRICT.keys() - {"runAsUser", "runAsGroup"}:
        broken = copy.deepcopy(document)
        (agent,) = broken["spec"]["initContainers"]
        del agent["securityContext"][key]
        assert "lora-sidecar" in refusal(cluster, restricted, broken), key


def test_what_the_component_writes_complies(cluster: ControlPlane, restricted: str) -> None:
    made = next(d for d in rendered(cluster, DEPLOY / "samples" / "vllm") if d["kind"] == "Deployment")
    spec = made["spec"]["template"]["spec"]
    (server,) = spec["containers"]
    server["securityContext"] = STRICT
    assert refusal(cluster, restricted, pod("w", **spec)) == ""


def test_what_the_policy_writes_complies(policies: ControlPlane, restricted: str) -> None:
    made = create_pod(policies, restricted, pod("w", containers=[engine()]), DRY)
    assert [c["name"] for c in made["spec"]["initContainers"]] == ["lora-sidecar"]


@pytest.mark.parametrize("directory", ["deploy/base", "deploy/namespace", "deploy/component", "deploy/samples/vllm"])
def test_no_manifest_asks_for_more_than_the_profile_gives(directory: str) -> None:
    """Nothing of the node: no host network, port, path, process or user namespace of the host's."""
    for file in (DEPLOY.parent / directory).glob("*.yaml"):
        for document in yaml.safe_load_all(file.read_text()):
            text = json.dumps(document)
            assert not [w for w in ("hostNetwork", "hostPort", "hostPath", "hostPID", "privileged") if w in text]


@pytest.mark.slow
def test_a_pool_works_there_with_an_engine_of_another_user(pool: Pool, restricted: str) -> None:
    document = pool.plain(1, 8)
    (server,) = document["spec"]["template"]["spec"]["containers"]
    server["securityContext"] = STRICT
    made = inject([document], Options(image=IMAGE)).documents
    pool.cluster.kubectl("apply", "-n", restricted, "-k", str(DEPLOY / "base"))
    pool.cluster.kubectl("apply", "-n", restricted, "-f", "-", stdin=yaml.safe_dump_all(made))
    pool.until_ready(1)
    pool.apply("all")
    pool.until_loaded("all", 1)
