"""One suite for the stub engine and the real vLLM: same calls, same statuses, same shapes, same words."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.edges.stub_engine import StubEngine, StubOptions
from tests.vllm.model import HIDDEN
from tests.vllm.server import VllmServer

LONG = "All work and no play makes Jack a dull boy. " * 4  # more than one block of the prefix cache


@dataclass
class Answer:
    """What came back; `json` is None where the body isn't JSON."""

    status: int
    type: str | None
    body: bytes
    json: Any


@dataclass
class Api:
    """A server of the API, and the adapters that it can see."""

    session: aiohttp.ClientSession
    url: str
    folder: Path

    def adapter(self, name: str) -> str:
        return str(self.folder / "adapters" / name)

    def broken(self, kind: str) -> str:
        return str(self.folder / "broken" / kind)

    async def call(
        self, method: str, path: str, body: object = None, raw: bytes | None = None, **headers: str
    ) -> Answer:
        if raw is None and body is not None:
            raw, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        skip = () if "Content-Type" in headers else ("Content-Type",)
        request = self.session.request(
            method, f"{self.url}{path}", data=raw, headers=headers, skip_auto_headers=skip, allow_redirects=False
        )
        async with request as response:
            content = await response.read()
            try:
                document = json.loads(content)
            except ValueError:
                document = None
            return Answer(response.status, response.headers.get("Content-Type"), content, document)

    async def load(self, name: str, path: str, **more: object) -> Answer:
        return await self.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})

    async def unload(self, name: str) -> Answer:
        return await self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def complete(self, model: str, prompt: str = "hello", count: int = 12) -> Answer:
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
        return await self.call("POST", "/v1/completions", body)

    async def tokens(self, model: str, prompt: str = "hello", count: int = 12) -> list[int]:
        answer = await self.complete(model, prompt, count)
        assert answer.status == 200, answer.body
        return list(answer.json["choices"][0]["token_ids"])

    async def adapters(self) -> dict[str, str]:
        cards = (await self.call("GET", "/v1/models")).json["data"]
        return {card["id"]: card["root"] for card in cards if card["parent"] is not None}


@pytest.fixture(params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
async def api(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Api]:
    """Both servers, started the same way; each test finds no adapter loaded."""
    async with aiohttp.ClientSession() as session:
        if request.param == "stub":
            async with StubEngine(_like_the_real_one(tiny)) as stub:
                yield Api(session, stub.url, tiny)
            return
        server: VllmServer = request.getfixturevalue("vllm")
        api = Api(session, server.url, tiny)
        try:
            yield api
        finally:
            for name in await api.adapters():
                await api.unload(name)


def _like_the_real_one(tiny: Path) -> StubOptions:
    return StubOptions(
        model=str(tiny / "model"),
        served_names=("tiny", "alias"),
        max_loras=2,
        max_cpu_loras=3,
        max_lora_rank=16,
        hidden_size=HIDDEN,
    )


def assert_error(answer: Answer, status: int, kind: str, message: str, param: str | None = None) -> None:
    """`message` is a regular expression for all of it; `<path>` stands for what vLLM puts in place of paths."""
    assert answer.status == status, answer.body
    assert answer.type == "application/json" or answer.type.startswith("application/json;")
    assert set(answer.json) == {"error"}
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    assert re.fullmatch(message, error["message"], re.DOTALL), error["message"]


def assert_success(answer: Answer, text: str) -> None:
    assert (answer.status, answer.type, answer.body.decode()) == (200, None, text)


async def test_what_is_served_at_rest(api: Api) -> None:
    health = await api.call("GET", "/health")
    assert (health.status, health.body) == (200, b"")
    assert (await api.call("GET", "/version")).json == {"version": "0.32.0"}
    models = (await api.call("GET", "/v1/models")).json
    assert models["object"] == "list"
    assert [(card["id"], card["root"], card["parent"]) for card in models["data"]] == [
        ("tiny", api.adapter("../model").replace("/adapters/..", ""), None),
        ("alias", api.adapter("../model").replace("/adapters/..", ""), None),
    ]
    for card in models["data"]:
        assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"} <= set(card)
        assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "vllm", 512)


