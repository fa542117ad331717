"""A pool while the API server is away, and one agent asked from outside."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY, REPOSITORY
from tests.kubernetes.pool import Pool, complete

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


def test_an_outage_of_the_api_server_unloads_nothing_even_over_a_restart(pool: Pool, cluster: ControlPlane) -> None:
    pool.install(2)
    pool.apply("a")
    names = pool.until_loaded("a", 2)
    addresses = [p["status"]["podIP"] for p in pool.pods()]
    time.sleep(2.0)  # what was seen is saved a second later
    cluster.stop_api_server()
    try:
        pool.nodes.kill(pool.namespace, names[0], "lora-sidecar")
        until = time.monotonic() + 20.0
        while time.monotonic() < until:
            assert [complete(a, "a") for a in addresses] == ["", ""]
            time.sleep(0.2)
    finally:
        cluster.start_api_server()
        cluster.start_controllers()
    assert pool.until_loaded("a", 2, timeout=60) == names
    pool.apply("b")
    pool.until_loaded("b", 2, timeout=60)


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
