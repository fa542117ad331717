"""The small kubelet behaves as a real one where our manifests depend on it."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.nodes import Nodes, is_ready

Json = dict[str, Any]
SERVER = "python3 -m http.server 8000 --bind 0.0.0.0 --directory"


def sh(name: str, script: str, **more: Any) -> Json:
    return {"name": name, "image": "busybox", "command": ["sh", "-c", script], **more}


def run(cluster: ControlPlane, namespace: str, name: str, containers: list[Json], **spec: Any) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"terminationGracePeriodSeconds": 5, "containers": containers, **spec},
    }
    cluster.post(f"/api/v1/namespaces/{namespace}/pods", pod)


def pod_of(cluster: ControlPlane, namespace: str, name: str) -> Json:
    return cluster.get(f"/api/v1/namespaces/{namespace}/pods/{name}")


def first_status(cluster: ControlPlane, namespace: str, name: str) -> Json:
    statuses: list[Json] = pod_of(cluster, namespace, name)["status"].get("containerStatuses", [{}])
    return statuses[0]


def until_ready(cluster: ControlPlane, namespace: str, name: str) -> Json:
    wait_until(lambda: is_ready(pod_of(cluster, namespace, name)), f"pod {name} is ready")
    return pod_of(cluster, namespace, name)


def until_gone(cluster: ControlPlane, namespace: str, name: str, timeout: float = 30) -> None:
    wait_until(lambda: not cluster.exists(f"/api/v1/namespaces/{namespace}/pods/{name}"), f"{name} is gone", timeout)


def until_logged(nodes: Nodes, namespace: str, pod: str, container: str, text: str) -> str:
    wait_until(lambda: text in nodes.log(namespace, pod, container), f"{text!r} in the log of {container}")
    return nodes.log(namespace, pod, container)


def test_a_pod_has_an_address_that_answers(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    probe = {"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 1}
    ports = [{"name": "web", "containerPort": 8000}]
    run(cluster, namespace, "web", [sh("c", f"{SERVER} /usr/share", readinessProbe=probe, ports=ports)])
    pod = until_ready(cluster, namespace, "web")
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8000/", timeout=5) as response:
        assert b"doc" in response.read()


def test_two_pods_listen_on_the_same_port_and_reach_each_other(
    cluster: ControlPlane, nodes: Nodes, namespace: str
) -> None:
    for name in ("one", "two"):
        run(cluster, namespace, name, [sh("c", f"mkdir /w; echo {name} > /w/name; {SERVER} /w")])
    one, two = (until_ready(cluster, namespace, name)["status"]["podIP"] for name in ("one", "two"))
    fetch = (
        "import urllib.request as u, time\n"
        "while True:\n"
        " try: print(u.urlopen('http://%s:8000/name').read().decode()); break\n"
        " except OSError: time.sleep(0.1)\n"
    )
    for name, other, address in (("three", "two", two), ("four", "one", one)):
        command = ["python3", "-c", fetch % address]
        run(cluster, namespace, name, [{"name": "c", "image": "x", "command": command}], restartPolicy="Never")
        until_logged(nodes, namespace, name, "c", other)


def test_a_deployment_is_published_with_zones(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    template = {"metadata": {"labels": {"app": "d"}}, "spec": {"containers": [sh("c", "sleep 1000")]}}
    spread = [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "d"}},
        }
    ]
    template["spec"] |= {"topologySpreadConstraints": spread, "terminationGracePeriodSeconds": 0}
    spec = {"replicas": 3, "selector": {"matchLabels": {"app": "d"}}, "template": template}
    cluster.post(f"/apis/apps/v1/namespaces/{namespace}/deployments", {"metadata": {"name": "d"}, "spec": spec})
    service = {"clusterIP": "None", "selector": {"app": "d"}, "ports": [{"port": 8790}]}
    cluster.post(f"/api/v1/namespaces/{namespace}/services", {"metadata": {"name": "d"}, "spec": service})
    cluster.kubectl("rollout", "status", "-n", namespace, "deployment/d", "--timeout=60s")
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io/service-name=d"

    def zones() -> list[str]:
        found = [e for s in cluster.get(path)["items"] for e in s["endpoints"] or () if e["conditions"]["ready"]]
        return sorted(e["zone"] for e in found)

    wait_until(lambda: zones() == ["zone-a", "zone-b", "zone-c"], "three endpoints in three zones")


def test_the_token_is_the_pods_own(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    where = "/var/run/secrets/kubernetes.io/serviceaccount"
    run(cluster, namespace, "t", [sh("c", f"echo token $(cat {where}/token) $(cat {where}/namespace); sleep 1000")])
    pod = until_ready(cluster, namespace, "t")
    line = until_logged(nodes, namespace, "t", "c", "token ")
    _, token, said = line.split()
    assert said == namespace
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
    user = cluster.post("/apis/authentication.k8s.io/v1/tokenreviews", review)["status"]["user"]
    assert user["extra"]["authentication.kubernetes.io/pod-uid"] == [pod["metadata"]["uid"]]
    assert user["extra"]["authentication.kubernetes.io/node-name"] == [pod["spec"]["nodeName"]]


def test_variables_come_from_fields_secrets_and_each_other(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    secret = {"metadata": {"name": "s"}, "stringData": {"k": "hush"}}
    cluster.post(f"/api/v1/namespaces/{namespace}/secrets", secret)
    env = [
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "BOTH", "value": "$(NAME)-$(KEY)"},
    ]
    run(cluster, namespace, "e", [sh("c", "echo got $BOTH $IP $0; sleep 1000", args=["$(KEY)"], env=env)])
    pod = until_ready(cluster, namespace, "e")
    said = until_logged(nodes, namespace, "e", "c", "got ")
    assert said.split() == ["got", "e-hush", pod["status"]["podIP"], "hush"]


def test_a_user_that_is_not_root_writes_to_volumes_only(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    security = {
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
    }
    mounts = [{"name": "v", "mountPath": "/data"}, {"name": "v", "mountPath": "/ro", "readOnly": True}]
    script = "id -u; touch /x || echo refused; touch /data/y && ls /ro; touch /ro/z || echo refused too; sleep 1000"
    run(
        cluster,
        namespace,
        "u",
        [sh("c", script, securityContext=security, volumeMounts=mounts)],
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    said = until_logged(nodes, namespace, "u", "c", "refused too")
    assert [line for line in said.split("\n") if "cannot" not in line][:4] == ["65532", "refused", "y", "refused too"]


def test_containers_of_a_pod_share_volumes_and_loopback_and_nothing_else(
    cluster: ControlPlane, nodes: Nodes, namespace: str
) -> None:
    mounts = [{"name": "v", "mountPath": "/shared"}]
    first = sh("first", f"echo hello > /shared/f; touch /own; {SERVER} /shared", volumeMounts=mounts)
    fetch = (
        "until [ -f /shared/f ]; do sleep 0.1; done; ls /own || echo apart; until python3 -c"
        " \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/f').read())\"; do sleep 0.1; done;"
        " sleep 1000"
    )
    run(
        cluster,
        namespace,
        "s",
        [first, sh("second", fetch, volumeMounts=mounts)],
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    said = until_logged(nodes, namespace, "s", "second", "hello")
    assert "apart" in said


def test_init_containers_and_sidecars_run_in_order(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    started = {"exec": {"command": ["cat", "/v/sidecar-is-up"]}, "periodSeconds": 1, "failureThreshold": 60}
    init = [
        sh("prepare", "echo prepare >> /v/log", **mounts),
        sh(
            "side",
            "echo side >> /v/log; sleep 0.5; touch /v/sidecar-is-up;"
            " trap 'echo side ends >> /v/log; cat /v/log; exit' TERM; while :; do sleep 0.1; done",
            restartPolicy="Always",
            startupProbe=started,
            **mounts,
        ),
    ]
    main = sh(
        "main", "echo main >> /v/log; trap 'echo main ends >> /v/log; exit' TERM; while :; do sleep 0.1; done", **mounts
    )
    run(cluster, namespace, "o", [main], initContainers=init, volumes=[{"name": "v", "emptyDir": {}}])
    pod = until_ready(cluster, namespace, "o")
    assert [c["name"] for c in pod["status"]["initContainerStatuses"]] == ["prepare", "side"]
    cluster.delete(f"/api/v1/namespaces/{namespace}/pods/o")
    until_gone(cluster, namespace, "o")
    assert nodes.log(namespace, "o", "side").split("\n")[:5] == ["prepare", "side", "main", "main ends", "side ends"]


def test_a_killed_container_comes_back_and_is_counted(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    run(cluster, namespace, "k", [sh("c", "sleep 1000 & wait")])
    until_ready(cluster, namespace, "k")
    before = nodes.pid(namespace, "k", "c")
    nodes.kill(namespace, "k", "c")
    wait_until(lambda: nodes.pid(namespace, "k", "c") not in (0, before), "a new process")
    wait_until(lambda: first_status(cluster, namespace, "k")["restartCount"] == 1, "one restart counted")
    assert first_status(cluster, namespace, "k")["lastState"]["terminated"]["exitCode"] == 137


def test_a_failing_liveness_probe_restarts(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    probe = {"exec": {"command": ["test", "!", "-e", "/bad"]}, "periodSeconds": 1, "failureThreshold": 1}
    run(cluster, namespace, "l", [sh("c", "sleep 1; touch /bad; exec sleep 1000", livenessProbe=probe)])
    until_ready(cluster, namespace, "l")
    wait_until(lambda: first_status(cluster, namespace, "l")["restartCount"] > 0, "a restart")


def test_readiness_goes_and_comes(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    probe = {"exec": {"command": ["cat", "/v/ready"]}, "periodSeconds": 1, "failureThreshold": 1}
    mounts = [{"name": "v", "mountPath": "/v"}]
    run(
        cluster,
        namespace,
        "r",
        [sh("c", "sleep 1000", readinessProbe=probe, volumeMounts=mounts)],
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    wait_until(lambda: pod_of(cluster, namespace, "r")["status"].get("phase") == "Running", "it runs")
    assert not is_ready(pod_of(cluster, namespace, "r"))
    marker = nodes.directory / f"{namespace}_r" / "volumes" / "v" / "ready"
    marker.touch()
    until_ready(cluster, namespace, "r")
    marker.unlink()
    wait_until(lambda: not is_ready(pod_of(cluster, namespace, "r")), "not ready again")


def test_the_hook_comes_before_the_signal_and_has_the_grace(
    cluster: ControlPlane, nodes: Nodes, namespace: str
) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "sleep 1; echo hook >> /v/log"]}}}
    script = "trap 'echo signal >> /v/log; cat /v/log; exit' TERM; while :; do sleep 0.1; done"
    run(
        cluster,
        namespace,
        "h",
        [sh("c", script, lifecycle=hook, volumeMounts=[{"name": "v", "mountPath": "/v"}])],
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    until_ready(cluster, namespace, "h")
    cluster.delete(f"/api/v1/namespaces/{namespace}/pods/h")
    assert pod_of(cluster, namespace, "h")["metadata"]["deletionTimestamp"]
    until_gone(cluster, namespace, "h")
    assert nodes.log(namespace, "h", "c").split() == ["hook", "signal"]


def test_who_ignores_the_signal_is_killed(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    run(cluster, namespace, "i", [sh("c", "trap '' TERM; while :; do sleep 1; done")], terminationGracePeriodSeconds=1)
    until_ready(cluster, namespace, "i")
    pid = nodes.pid(namespace, "i", "c")
    cluster.delete(f"/api/v1/namespaces/{namespace}/pods/i")
    until_gone(cluster, namespace, "i", 10)
    assert not alive(pid)


def test_an_optional_secret_that_comes_later_is_mounted(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    mounts = [{"name": "s", "mountPath": "/var/run/it/s", "readOnly": True}]
    script = "while [ ! -f /var/run/it/s/key ]; do sleep 0.1; done; echo $(cat /var/run/it/s/key); sleep 1000"
    volume = {"name": "s", "secret": {"secretName": "late", "optional": True}}
    run(cluster, namespace, "m", [sh("c", script, volumeMounts=mounts)], volumes=[volume])
    until_ready(cluster, namespace, "m")
    cluster.post(
        f"/api/v1/namespaces/{namespace}/secrets", {"metadata": {"name": "late"}, "stringData": {"key": "now"}}
    )
    until_logged(nodes, namespace, "m", "c", "now")


def test_a_missing_secret_keeps_a_pod_waiting(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    env = [{"name": "K", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k"}}}]
    run(cluster, namespace, "w", [sh("c", "sleep 1000", env=env)])

    def waiting() -> str:
        state = first_status(cluster, namespace, "w").get("state", {})
        return str(state.get("waiting", {}).get("reason"))

    wait_until(lambda: waiting() == "CreateContainerConfigError", "the reason shows")


def test_pods_outlive_the_api_server(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    run(cluster, namespace, "out", [sh("c", f"{SERVER} /usr/share")])
    address = until_ready(cluster, namespace, "out")["status"]["podIP"]
    cluster.stop_api_server()
    try:
        nodes.kill(namespace, "out", "c")

        def answers() -> bool:
            try:
                socket.create_connection((address, 8000), timeout=1).close()
            except OSError:
                return False
            return True

        wait_until(answers, "the pod is back without an API server")
    finally:
        cluster.start_api_server()
        cluster.start_controllers()
    wait_until(lambda: first_status(cluster, namespace, "out")["restartCount"] == 1, "it is reported afterwards")


def test_a_dead_node_says_nothing(
    cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory, namespace: str
) -> None:
    own = Nodes(cluster, tmp_path_factory.mktemp("own"), {"node-x": "zone-x"})
    try:
        run(cluster, namespace, "d", [sh("c", "sleep 1000")], nodeName="node-x")
        until_ready(cluster, namespace, "d")
        pid = own.pid(namespace, "d", "c")
        own.kill_node("node-x")
        wait_until(lambda: not alive(pid), "its process is gone")
        assert is_ready(pod_of(cluster, namespace, "d"))
    finally:
        own.stop()
        cluster.delete("/api/v1/nodes/node-x")
        cluster.raw("DELETE", f"/api/v1/namespaces/{namespace}/pods/d", {"gracePeriodSeconds": 0})


def test_nothing_outlives_the_kubelet(
    cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory, namespace: str
) -> None:
    own = Nodes(cluster, tmp_path_factory.mktemp("own"), {"node-y": "zone-y"})
    security = {"runAsUser": 65532, "runAsGroup": 65532}
    containers = [sh("root", "sleep 1000"), sh("user", "exec sleep 1000", securityContext=security)]
    try:
        run(cluster, namespace, "n", containers, nodeName="node-y")
        until_ready(cluster, namespace, "n")
        pids = [own.pid(namespace, "n", name) for name in ("root", "user")]
        assert all(map(alive, pids))
    finally:
        own.stop()
        cluster.delete("/api/v1/nodes/node-y")
        cluster.raw("DELETE", f"/api/v1/namespaces/{namespace}/pods/n", {"gracePeriodSeconds": 0})
    wait_until(lambda: not any(map(alive, pids)), "its processes are gone")


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_image_of_vllm_is_the_stub_engine(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    health = {"httpGet": {"path": "/health", "port": 9000}, "periodSeconds": 1}
    env = [{"name": "VLLM_API_KEY", "value": "k"}, {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"}]
    engine = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["meta/base", "--port=9000", "--enable_lora"],
        "readinessProbe": health,
        "env": env,
    }
    run(cluster, namespace, "v", [engine])
    address = until_ready(cluster, namespace, "v")["status"]["podIP"]
    request = urllib.request.Request(f"http://{address}:9000/v1/models", headers={"Authorization": "Bearer k"})
    with urllib.request.urlopen(request, timeout=5) as response:
        assert b'"meta/base"' in response.read()


def test_vllm_refuses_several_api_servers_as_vllm_does(cluster: ControlPlane, nodes: Nodes, namespace: str) -> None:
    env = [{"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"}]
    command = ["sh", "-c", "vllm serve m --data-parallel-size 2"]
    run(cluster, namespace, "v", [{"name": "vllm", "image": "any", "command": command, "env": env}])
    until_logged(nodes, namespace, "v", "vllm", "cannot be used with api_server_count > 1")
