"""The README's way into a cluster, its commands taken from its text and run by a shell as they stand."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from tests.adapters import adapter
from tests.hub import Hub
from tests.kubernetes.controlplane import API_HOST, ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY, REPOSITORY
from tests.kubernetes.nodes import Nodes
from tests.kubernetes.pool import Origin, Pool

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
PROGRAMS = {"lora-sidecar": "main", "kubectl-lora": "kubectl"}


def blocks(title: str) -> list[list[str]]:
    """The README's blocks of commands below a heading."""
    text = (REPOSITORY / "README.md").read_text()
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"(?m)(?:^    \S.*\n)+", section)
    return [[line.strip() for line in block.splitlines()] for block in found]


class Shell:
    """A person's shell: in a checkout, with kubectl, this package and a kubeconfig for the namespace."""

    def __init__(self, cluster: ControlPlane, namespace: str, home: Path) -> None:
        self.namespace, self.home = namespace, home
        programs = home / "bin"
        programs.mkdir()
        for name, function in PROGRAMS.items():
            code = f"import sys; from sidecar.__main__ import {function}; sys.exit({function}(sys.argv[1:]))"
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
            (programs / name).chmod(0o755)
        for name in ("crds", "deploy"):
            (home / name).symlink_to(REPOSITORY / name)
        config = json.loads(cluster.kubeconfig.read_text())
        config["contexts"][0]["context"]["namespace"] = namespace
        (home / "kubeconfig").write_text(json.dumps(config))
        self._environment = os.environ | {
            "HOME": str(home),
            "KUBECONFIG": str(home / "kubeconfig"),
            "PATH": f"{programs}:{cluster.assets}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
        }

    def run(self, line: str, **names: str) -> str:
        """What a line prints, with the names in capitals replaced. A failure is an AssertionError."""
        for name, value in ({"NS": self.namespace} | names).items():
            line = re.sub(rf"\b{name}\b", value, line)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.home,
            env=self._environment,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub(host=API_HOST) as made:
        made.commit("acme/llama-3.1-8b-sql", adapter("sql", base_model_name_or_path=MODEL), "v3")
        yield made


@pytest.fixture
def llama(cluster: ControlPlane, nodes: Nodes, namespace: str, origin: Origin) -> Iterator[Pool]:
    made = Pool(cluster, nodes, namespace, origin, "llama")
    yield made
    made.remove()


def write_deployment(file: Path, hub: Hub) -> None:
    """The sample's Deployment, with where this test's hub is for the agent, which injection leaves as it is."""
    document = yaml.safe_load((DEPLOY / "samples" / "vllm" / "deployment.yaml").read_text())
    agent = {"name": "lora-sidecar", "env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]}
    document["spec"]["template"]["spec"]["initContainers"] = [agent]
    file.write_text(yaml.safe_dump(document))


@pytest.mark.slow
async def test_the_commands_of_the_readme(cluster: ControlPlane, llama: Pool, hub: Hub, tmp_path: Path) -> None:
    shell = Shell(cluster, llama.namespace, tmp_path)
    write_deployment(tmp_path / "vllm.yaml", hub)
    # The hub answers in this thread.
    await asyncio.to_thread(walk, shell, llama)


def walk(shell: Shell, llama: Pool) -> None:
    (crds, base, inject, adapters, look, wait), (status, explain, who, cordon, capacity), (gossip,) = blocks(
        "In a cluster"
    )
    for line in (crds, base, inject):
        assert line.startswith(("kubectl apply", "lora-sidecar inject"))
        shell.run(line)
    llama.until_ready(3)
    shell.run(adapters)
    assert "sql-v3" in shell.run(look)
    assert "condition met" in shell.run(wait)
    first, second = llama.until_loaded("sql-v3", 2)
    assert "sql-v3" in shell.run(status)
    assert first in shell.run(explain)
    assert {first, second} == {line.split()[0] for line in shell.run(who).splitlines()[1:]}
    shell.run(gossip)
    shell.run(capacity, POD=second)
    shell.run(cordon, POD=first)
    wait_until(lambda: len(set(llama.routed("sql-v3")) - {first}) == 2 == len(llama.routed("sql-v3")), "it moved away")
