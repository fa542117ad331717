"""Injection on plain documents: what is put in, what is refused and why, and that it can be undone and repeated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.injection import InjectionRefused, Options, inject, uninject
from sidecar.core.vllm_args import vllm_args

Json = dict[str, Any]
POOL = "lora-sidecar.io/pool"
UPDATING = {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"}


def engine(*args: str, **more: Any) -> Json:
    return {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["--model=m", "--max-loras=4", *args], **more}


def deployment(container: Json | None = None, name: str = "chat", **spec: Any) -> Json:
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {"containers": [container if container is not None else engine()], **spec},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {"template": template}}


def run(*documents: Json, **options: Any) -> tuple[list[Json], list[str]]:
    outcome = inject([copy.deepcopy(d) for d in documents], Options(image="x/lora-sidecar:1", **options))
    return list(outcome.documents), list(outcome.notes)


def pod(document: Json) -> Json:
    spec: Json = document["spec"]["template"]["spec"]
    return spec


def sidecar(document: Json) -> Json:
    return next(c for c in pod(document)["initContainers"] if c["name"] == "lora-sidecar")


def env(container: Json) -> dict[str, str]:
    return {e["name"]: e.get("value") for e in container.get("env", ())}


def test_everything_that_the_agent_needs_is_put_in() -> None:
    (done, service, binding), _ = run(deployment())
    spec, agent, server = pod(done), sidecar(done), pod(done)["containers"][0]
    assert done["spec"]["template"]["metadata"]["labels"] == {"app": "chat", POOL: "chat-lora"}
    assert agent["restartPolicy"] == "Always"
    assert {p["protocol"] for p in agent["ports"] if p["containerPort"] == 8790} == {"TCP", "UDP"}
    assert {m["mountPath"] for m in agent["volumeMounts"]} >= {"/adapters"}
    assert server["volumeMounts"] == [{"name": "lora-adapters", "mountPath": "/adapters", "readOnly": True}]
    assert server["lifecycle"]["preStop"]["httpGet"] == {"path": "/v1/drained", "port": 8790}
    assert server["env"] == [UPDATING]
    assert vllm_args(server).enable_lora
    assert spec["terminationGracePeriodSeconds"] == 90
    assert service["spec"]["selector"] == {POOL: "chat-lora"}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "default"}]
    assert binding["roleRef"]["name"] == "lora-sidecar"


def test_the_sidecar_comes_after_what_prepares_the_pod() -> None:
    (done, *_), _ = run(deployment(initContainers=[{"name": "fetch", "image": "x"}]))
    assert [c["name"] for c in pod(done)["initContainers"]] == ["fetch", "lora-sidecar"]


def test_namespace_and_account_of_the_pods_are_used() -> None:
    document = deployment(serviceAccountName="runner")
    document["metadata"]["namespace"] = "llm"
    (_, service, binding), _ = run(document)
    assert service["metadata"]["namespace"] == binding["metadata"]["namespace"] == "llm"
    assert binding["metadata"]["name"] == "lora-sidecar-runner"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "runner", "namespace": "llm"}]


def test_a_longer_grace_period_stays() -> None:
    (done, *_), _ = run(deployment(terminationGracePeriodSeconds=600))
    assert pod(done)["terminationGracePeriodSeconds"] == 600


def test_another_port_is_told_to_the_agent() -> None:
    (done, *_), _ = run(deployment(engine("--port", "9000")))
    assert env(sidecar(done))["LORA_SIDECAR_ENGINE_URL"] == "http://127.0.0.1:9000"


def test_another_directory_is_told_to_the_agent() -> None:
    (done, *_), _ = run(deployment(), adapters_dir="/loras")
    assert env(sidecar(done))["LORA_SIDECAR_ADAPTERS_DIR"] == "/loras"
    assert pod(done)["containers"][0]["volumeMounts"][0]["mountPath"] == "/loras"


def test_the_engines_key_comes_from_its_secret() -> None:
    key = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "engine", "key": "token"}}}
    (done, *_), _ = run(deployment(engine(env=[key])))
    path = env(sidecar(done))["LORA_SIDECAR_ENGINE_API_KEY_FILE"]
    mount = next(m for m in sidecar(done)["volumeMounts"] if path.startswith(m["mountPath"] + "/"))
    volume = next(v for v in pod(done)["volumes"] if v["name"] == mount["name"])
    assert volume["secret"] == {"secretName": "engine", "items": [{"key": "token", "path": "key"}]}


def test_a_token_is_mounted_where_pods_get_none() -> None:
    (done, *_), _ = run(deployment(automountServiceAccountToken=False))
    mount = next(m for m in sidecar(done)["volumeMounts"] if m["mountPath"].startswith("/var/run/secrets/"))
    assert any(v["name"] == mount["name"] and "projected" in v for v in pod(done)["volumes"])


def test_an_own_volume_at_the_place_is_used() -> None:
    container = engine(volumeMounts=[{"name": "mine", "mountPath": "/adapters/"}])
    (done, *_), notes = run(deployment(container, volumes=[{"name": "mine", "emptyDir": {}}]))
    assert {"name": "mine", "mountPath": "/adapters"} in sidecar(done)["volumeMounts"]
    assert [v["name"] for v in pod(done)["volumes"]] == ["mine", "lora-sidecar-gossip"]
    assert not [n for n in notes if "warning" in n]


def test_a_shared_volume_is_warned_of() -> None:
    container = engine(volumeMounts=[{"name": "nfs", "mountPath": "/adapters"}])
    _, notes = run(deployment(container, volumes=[{"name": "nfs", "persistentVolumeClaim": {"claimName": "x"}}]))
    assert any("must not be shared by several pods" in n for n in notes)


def test_missing_numbers_are_asked_for_and_given() -> None:
    bare = engine()
    bare["args"] = ["--model=m"]
    _, notes = run(deployment(bare))
    assert any("neither --max-loras nor --max-cpu-loras" in n for n in notes)
    (done, *_), notes = run(deployment(bare), max_cpu_loras=8, max_lora_rank=64)
    said = vllm_args(pod(done)["containers"][0])
    assert (said.capacity, said.max_lora_rank) == (8, 64)
    assert not [n for n in notes if "warning" in n]


def test_data_parallel_ranks_get_one_api_server() -> None:
    (done, *_), _ = run(deployment(engine("--data-parallel-size", "4")))
    said = vllm_args(pod(done)["containers"][0])
    assert (said.api_servers, said.api_servers_given) == (1, True)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (deployment(engine("--api-server-count", "2")), "use --api-server-count 1"),
        (deployment(engine("-asc=2", "-dp=2")), "use --api-server-count 1"),
        (deployment(engine("--headless")), "no API server"),
        (deployment(engine("--no-enable-lora")), "take the flag away"),
        (deployment(engine("--uds", "/s")), "by TCP only"),
        (deployment(engine("--ssl-keyfile", "k")), "plain HTTP inside the pod"),
        (deployment(engine("--grpc")), "no runtime LoRA API"),
        (deployment(engine(ports=[{"containerPort": 8790}])), "port 8790 already"),
        (deployment(engine(lifecycle={"preStop": {"exec": {"command": ["drain.sh"]}}})), "/v1/drained"),
        (deployment(engine("--port=8790")), "--port 8790"),
        (deployment(engine(volumeMounts=[{"name": "a", "mountPath": "/adapters", "subPath": "x"}])), "subPath"),
        (deployment({"name": "web", "image": "nginx"}), "no workload with a vLLM container (found: Deployment)"),
        ({"kind": "CronJob", "metadata": {"name": "x"}, "spec": {}}, "known are Pods, Deployments"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(document: Json, reason: str) -> None:
    before = copy.deepcopy(document)
    with pytest.raises(InjectionRefused, match=reason.replace("(", r"\(").replace(")", r"\)")):
        inject([document], Options(image="x"))
    assert document == before


def test_two_engines_need_a_choice() -> None:
    document = deployment()
    pod(document)["containers"].append(engine() | {"name": "decode"})
    with pytest.raises(InjectionRefused, match=r"vllm, decode\); choose one with --container"):
        run(document)
    (done, *_), _ = run(document, container="decode")
    assert "lifecycle" not in pod(done)["containers"][0]
    assert "lifecycle" in pod(done)["containers"][1]


def test_an_annotation_chooses_as_for_the_policy() -> None:
    document = deployment()
    pod(document)["containers"].append(engine() | {"name": "decode"})
    document["spec"]["template"]["metadata"]["annotations"] = {"lora-sidecar.io/container": "decode"}
    (done, *_), _ = run(document)
    assert ["lifecycle" in container for container in pod(done)["containers"]] == [False, True]


def test_a_container_can_be_named_whose_image_says_nothing() -> None:
    (done, *_), _ = run(deployment({"name": "server", "image": "mine", "args": ["--max-loras=2"]}), container="server")
    assert sidecar(done)["image"] == "x/lora-sidecar:1"


@pytest.mark.parametrize(
    "command", [["sh", "-c", "sleep 5"], ["/bin/sleep", "5"], ["/bin/sh", "-c", "exec /bin/sleep 15"]]
)
def test_a_hook_that_only_sleeps_is_replaced(command: list[str]) -> None:
    (done, *_), notes = run(deployment(engine(lifecycle={"preStop": {"exec": {"command": command}}, "postStart": {}})))
    lifecycle = pod(done)["containers"][0]["lifecycle"]
    assert set(lifecycle) == {"preStop", "postStart"}
    assert "httpGet" in lifecycle["preStop"]
    assert any("in place of the sleep" in n for n in notes)


def test_the_service_of_the_workload_keeps_its_name() -> None:
    taken = {"kind": "Service", "metadata": {"name": "chat"}, "spec": {"selector": {"app": "chat"}}}
    (_, _, service, _), _ = run(taken, deployment())
    assert service["metadata"]["name"] == "chat-lora"
    with pytest.raises(InjectionRefused, match="Service chat is there"):
        run(taken, deployment(), pool="chat")


@pytest.mark.parametrize(
    ("workload", "pool"), [("Chat.v1", "chat-v1-lora"), ("3b", "p3b-lora"), ("x" * 80, "x" * 58 + "-lora")]
)
def test_a_pools_name_is_a_services_name(workload: str, pool: str) -> None:
    (_, service, _), _ = run(deployment(name=workload))
    assert service["metadata"]["name"] == pool
    assert len(pool) <= 63


@pytest.mark.parametrize("pool", ["Chat", "3b", "a.b", "x" * 64, "-a"])
def test_a_pool_that_can_name_no_service_is_refused(pool: str) -> None:
    with pytest.raises(InjectionRefused, match="at most 63 lower-case"):
        run(deployment(), pool=pool)


def test_two_workloads_in_one_pool_share_its_objects() -> None:
    documents, _ = run(deployment(), deployment(name="other"), pool="both")
    assert [d["kind"] for d in documents] == ["Deployment", "Deployment", "Service", "RoleBinding"]


def test_another_version_changes_the_image_and_keeps_what_was_edited() -> None:
    documents, _ = run(deployment())
    agent = sidecar(documents[0])
    agent["resources"] = {"requests": {"memory": "1Gi"}}
    agent["env"].append({"name": "AWS_REGION", "value": "eu-central-1"})
    outcome = inject(documents, Options(image="x/lora-sidecar:2"))
    again = sidecar(outcome.documents[0])
    assert again["image"] == "x/lora-sidecar:2"
    assert again["resources"] == {"requests": {"memory": "1Gi"}}
    assert env(again)["AWS_REGION"] == "eu-central-1"
    assert len(outcome.notes) == 1


def test_a_sidecar_without_record_is_not_taken_out() -> None:
    document = deployment(initContainers=[{"name": "lora-sidecar"}])
    with pytest.raises(InjectionRefused, match="by hand"):
        uninject([document])


def test_uninject_keeps_what_was_added_since() -> None:
    documents, _ = run(deployment())
    server = pod(documents[0])["containers"][0]
    server["args"] += ["--tensor-parallel-size", "4"]
    server["env"].append({"name": "A", "value": "b"})
    (restored,) = uninject(documents).documents
    server = pod(restored)["containers"][0]
    assert server["args"] == ["--model=m", "--max-loras=4", "--tensor-parallel-size", "4"]
    assert server["env"] == [{"name": "A", "value": "b"}]


FLAGS = [
    "--enable-lora",
    "--max-loras=2",
    "--max-cpu-loras=8",
    "--port=9001",
    "--data-parallel-size=2",
    "--max-lora-rank=8",
    "--served-model-name=x",
]
containers = st.builds(
    lambda flags, shell, variables, hook, mount: (
        {"name": "vllm", "image": "vllm/vllm-openai"}
        | (
            {"command": ["sh", "-c", "vllm serve m " + " ".join(flags) + "\n"]}
            if shell
            else {"args": ["--model=m", *flags]}
        )
        | ({"env": [{"name": "A", "value": "1"}] + ([UPDATING] if variables > 1 else [])} if variables else {})
        | ({"lifecycle": {"preStop": {"sleep": {"seconds": 5}}}} if hook else {})
        | ({"volumeMounts": [{"name": "a", "mountPath": "/adapters"}]} if mount else {})
    ),
    st.lists(st.sampled_from(FLAGS), max_size=5),
    st.booleans(),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "terminationGracePeriodSeconds": st.sampled_from([0, 30, 90, 900]),
        "automountServiceAccountToken": st.booleans(),
        "serviceAccountName": st.just("sa"),
        "volumes": st.just([{"name": "a", "emptyDir": {}}]),
        "initContainers": st.just([{"name": "i", "image": "i"}]),
    },
)


@given(container=containers, spec=specs)
def test_injecting_twice_is_once_and_taking_out_is_never(container: Json, spec: Json) -> None:
    before = deployment(container, **spec)
    once, _ = run(before)
    again, notes = run(*once)
    assert again == once
    assert [n for n in notes if "warning" not in n] == []
    assert list(uninject(copy.deepcopy(once)).documents) == [before]


@pytest.mark.parametrize(
    "script",
    [
        "vllm serve m --max-loras 4 && echo done",
        "vllm serve m --max-loras 4 | tee /log",
        "vllm serve m --max-loras 4 # the server",
        "vllm serve m --max-loras 4 &\nwait\n",
        "echo starting; if true; then exec vllm serve m --max-loras=4; fi",
        "python3 -m vllm.entrypoints.openai.api_server --model m --max-loras 4; sleep 60",
        "vllm serve m --max-loras 4 > /log 2>&1",
        "exec vllm serve \\\n  $MODEL \\\n  --max-loras 4; exit 1",
        "vllm serve --max-loras 4 --model m; exit 1",
    ],
)
def test_flags_reach_a_server_after_which_the_script_goes_on(script: str) -> None:
    before = deployment({"name": "vllm", "image": "vllm/vllm-openai", "command": ["sh", "-c", script]})
    done, _ = run(before)
    server = pod(done[0])["containers"][0]
    assert vllm_args(server).enable_lora
    assert server["command"][2].replace(" --enable-lora", "", 1) == script
    assert run(*done)[0] == done
    assert uninject(copy.deepcopy(done)).documents[0] == before


def test_flags_that_cannot_reach_the_server_are_asked_for() -> None:
    script = "vllm serve m --max-loras 4 && echo done"
    with pytest.raises(InjectionRefused, match=r"container vllm does more than to start vLLM.*--max-loras 8"):
        run(deployment({"name": "vllm", "image": "vllm/vllm-openai", "command": ["sh", "-c", script]}), max_loras=8)
