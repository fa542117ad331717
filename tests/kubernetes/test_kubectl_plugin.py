"""`kubectl lora …` as a person has it: the real kubectl finds the installed program `kubectl-lora` on its PATH."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.manifests import REPOSITORY
from tests.kubernetes.pool import Pool

pytestmark = pytest.mark.slow

Json = dict[str, Any]


@pytest.fixture
def environment(cluster: ControlPlane, tmp_path: Path) -> dict[str, str]:
    """Variables with the plugin on the PATH, as an installer makes it of the project's entry point."""
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["kubectl-lora"].partition(":")
    program = tmp_path / "kubectl-lora"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(tmp_path),
        "KUBECONFIG": str(cluster.kubeconfig),
    }


class Kubectl:
    """kubectl with the plugin, in the pool's namespace."""

    def __init__(self, pool: Pool, environment: dict[str, str]) -> None:
        self._program = str(pool.cluster.assets / "kubectl")
        self._namespace, self._environment = pool.namespace, environment

    def _words(self, *words: str) -> list[str]:
        return [self._program, "lora", *words, "-n", self._namespace]

    def run(self, *words: str, code: int = 0) -> str:
        """What `kubectl lora …` prints; its errors too where a failure is expected."""
        done = subprocess.run(
            self._words(*words), capture_output=True, text=True, timeout=60, env=self._environment, check=False
        )
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout + (done.stderr if code else "")

    def lines(self, *words: str) -> Generator[str, None, None]:
        """The lines of a command that ends when the reader does, or after a minute."""
        process = subprocess.Popen(self._words(*words), stdout=subprocess.PIPE, text=True, env=self._environment)
        assert process.stdout is not None
        end = threading.Timer(60, process.kill)
        end.start()
        try:
            yield from process.stdout
        finally:
            end.cancel()
            process.kill()
            process.wait(timeout=30)
            process.stdout.close()


def test_what_people_ask_a_pool(pool: Pool, environment: dict[str, str]) -> None:
    pool.install(2)
    pool.apply("all", servedName="Org/All.v1")
    pool.apply("one", distribution={"strategy": "fixed", "replicas": 1})
    pool.until_loaded("all", 2)
    (holder,) = pool.placed("one", 1)
    names = [pod["metadata"]["name"] for pod in pool.pods()]
    kubectl = Kubectl(pool, environment)

    rows = {line.split()[0]: line.split()[1:] for line in kubectl.run("status").splitlines() if line.strip()}
    assert rows["all"] == ["2/2", "Loaded", "Loaded"]
    assert rows["one"][0] == "1/1"
    assert sorted(rows["one"][1:]) == ["-", "Loaded"]

    document: Json = json.loads(kubectl.run("status", "-o", "json"))
    assert document == yaml.safe_load(kubectl.run("status", "-o", "yaml"))
    assert document["namespace"] == pool.namespace
    assert [pod["name"] for pod in document["pods"]] == names
    shown = {pod["name"]: pod["adapters"] for pod in document["pods"]}
    assert {name for name, adapters in shown.items() if "one" in adapters} == {holder}
    assert all(adapters["all"]["state"] == "Loaded" and adapters["all"]["routed"] for adapters in shown.values())
    assert document["pods"][0]["adapters"]["all"]["servedName"] == "Org/All.v1"

    wide = kubectl.run("status", "-o", "wide")
    assert all(name in wide for name in names)
    assert "Org/All.v1" in wide

    explained = kubectl.run("explain", "one")
    ranked = [line.split()[:2] for line in explained.splitlines() if line[:1].isdigit()]
    assert ranked[0] == ["0", holder]
    assert {name for _, name in ranked} <= set(names)
    # By what clients send, too; and JSON for programs.
    assert json.loads(kubectl.run("explain", "Org/All.v1", "-o", "json"))["adapter"] == f"{pool.namespace}/all"
    assert "among the 2 known: " in kubectl.run("explain", "none-such", code=1)


def test_it_follows_what_changes(pool: Pool, environment: dict[str, str]) -> None:
    pool.install(1)
    pool.apply("first")
    (name,) = pool.until_loaded("first", 1)
    lines = Kubectl(pool, environment).lines("status", "-w", "-o", "wide")
    assert any(line.split()[:1] == ["first"] and "Loaded" in line for line in lines)
    pool.apply("second")
    assert any(line.split()[:1] == ["second"] and "Loaded" in line for line in lines)
    pool.cluster.kubectl("annotate", "-n", pool.namespace, f"pod/{name}", "lora-sidecar.io/cordon=true")
    assert any(line.split()[:1] == [name] and "cordoned" in line for line in lines)
    lines.close()
