"""`lora-sidecar status` and the kubectl plugin against a real API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.workers import REPOSITORY, make_pod, prepare

TOLD = json.dumps({"state": "Loaded", "revision": "sha256:" + "a" * 64, "servedName": "Org/A"})


def command(cluster: ControlPlane, *arguments: str, code: str = "main") -> subprocess.CompletedProcess[str]:
    program = f"import sys; from sidecar.__main__ import {code}; sys.exit({code}(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "PYTHONPATH": str(REPOSITORY)},
    )


def test_the_table_and_the_documents(cluster: ControlPlane, namespace: str) -> None:
    prepare(cluster, namespace)
    for number in range(2):
        make_pod(cluster, namespace, f"w-{number}", f"10.244.1.{number + 1}")
    cluster.kubectl("label", "-n", namespace, "pod/w-0", "adapter.lora-sidecar.io/a=loaded")
    cluster.kubectl("annotate", "-n", namespace, "pod/w-0", f"adapter.lora-sidecar.io/a={TOLD}")
    table = command(cluster, "status", "-n", namespace)
    assert table.returncode == 0, table.stderr
    assert [line.split() for line in table.stdout.splitlines()] == [
        ["ADAPTER", "LOADED", "0", "1"],
        ["a", "1/1", "Loaded", "-"],
    ]
    document = json.loads(command(cluster, "status", "-n", namespace, "-o", "json").stdout)
    assert document["pods"][0]["adapters"]["a"]["servedName"] == "Org/A"
    assert document["pods"][0]["adapters"]["a"]["routed"] is True
    assert yaml.safe_load(command(cluster, "status", "-n", namespace, "-o", "yaml").stdout) == document
    wide = command(cluster, "status", "-n", namespace, "-o", "wide", code="kubectl").stdout
    assert "Org/A" in wide
    assert "silent" in wide


def test_nothing_there_and_no_cluster_are_said(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    assert f"no pod in namespace {namespace}" in command(cluster, "status", "-n", namespace).stdout
    failed = command(cluster, "status", "--kubeconfig", str(tmp_path / "none"))
    assert failed.returncode == 1
    assert "--kubeconfig" in failed.stderr
    failed = command(cluster, "status", "--context", "nowhere")
    assert failed.returncode == 1
    assert "nowhere" in failed.stderr


def test_it_follows_changes(cluster: ControlPlane, namespace: str) -> None:
    prepare(cluster, namespace)
    make_pod(cluster, namespace, "w-0", "10.244.1.1")
    program = "import sys; from sidecar.__main__ import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "status", "-n", namespace, "-w", "-o", "wide"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("w-0"):
                break
        cluster.kubectl("annotate", "-n", namespace, "pod/w-0", f"adapter.lora-sidecar.io/a={TOLD}")
        for line in process.stdout:
            if line.startswith("a ") and "Loaded" in line:
                break
        else:
            raise AssertionError("the change was not shown")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
