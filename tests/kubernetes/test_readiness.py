"""When a pod gets traffic for the first time: /readyz, the kubelet's probe, the pod's condition, the EndpointSlice."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY
from tests.kubernetes.nodes import is_ready
from tests.kubernetes.pool import Pool

pytestmark = pytest.mark.slow

Json = dict[str, Any]
LOAD_SECONDS = 4.0
READY_TIMEOUT = 3.0


def readyz(address: str) -> tuple[int, list[str]]:
    """Status and reasons; (0, []) while nobody answers."""
    connection = http.client.HTTPConnection(address, 8790, timeout=5)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        return response.status, list(json.loads(response.read())["reasons"])
    except (OSError, http.client.HTTPException):
        return 0, []
    finally:
        connection.close()


def routed_endpoints(pool: Pool) -> dict[str, bool]:
    """Pod -> ready, in the slices of an ordinary Service in front of the engines."""
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{pool.namespace}/endpointslices"
    found = pool.cluster.get(f"{slices}?labelSelector=kubernetes.io/service-name={pool.name}")["items"]
    endpoints = [endpoint for entry in found for endpoint in entry.get("endpoints") or ()]
    return {e["targetRef"]["name"]: e["conditions"]["ready"] for e in endpoints}


def begin(pool: Pool, replicas: int, stub: str) -> list[Json]:
    """The pool with an ordinary Service, not waited for; its pods as soon as they have addresses."""
    cluster, namespace = pool.cluster, pool.namespace
    cluster.kubectl("apply", "-n", namespace, "-k", str(DEPLOY / "base"))
    service = {"selector": {"app": pool.name}, "ports": [{"port": 8000}]}
    document = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": pool.name}, "spec": service}
    cluster.post(f"/api/v1/namespaces/{namespace}/services", document)
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=pool.injected(replicas, STUB_FLAGS=stub))

    def addressed() -> list[Json]:
        pods = [pod for pod in pool.pods() if pod["status"].get("podIP")]
        return pods if len(pods) == replicas else []

    return list(wait_until(addressed, "the pods have addresses", 60))


def fault(pod: Json, **faults: Any) -> None:
    """Let something go wrong in the pod's engine."""
    url = f"http://{pod['status']['podIP']}:8000/stub/faults"
    request = urllib.request.Request(url, json.dumps(faults).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        response.read()


def all_the_while(pods: list[Json], until: Callable[[], Any], timeout: float = 30.0) -> list[tuple[int, list[str]]]:
    """What every /readyz says until something is true."""
    said: list[tuple[int, list[str]]] = []
    deadline = time.monotonic() + timeout
    while not until():
        assert time.monotonic() < deadline, said[-5:]
        said += [readyz(pod["status"]["podIP"]) for pod in pods]
        time.sleep(0.05)
    return said


def test_it_waits_for_what_was_wanted_first_and_never_turns_back(cluster: ControlPlane, pool: Pool) -> None:
    pool.apply("first")
    pods = begin(pool, 2, f"--load-seconds {LOAD_SECONDS:g}")
    names = [pod["metadata"]["name"] for pod in pods]
    address = pods[0]["status"]["podIP"]
    loading = f"adapter {pool.namespace}/first is Loading"
    wait_until(lambda: readyz(address) == (503, [loading]), "it says what it waits for")
    assert not is_ready(pool.pods()[0])
    wait_until(lambda: routed_endpoints(pool).get(names[0]) is False, "its address is not ready")
    pool.until_ready(2)
    assert all(pool.served(pod, "first") for pod in pods)
    assert [readyz(pod["status"]["podIP"]) for pod in pods] == [(200, [])] * 2
    wait_until(lambda: routed_endpoints(pool) == dict.fromkeys(names, True), "both addresses are ready")

    # An adapter that is added later takes as long to load, and nobody has to wait for it.
    pool.apply("later")
    said = all_the_while(pods, lambda: all(pool.served(pod, "later") for pod in pods))
    assert said
    assert set(map(str, said)) == {str((200, []))}
    assert all(is_ready(pod) for pod in pool.pods())

    # Nor does an agent that starts anew wait for anything, while an engine hangs in a load.
    fault(pods[0], hang_load=["third"])
    pool.apply("third")
    wait_until(lambda: pool.states("third").get(names[0]) == "Loading", "the load has begun")
    before = pool.nodes.pid(pool.namespace, names[0], "lora-sidecar")
    pool.nodes.kill(pool.namespace, names[0], "lora-sidecar")
    answered: list[int] = []

    def enough() -> bool:
        if pool.nodes.pid(pool.namespace, names[0], "lora-sidecar") not in (0, before):
            answered.extend(filter(None, [readyz(address)[0]]))
        return len(answered) >= 20

    wait_until(enough, "the new agent answers")
    assert set(answered) == {200}
    assert not pool.served(pods[0], "third")
    fault(pods[0], hang_load=[])
    pool.until_loaded("third", 2)
    pool.until_ready(2)
    wait_until(lambda: routed_endpoints(pool) == dict.fromkeys(names, True), "both addresses are ready again")


def test_the_timeout_ends_the_wait(pool: Pool) -> None:
    pool.agent_env["LORA_SIDECAR_READY_TIMEOUT"] = f"{READY_TIMEOUT:g}"
    pool.apply("slow")
    (pod,) = begin(pool, 1, "--load-seconds 600")
    address = pod["status"]["podIP"]
    wait_until(lambda: readyz(address) == (503, [f"adapter {pool.namespace}/slow is Loading"]), "it waits", 60)
    began = time.monotonic()
    wait_until(lambda: readyz(address) == (200, []), "it waits no longer")
    assert time.monotonic() - began > READY_TIMEOUT / 3
    pool.until_ready(1)
    wait_until(lambda: list(routed_endpoints(pool).values()) == [True], "its address is ready")
    assert not pool.served(pod, "slow")
