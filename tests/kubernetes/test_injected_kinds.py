"""Every kind that `lora-sidecar inject` takes: accepted by a real API server, and given back as it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.manifests import REPOSITORY, create_pod

Json = dict[str, Any]
GOLDEN = REPOSITORY / "tests" / "edges" / "golden" / "inject"
STRICT = ("--dry-run=server", "--validate=strict", "-o", "json")
POD = """\
  # Our chat model.
  metadata:
    labels: {app: chat}   # the Service's
  spec:
    containers:
    - name: vllm
      image: "vllm/vllm-openai:v0.32.0"
      args:
      - --model=m
      - --max-loras=4   # batch
"""


def workload(kind: str, more: str = "") -> str:
    """One of the kinds that have a pod template at spec.template."""
    indented = "".join(f"  {line}\n" for line in POD.splitlines())
    head = f"apiVersion: apps/v1\nkind: {kind}   # what it is\nmetadata:\n  name: chat\nspec:\n{more}"
    return f"{head}  selector:\n    matchLabels: {{app: chat}}\n  template:\n{indented}"


KINDS = {
    "Deployment": workload("Deployment", "  replicas: 2\n"),
    "StatefulSet": workload("StatefulSet", "  serviceName: chat\n"),
    "ReplicaSet": workload("ReplicaSet"),
    "DaemonSet": workload("DaemonSet"),
    "Pod": f"apiVersion: v1\nkind: Pod\n{POD}".replace("\n  ", "\n").replace("labels: {", "name: chat\n  labels: {", 1),
    "List": "apiVersion: v1\nkind: List\nitems:\n"
    + "".join(f"{'- ' if i == 0 else '  '}{line}\n" for i, line in enumerate(workload("Deployment").splitlines())),
    "several": f"# first\n{workload('Deployment')}---\n# a comment alone\n---\napiVersion: v1\nkind: ConfigMap\n"
    "metadata: {name: other}\ndata: {a: 'b'}\n",
}


def run(text: str, *arguments: str) -> str:
    """`lora-sidecar inject`."""
    command = [sys.executable, "-m", "sidecar", "inject", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def aligned(text: str) -> str:
    """Without the space before comments: behind a list in braces it grows with what is added there."""
    return re.sub(r" +#", " #", text)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_accepted_and_given_back_as_it_was(cluster: ControlPlane, namespace: str, kind: str) -> None:
    before = KINDS[kind]
    after = run(before)
    assert "name: lora-sidecar\n" in after
    said = cluster.kubectl("apply", "-n", namespace, "-f", "-", *STRICT, stdin=after)
    assert "RoleBinding" in said
    assert aligned(run(after, "--uninject")) == aligned(before)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.injected.yaml")), ids=lambda file: file.stem.partition(".")[0])
def test_the_golden_files_are_accepted(cluster: ControlPlane, namespace: str, file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text().replace("namespace: llm", f"namespace: {namespace}")))
    # Its definition belongs to another project: what counts is that its pods can be made.
    groups = [d for d in documents if d["kind"] == "LeaderWorkerSet"]
    others = yaml.safe_dump_all([d for d in documents if d not in groups])
    cluster.kubectl("apply", "-n", namespace, "-f", "-", *STRICT, stdin=others)
    for group in groups:
        templates = group["spec"]["leaderWorkerTemplate"]
        leader = templates["leaderTemplate"]
        assert [c["name"] for c in leader["spec"]["initContainers"]] == ["lora-sidecar"]
        for template in (leader, templates["workerTemplate"]):
            pod: Json = {"apiVersion": "v1", "kind": "Pod"} | template
            pod["metadata"] = template.get("metadata", {}) | {"name": "w"}
            # Strict: a field that the API server doesn't know is an error.
            made = create_pod(cluster, namespace, pod, "?dryRun=All&fieldValidation=Strict")
            assert made["spec"]["containers"]
            assert json.dumps(made).count('"restartPolicy": "Always"') >= 1
