"""What a vLLM container says of itself: every spelling that vLLM, Kubernetes and a shell allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.vllm_args import VllmArgs, find_engines, server_command, vllm_args

IMAGE = "vllm/vllm-openai:v0.32.0"


def container(
    *args: str, command: list[str] | None = None, env: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    made: dict[str, Any] = {"name": "vllm", "image": IMAGE, **more}
    if args:
        made["args"] = list(args)
    if command is not None:
        made["command"] = command
    if env:
        made["env"] = [{"name": name, "value": value} for name, value in env.items()]
    return made


FULL = VllmArgs(
    model="meta/base",
    served_names=("base", "alias"),
    port=9000,
    enable_lora=True,
    max_loras=2,
    max_cpu_loras=8,
    max_lora_rank=64,
)
FLAGS = "--served-model-name base alias --port 9000 --enable-lora --max-loras 2 --max-cpu-loras 8 --max-lora-rank 64"
SAME = {
    "entry point": container("--model", "meta/base", *FLAGS.split()),
    "entry point, positional": container("meta/base", *FLAGS.split()),
    "equals signs": container("--model=meta/base", *FLAGS.replace("d 9", "=9").split()),
    "underscores": container(
        "--model", "meta/base", *FLAGS.replace("max-", "max_").replace("-model-name", "_model_name").split()
    ),
    "serve": container("meta/base", *FLAGS.split(), command=["vllm", "serve"]),
    "one command": container(command=["/usr/local/bin/vllm", "serve", "meta/base", *FLAGS.split()]),
    "module": container(
        "--model", "meta/base", *FLAGS.split(), command=["python3", "-m", "vllm.entrypoints.openai.api_server"]
    ),
    "the last wins": container("--port", "1", "--model", "meta/base", "--max-cpu-loras=4", *FLAGS.split()),
    "variables": container(
        "--model", "$(MODEL)", *FLAGS.replace("9000", "$(PORT)").split(), env={"MODEL": "meta/base", "PORT": "9000"}
    ),
    "shell": container(command=["/bin/sh", "-c", f"exec vllm serve meta/base {FLAGS}"]),
    "shell's args": container(f"vllm serve 'meta/base' {FLAGS}", command=["bash", "-lc"]),
    "shell, continued lines": container(
        "vllm serve meta/base \\\n  " + FLAGS.replace(" --", " \\\n  --") + "\n", command=["/bin/bash", "-euc"]
    ),
    "shell, more commands": container(
        "# start\npip install x; mkdir -p /x &&"
        f" python -m vllm.entrypoints.openai.api_server --model meta/base {FLAGS}",
        command=["sh", "-c"],
    ),
    "shell's variables": container(
        "PORT=9000\nexport M=meta/base\nvllm serve ${M} "
        + FLAGS.replace("9000", "$PORT").replace(" 64", " ${RANK:-64}"),
        command=["sh", "-c"],
    ),
    "shell, words in a variable": container("vllm serve meta/base $FLAGS", command=["sh", "-c"], env={"FLAGS": FLAGS}),
}


@pytest.mark.parametrize("made", SAME.values(), ids=SAME.keys())
def test_every_spelling_says_the_same(made: dict[str, Any]) -> None:
    assert vllm_args(made) == FULL


def test_nothing_said() -> None:
    said = vllm_args({"name": "vllm", "image": IMAGE})
    assert said == VllmArgs()
    assert (said.capacity, said.port, said.enable_lora, said.api_servers) == (None, 8000, None, 1)


@pytest.mark.parametrize(
    ("args", "capacity"),
    [
        ([], None),
        (["--max-loras", "3"], 3),
        (["--max-loras", "3", "--max-cpu-loras", "12"], 12),
        (["--max-loras", "many"], None),
        (["--max-cpu-lora=9"], 9),
        (["--max-lora", "3"], None),
    ],
)
def test_capacity(args: list[str], capacity: int | None) -> None:
    assert vllm_args(container(*args)).capacity == capacity


@pytest.mark.parametrize(
    ("args", "servers", "given"),
    [
        ([], 1, False),
        (["--api-server-count", "4"], 4, True),
        (["-asc", "2"], 2, True),
        (["--api_server_count=1", "-dp", "8"], 1, True),
        (["--data-parallel-size", "8"], 8, False),
        (["--data-parallel-size=8", "--data-parallel-hybrid-lb", "--data-parallel-size-local", "2"], 2, False),
        (["-dp", "8", "-dpn", "3"], 1, False),
        (["-dp", "8", "-dpe"], 1, False),
        (["-dp", "8", "--headless"], 0, False),
    ],
)
def test_api_servers_count_as_vllm_counts_them(args: list[str], servers: int, given: bool) -> None:
    said = vllm_args(container("m", *args))
    assert (said.api_servers, said.api_servers_given) == (servers, given)


@pytest.mark.parametrize(
    ("args", "on"),
    [
        (["--enable-lora"], True),
        (["--no-enable-lora"], False),
        (["--enable_lora=true"], True),
        (["--enable-lora", "False"], False),
    ],
)
def test_a_switch(args: list[str], on: bool) -> None:
    assert vllm_args(container("m", *args)).enable_lora is on


@pytest.mark.parametrize("value", ["$(FROM_SECRET)", "${PORT}", "$PORT", "$(hostname)", "`cat p`"])
def test_what_only_the_container_could_know_is_unresolved(value: str) -> None:
    said = vllm_args(container(f"vllm serve m --port {value} --max-loras 3", command=["sh", "-c"]))
    assert "--port" in said.unresolved
    assert (said.model, said.max_loras) == ("m", 3)


def test_a_config_file_is_named() -> None:
    assert vllm_args(container("m", "--config", "/etc/vllm.yaml")).config_file == "/etc/vllm.yaml"


def secret(name: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": "keys", "key": "api"}}}


@pytest.mark.parametrize(
    ("made", "keys", "place"),
    [
        (container("m", "--api-key", "a"), ("a",), None),
        (container("m", "--api-key", "a", "b", "--port", "1"), ("a", "b"), None),
        (container("m", env={"VLLM_API_KEY": "c"}), ("c",), None),
        (container("m", "--api-key=a", env={"VLLM_API_KEY": "c"}), ("a",), None),
        (container("m", env=None) | {"env": [secret("VLLM_API_KEY")]}, (), ("keys", "api")),
        (container("m", "--api-key", "$(KEY)") | {"env": [secret("KEY")]}, (), ("keys", "api")),
        (
            container("vllm serve m --api-key ${KEY}", command=["sh", "-c"]) | {"env": [secret("KEY")]},
            (),
            ("keys", "api"),
        ),
        (container("m", "--api-key", "$(KEY)"), (), None),
        (container("m"), (), None),
    ],
)
def test_where_the_api_key_is(made: dict[str, Any], keys: tuple[str, ...], place: tuple[str, str] | None) -> None:
    said = vllm_args(made)
    assert (said.api_keys, said.api_key_secret) == (keys, place)


@pytest.mark.parametrize(
    ("made", "on"),
    [
        (container("m"), None),
        (container("m", env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}), True),
        (container("m", env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}), False),
        (container("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve m", command=["sh", "-c"]), True),
        (container("export VLLM_ALLOW_RUNTIME_LORA_UPDATING=true\nvllm serve m", command=["sh", "-c"]), True),
    ],
)
def test_runtime_updating(made: dict[str, Any], on: bool | None) -> None:
    assert vllm_args(made).runtime_updating is on


@pytest.mark.parametrize(
    ("made", "script", "last"),
    [
        (container("m"), None, True),
        (container("vllm serve m", command=["sh", "-c"]), ("args", 0), True),
        (container(command=["sh", "-c", "vllm serve m & wait"]), ("command", 2), False),
        (container(command=["sh", "-c", "exec ./start.sh"]), ("command", 2), False),
        (container("-c", "vllm serve m\n", command=["bash"]), ("args", 1), True),
        (container(command=["bash", "start.sh"]), None, True),
    ],
)
def test_where_the_script_is(made: dict[str, Any], script: tuple[str, int] | None, last: bool) -> None:
    command = server_command(made)
    assert (command.script, command.last) == (script, last)


def test_which_containers_are_engines() -> None:
    curl = {"name": "probe", "image": "curl", "command": ["curl", "http://vllm:8000"], "args": ["--backend=vllm"]}
    router = {"name": "router", "image": "example.com/x/vllm-router:1"}
    by_image = {"name": "a", "image": "registry:5000/me/VLLM-cpu@sha256:00"}
    by_command = {"name": "b", "image": "mine", "command": ["sh", "-c", "vllm serve m"]}
    assert find_engines([curl, router]) == ()
    assert find_engines([curl, by_image, router]) == (1,)
    assert find_engines([by_image, by_command]) == (1,)
    assert find_engines([by_image, by_image]) == (0, 1)


def test_other_servers() -> None:
    said = vllm_args(container("m", "--ssl-keyfile", "/k", "--uds", "/s", "--grpc", "--host", "10.0.0.1"))
    assert (said.tls, said.socket, said.grpc, said.host) == (True, "/s", True, "10.0.0.1")


words = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), max_size=6)


@given(command=words, args=words, script=st.text(max_size=80))
def test_nothing_that_a_person_wrote_is_an_error(command: list[str], args: list[str], script: str) -> None:
    vllm_args({"command": command, "args": args})
    vllm_args({"command": ["sh", "-c", "vllm serve " + script]})


@pytest.mark.parametrize(
    "odd", [{}, {"args": None}, {"args": "text"}, {"env": [None, {}, {"name": "x"}]}, {"args": [1, True]}]
)
def test_odd_shapes_are_not_an_error(odd: dict[str, Any]) -> None:
    assert isinstance(vllm_args(odd), VllmArgs)
