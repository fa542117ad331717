"""The three ways to inject make the same pod, and the label alone is enough on a real API server."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from sidecar import __version__
from sidecar.core.injection import Options, inject
from sidecar.core.injection_parts import IMAGE
from sidecar.core.vllm_args import vllm_args
from tests.kubernetes.controlplane import ApiError, ControlPlane
from tests.kubernetes.manifests import DEPLOY, POOL, create_pod, pod, rendered

Json = dict[str, Any]
PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
DRY = "?dryRun=All"


def injected(document: Json, **options: Any) -> list[Json]:
    made = inject([copy.deepcopy(document)], Options(image=f"{IMAGE}:{__version__}", **options))
    return list(made.documents)


def agent_of(spec: Json) -> Json:
    return next(c for c in spec["initContainers"] if c["name"] == "lora-sidecar")


def comparable(spec: Json) -> Json:
    """A pod's spec without the order of lists, the API server's own token and the policy's."""
    spec = copy.deepcopy(spec)
    spec["volumes"] = {v["name"]: v for v in spec["volumes"] if v["name"].partition("-token")[0] != "lora-sidecar"}
    spec["volumes"] = {name: v for name, v in spec["volumes"].items() if not name.startswith("kube-api-access")}
    for container in spec["containers"] + spec["initContainers"]:
        mounts = [m for m in container.get("volumeMounts", ()) if m["mountPath"] != PATH]
        container["volumeMounts"] = sorted(mounts, key=lambda m: str(m["mountPath"]))
        container["env"] = sorted(container.get("env", ()), key=lambda e: str(e["name"]))
    return spec


SECRET = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "engine", "key": "token"}}}
UPDATING = {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"}


def engine(*args: str, **more: Any) -> Json:
    return {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["--model=m", "--max-loras=4", *args], **more}


ENGINES: dict[str, Json] = {
    "plain": engine(),
    "nothing missing": engine("--enable-lora", env=[UPDATING]),
    "another port": engine("--port", "9000"),
    "another port, equals": engine("--port=9000"),
    "api key": engine(env=[SECRET]),
    "other variables": engine(env=[{"name": "A", "value": "b"}]),
    "ranks": engine("--data-parallel-size", "2"),
    "ranks, short": engine("-dp=4", "--enable_lora"),
    "ranks outside": engine("-dp", "4", "-dpe"),
    "command": engine() | {"command": ["vllm", "serve", "m"], "args": ["--max-loras=2"]},
    "command alone": {"name": "vllm", "image": "x/vllm", "command": ["vllm", "serve", "m", "--max-loras=2"]},
    "nothing said": {"name": "vllm", "image": "vllm/vllm-openai@sha256:" + "0" * 64},
    "a hook that sleeps": engine(lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "sleep 10"]}}}),
    "a hook that sleeps natively": engine(lifecycle={"preStop": {"sleep": {"seconds": 10}}}),
    "an own volume": engine(volumeMounts=[{"name": "mine", "mountPath": "/adapters"}]),
    "other mounts": engine(volumeMounts=[{"name": "mine", "mountPath": "/cache"}]),
}


@pytest.mark.parametrize("container", ENGINES.values(), ids=ENGINES.keys())
def test_the_label_alone_makes_what_inject_makes(policies: ControlPlane, namespace: str, container: Json) -> None:
    document = pod("w", containers=[container], volumes=[{"name": "mine", "emptyDir": {}}])
    by_policy = create_pod(policies, namespace, document, DRY)
    by_hand = create_pod(policies, namespace, injected(document)[0], DRY)
    assert comparable(by_policy["spec"]) == comparable(by_hand["spec"])


@pytest.mark.parametrize(
    "spec",
    [
        {"terminationGracePeriodSeconds": 600},
        {"initContainers": [{"name": "fetch", "image": "busybox"}]},
        {"automountServiceAccountToken": False},
        {"containers": [{"name": "logs", "image": "busybox"}, engine()]},
    ],
    ids=["a longer grace", "init containers", "no token", "another container first"],
)
def test_whatever_else_the_pod_has(policies: ControlPlane, namespace: str, spec: Json) -> None:
    document = pod("w", **spec)
    by_policy = create_pod(policies, namespace, document, DRY)
    by_hand = create_pod(policies, namespace, injected(document)[0], DRY)
    assert comparable(by_policy["spec"]) == comparable(by_hand["spec"])


def test_the_sidecar_has_a_token_of_its_own(policies: ControlPlane, namespace: str) -> None:
    made = create_pod(policies, namespace, pod("w", automountServiceAccountToken=False), DRY)
    mount = next(m for m in agent_of(made["spec"])["volumeMounts"] if m["mountPath"] == PATH)
    volume = next(v for v in made["spec"]["volumes"] if v["name"] == mount["name"])
    assert [next(iter(source)) for source in volume["projected"]["sources"]] == [
        "serviceAccountToken",
        "configMap",
        "downwardAPI",
    ]
    assert all(m["mountPath"] != PATH for c in made["spec"]["containers"] for m in c["volumeMounts"])


