"""The InferencePool sample against the fields that the Gateway API inference extension's v1 has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY

Json = dict[str, Any]
SAMPLE = (DEPLOY / "samples" / "inferencepool.yaml").read_text()
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def struct(required: list[str], **fields: Json) -> Json:
    return {"type": "object", "required": required, "properties": fields}


TEXT = {"type": "string", "maxLength": 253}
SPEC = struct(
    ["selector", "targetPorts", "endpointPickerRef"],
    selector=struct(["matchLabels"], matchLabels={"type": "object", "additionalProperties": TEXT}),
    targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": struct(["number"], number=PORT)},
    endpointPickerRef=struct(
        ["name"],
        group=TEXT,
        kind=TEXT,
        name=TEXT,
        port=struct(["number"], number=PORT),
        failureMode={"type": "string", "enum": ["FailOpen", "FailClose"]},
    ),
)


@pytest.fixture
def definition(cluster: ControlPlane) -> Iterator[ControlPlane]:
    """A definition of the kind with v1's fields and limits, for as long as the test runs."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    group = "inference.networking.k8s.io"
    names = {"kind": "InferencePool", "listKind": "InferencePoolList", "plural": "inferencepools"}
    schema = {"openAPIV3Schema": struct(["spec"], spec=SPEC)}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    # The group is one of Kubernetes' own, which asks for the place where it was approved.
    approved = {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api-inference-extension"}
    metadata = {"name": f"inferencepools.{group}", "annotations": approved}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
    cluster.post(path, {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"} | {
        "metadata": metadata, "spec": spec,
    })  # fmt: skip
    cluster.kubectl("wait", "--for=condition=Established", f"crd/inferencepools.{group}", "--timeout=30s")
    wait_until(lambda: cluster.exists(f"/openapi/v3/apis/{group}/v1"), "its fields are published")
    cluster.forget_discovery()
    yield cluster
    cluster.delete(f"{path}/inferencepools.{group}")
    cluster.forget_discovery()


def test_the_sample_has_v1s_fields(definition: ControlPlane, namespace: str) -> None:
    apply = ("apply", "-n", namespace, "-f", "-", "--validate=strict", "--dry-run=server")
    assert definition.kubectl(*apply, stdin=SAMPLE).count("created") == len(list(yaml.safe_load_all(SAMPLE)))
    wrong = SAMPLE.replace("failureMode: FailOpen", "failureMode: Open")
    assert "Unsupported value" in definition.kubectl(*apply, stdin=wrong, check=False)
    assert "unknown field" in definition.kubectl(*apply, stdin=SAMPLE.replace("matchLabels", "labels"), check=False)
