"""What people ask a pool from their own machine, and what it says before it may do anything."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY, REPOSITORY
from tests.kubernetes.pool import Pool

pytestmark = pytest.mark.slow


def test_explain_asks_an_agent_through_the_api_server(pool: Pool, cluster: ControlPlane) -> None:
    pool.install(2)
    pool.apply("one", distribution={"strategy": "fixed", "replicas": 1})
    pod = pool.until_loaded("one", 1)[0]
    program = "import sys; from sidecar.__main__ import kubectl; sys.exit(kubectl(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "explain", "one", "-n", pool.namespace],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("0 ") and pod in line for line in done.stdout.splitlines()), done.stdout


def test_without_the_role_an_agent_lives_says_what_to_apply_and_starts_when_it_is_there(
    pool: Pool, cluster: ControlPlane
) -> None:
    cluster.kubectl("apply", "-n", pool.namespace, "-f", "-", stdin=pool.injected(1))
    wait_until(lambda: [p for p in pool.pods() if p["status"].get("podIP")], "the pod has an address", timeout=60)
    address = pool.pods()[0]["status"]["podIP"]
    problems = wait_until(lambda: _asked(address, "/v1/adapters").get("problems"), "the agent answers", timeout=60)
    assert "kubectl create rolebinding" in json.dumps(problems)
    assert _asked(address, "/healthz")
    assert "rolebinding" in json.dumps(_asked(address, "/readyz"))
    cluster.kubectl("apply", "-n", pool.namespace, "-k", str(DEPLOY / "base"))
    pool.until_ready(1, timeout=60)
    pool.apply("a")
    pool.until_loaded("a", 1)


def _asked(address: str, path: str) -> dict[str, Any]:
    """The agent's answer, whatever its status; {} for none."""
    connection = http.client.HTTPConnection(address, 8790, timeout=5)
    try:
        connection.request("GET", path)
        answer = json.loads(connection.getresponse().read())
    except (OSError, ValueError):
        return {}
    finally:
        connection.close()
    return answer if isinstance(answer, dict) else {"answer": answer}