def test_a_pod_without_the_label_is_left_alone(policies: ControlPlane, namespace: str) -> None:
    assert "initContainers" not in create_pod(policies, namespace, pod("w", None), DRY)["spec"]


def test_an_injected_pod_is_left_alone(policies: ControlPlane, namespace: str) -> None:
    document = injected(pod("w"))[0]
    agent_of(document["spec"])["image"] = "mine/lora-sidecar:dev"
    spec = create_pod(policies, namespace, document, DRY)["spec"]
    assert [c["image"] for c in spec["initContainers"]] == ["mine/lora-sidecar:dev"]


def test_an_annotation_names_the_engine(policies: ControlPlane, namespace: str) -> None:
    containers = [engine() | {"name": "prefill"}, {"name": "server", "image": "mine", "args": ["--max-loras=2"]}]
    document = pod("w", containers=containers)
    document["metadata"]["annotations"] = {"lora-sidecar.io/container": "server"}
    prefill, server = create_pod(policies, namespace, document, DRY)["spec"]["containers"]
    assert "lifecycle" not in prefill
    assert server["args"] == ["--max-loras=2", "--enable-lora"]


def test_a_shells_script_is_left_to_its_author(policies: ControlPlane, namespace: str) -> None:
    script = {"name": "vllm", "image": "x/vllm", "command": ["sh", "-c", "vllm serve m --max-loras 2"]}
    made = create_pod(policies, namespace, pod("w", containers=[script]), DRY)["spec"]["containers"][0]
    assert made["command"] == script["command"]
    assert "args" not in made


def test_a_hook_of_the_engines_own_stays(policies: ControlPlane, namespace: str) -> None:
    hook = {"exec": {"command": ["drain.sh"]}}
    document = pod("w", containers=[engine(lifecycle={"preStop": hook})])
    made = create_pod(policies, namespace, document, DRY)["spec"]["containers"][0]
    assert made["lifecycle"]["preStop"] == hook


@pytest.mark.parametrize(
    ("containers", "reason"),
    [
        ([{"name": "web", "image": "nginx"}], "lora-sidecar.io/container"),
        ([{"name": "router", "image": "example.com/x/vllm-router:1"}], "not exactly one container"),
        ([engine(), engine() | {"name": "decode"}], "not exactly one container"),
        ([engine("--api-server-count", "2")], "use --api-server-count 1"),
        ([engine("--api_server_count=16")], "use --api-server-count 1"),
    ],
)
def test_a_pod_that_cannot_have_it_is_refused_with_the_reason(
    policies: ControlPlane, namespace: str, containers: list[Json], reason: str
) -> None:
    with pytest.raises(ApiError, match=reason):
        create_pod(policies, namespace, pod("w", containers=containers), DRY)


def test_a_deployment_needs_the_label_and_nothing_else(policies: ControlPlane, namespace: str) -> None:
    template = {"metadata": {"labels": {"app": "x", POOL: "p"}}, "spec": pod("w")["spec"]}
    spec = {"selector": {"matchLabels": {"app": "x"}}, "template": template}
    document = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": spec}
    policies.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(document))
    get = ("get", "pods", "-n", namespace, "-l", f"{POOL}=p", "-o")
    policies.kubectl("wait", "-n", namespace, "--for=create", "pod", "-l", f"{POOL}=p", "--timeout=30s")
    assert policies.kubectl(*get, "jsonpath={.items[0].spec.initContainers[*].name}") == "lora-sidecar"


def test_the_component_makes_what_inject_makes(cluster: ControlPlane, namespace: str) -> None:
    made = rendered(cluster, DEPLOY / "samples" / "vllm")
    workload = next(d for d in made if d["kind"] == "Deployment")
    plain = yaml.safe_load((DEPLOY / "samples" / "vllm" / "deployment.yaml").read_text())
    by_hand, service, binding = injected(plain)
    assert comparable(workload["spec"]["template"]["spec"]) == comparable(by_hand["spec"]["template"]["spec"])
    for wanted in (service, binding):
        found = next(
            d for d in made if d["kind"] == wanted["kind"] and d["metadata"]["name"] == wanted["metadata"]["name"]
        )
        assert {k: v for k, v in found.items() if k != "metadata"} == {
            k: v for k, v in wanted.items() if k != "metadata"
        }
    assert vllm_args(workload["spec"]["template"]["spec"]["containers"][0]).capacity == 16