async def test_metrics_before_and_after_a_request(api: Api) -> None:
    await api.load("m1", api.adapter("a1"))
    await api.tokens("m1")
    text = (await api.call("GET", "/metrics")).body.decode()
    assert re.search(r"^process_start_time_seconds 1\.\d+e\+09$|^process_start_time_seconds \d{10}\.\d+$", text, re.M)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens_total"):
        assert re.search(rf'^{name}{{engine="0",model_name="tiny"}} \d+\.0$', text, re.M), name
    series = re.findall(
        r'^vllm:lora_requests_info{max_lora="2",running_lora_adapters="(.*)",waiting_lora_adapters="(.*)"} (\S+)$',
        text,
        re.M,
    )
    assert ("m1", "m1") in [(running, waiting) for running, waiting, _ in series]
    newest = max(series, key=lambda found: float(found[2]))
    assert newest[:2] == ("", "")


async def test_load_serve_unload(api: Api) -> None:
    base = await api.tokens("tiny")
    assert await api.tokens("alias") == base
    assert_success(
        await api.load("org/x:1 @y", api.adapter("a1")), "Success: LoRA adapter 'org/x:1 @y' added successfully."
    )
    assert await api.adapters() == {"org/x:1 @y": api.adapter("a1")}
    assert_success(await api.load("twin", api.adapter("a1")), "Success: LoRA adapter 'twin' added successfully.")
    assert_success(await api.load("a2", api.adapter("a2")), "Success: LoRA adapter 'a2' added successfully.")
    outputs = [await api.tokens(name) for name in ("org/x:1 @y", "twin", "a2", "tiny")]
    assert outputs[0] == outputs[1]
    assert outputs[3] == base
    assert len({str(output) for output in outputs}) == 3
    cards = (await api.call("GET", "/v1/models")).json["data"]
    assert {(card["parent"], card["max_model_len"]) for card in cards if card["id"] == "a2"} == {("tiny", None)}
    assert_success(await api.unload("a2"), "Success: LoRA adapter 'a2' removed successfully.")
    assert_error(await api.unload("a2"), 404, "NotFoundError", "The lora adapter 'a2' cannot be found.")
    message = r"The model `a2` does not exist\. Valid aliases: tiny, alias\."
    assert_error(await api.complete("a2"), 404, "NotFoundError", message, "model")


async def test_a_name_is_loaded_once(api: Api) -> None:
    await api.load("a", api.adapter("a1"))
    first = await api.tokens("a")
    for path in (api.adapter("a1"), api.adapter("a2"), "/nowhere"):
        message = (
            "The lora adapter 'a' has already been loaded. "
            "If you want to load the adapter in place, set 'load_inplace' to True."
        )
        assert_error(await api.load("a", path), 400, "InvalidUserInput", re.escape(message))
    assert await api.tokens("a") == first
    assert await api.adapters() == {"a": api.adapter("a1")}


async def test_what_the_api_refuses_by_itself(api: Api) -> None:
    taken = "The lora adapter '{}' conflicts with a served base model."
    for name in ("tiny", "alias"):
        assert_error(await api.load(name, api.adapter("a1")), 400, "InvalidUserInput", taken.format(name))
        assert_error(await api.unload(name), 404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
    both = "Both 'lora_name' and 'lora_path' must be provided."
    assert_error(await api.load("", api.adapter("a1")), 400, "InvalidUserInput", both)
    assert_error(await api.load("a", ""), 400, "InvalidUserInput", both)
    needed = "'lora_name' needs to be provided to unload a LoRA adapter."
    assert_error(await api.unload(""), 400, "InvalidUserInput", needed)


@pytest.mark.parametrize(
    ("raw", "content_type", "param"),
    [
        (b'{"lora_name":"a"}', "application/json", "body.lora_path"),
        (b'{"lora_name":"a","lora_path":5}', "application/json", "body.lora_path"),
        (b"no json", "application/json", "body.0"),
        (b'{"lora_name":"a","lora_path":"/x"}', "text/plain", None),
        (b'{"lora_name":"a","lora_path":"/x"}', "", None),
    ],
)
async def test_bodies_that_are_no_request(api: Api, raw: bytes, content_type: str, param: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    answer = await api.call("POST", "/v1/load_lora_adapter", raw=raw, **headers)
    assert_error(answer, 400, "Bad Request", "1 validation error:\n.*", param)


async def test_other_routes(api: Api) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = await api.call("GET", path)
        assert (answer.status, answer.json) == (405, {"detail": "Method Not Allowed"})
    for method, path in (("GET", "/nowhere"), ("POST", "/reset_prefix_cache"), ("GET", "/server_info")):
        answer = await api.call(method, path)
        assert (answer.status, answer.json) == (404, {"detail": "Not Found"})


WRAPPED = (
    "Call to add_lora method failed: Worker failed with error '{}', "
    "please check the stack trace above for the root cause"
)
# Broken adapter -> the message inside, as a regular expression; None: loaded all the same.
BROKEN = {
    "config-not-json": "Unterminated string starting at: line 1 column 10 (char 9)",
    "config-no-r": "Missing required configuration fields: {'r'}",
    "weights-missing": "<path> doesn't contain tensors",
    "weights-truncated": "Error while deserializing header: incomplete metadata, file not fully covered",
    "weights-garbage": "Error while deserializing header: header too large",
    "weights-empty": "Error while deserializing header: header too small",
    "rank-too-high": "LoRA rank 32 is greater than max_lora_rank 16.",
    "wrong-hidden": "The size of tensor a (64) must match the size of tensor b (128) at non-singleton dimension 1",
    "dora": "vLLM does not yet support DoRA.",
    "weights-flipped": None,
    "rank-mismatch": None,
    "wrong-base": None,
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_adapter_is_refused_in_these_words(api: Api, kind: str) -> None:
    await api.load("good", api.adapter("a1"))
    before = await api.tokens("good")
    answer = await api.load(kind, api.broken(kind))
    reason = BROKEN[kind]
    if reason is None:
        assert answer.status == 200
    else:
        assert_error(answer, 500, "InternalServerError", re.escape(WRAPPED.format(reason)))
        assert await api.adapters() == {"good": api.adapter("a1")}
    assert await api.tokens("good") == before


async def test_wrong_modules_are_named(api: Api) -> None:
    answer = await api.load("a", api.broken("wrong-modules"))
    modules = r"expected target modules in \{.*'q_proj'.*\} but received \[.*nonesuch_proj.*\]"
    reason = rf"While loading <path>, {modules}\. Please verify .*"
    assert_error(answer, 500, "InternalServerError", WRAPPED.format(reason))


@pytest.mark.parametrize("kind", ["empty-dir", "config-missing", "not-there-at-all"])
async def test_where_there_is_no_adapter(api: Api, kind: str) -> None:
    answer = await api.load("a", api.broken(kind))
    assert_error(answer, 404, "NotFoundError", "Loading lora a failed: No adapter found for <path>")


async def test_a_path_that_is_a_file(api: Api) -> None:
    answer = await api.load("a", api.adapter("a1/adapter_config.json"))
    assert_error(answer, 500, "InternalServerError", r".*\[Errno 20\] Not a directory.*")


async def test_eight_loads_of_one_name_at_once(api: Api) -> None:
    answers = await asyncio.gather(*(api.load("a", api.adapter("a1")) for _ in range(8)))
    assert sorted(answer.status for answer in answers) == [200] + [400] * 7
    assert await api.adapters() == {"a": api.adapter("a1")}


async def test_more_adapters_than_fit_are_all_listed_and_all_answer(api: Api) -> None:
    names = [f"a{number}" for number in range(1, 7)]
    answers = await asyncio.gather(*(api.load(name, api.adapter(name)) for name in names))
    assert {answer.status for answer in answers} == {200}
    assert await api.adapters() == {name: api.adapter(name) for name in names}
    alone = [await api.tokens(name) for name in names]
    assert len({str(output) for output in alone}) == 6
    assert await asyncio.gather(*(api.tokens(name) for name in names)) == alone


async def test_load_inplace_moves_a_name_to_another_path(api: Api) -> None:
    await api.load("b", api.adapter("a2"))
    await api.load("a", api.adapter("a1"))
    assert (await api.load("a", api.adapter("a2"), load_inplace=True)).status == 200
    assert (await api.adapters())["a"] == api.adapter("a2")
    assert await api.tokens("a") == await api.tokens("b")


async def test_a_new_path_under_an_old_name_meets_no_cached_block_of_the_old(api: Api) -> None:
    await api.load("right", api.adapter("a2"))
    expected = await api.tokens("right", LONG)
    await api.load("a", api.adapter("a1"))
    old = await api.tokens("a", LONG)
    assert await api.tokens("a", LONG) == old  # from the cache
    await api.unload("a")
    await api.load("a", api.adapter("a2"))
    assert await api.tokens("a", LONG) == expected != old


async def test_the_shape_of_a_completion(api: Api) -> None:
    document = (await api.complete("tiny", "hello", 4)).json
    assert {"id", "object", "created", "model", "choices", "usage"} <= set(document)
    assert (document["object"], document["model"]) == ("text_completion", "tiny")
    choice = document["choices"][0]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert choice["prompt_token_ids"] == [3 + byte for byte in b"hello"]
    assert len(choice["token_ids"]) == 4
    usage = {key: document["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
