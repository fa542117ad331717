"""One suite for the stub engine and the real vLLM: same calls, same statuses, same shapes, same words."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from tests.conformance.api import LONG, Api, assert_error, assert_success, until_metric
from tests.vllm.model import CONTEXT

CARD = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
PERMISSION = {
    *("id", "object", "created", "organization", "group", "is_blocking", "allow_create_engine", "allow_sampling"),
    *("allow_logprobs", "allow_search_indices", "allow_view", "allow_fine_tuning"),
}
COMPLETION = {
    *("id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint"),
    *("kv_transfer_params", "ec_transfer_params", "metrics"),
}
CHOICE = {
    *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"),
    "routed_experts",
}
USAGE = {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details"}


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
    await api.load("a", api.adapter("a1"))
    *bases, adapter = (await api.call("GET", "/v1/models")).json["data"]
    for card in (*bases, adapter):
        assert set(card) == CARD
        assert [set(permission) for permission in card["permission"]] == [PERMISSION]
        assert (card["object"], card["owned_by"]) == ("model", "vllm")
        assert isinstance(card["created"], int)
    assert {card["max_model_len"] for card in bases} == {CONTEXT}
    assert (adapter["parent"], adapter["max_model_len"]) == ("tiny", None)


async def test_metrics_before_and_after_a_request(api: Api) -> None:
    await api.load("m1", api.adapter("a1"))
    before = (await api.call("GET", "/metrics")).body.decode()
    assert re.search(r"^# TYPE vllm:lora_requests_info gauge$", before, re.M)
    await api.tokens("m1")
    answer = await api.call("GET", "/metrics")
    assert (answer.status, answer.type) == (200, "text/plain; version=1.0.0; charset=utf-8")
    text = answer.body.decode()
    assert re.search(r"^process_start_time_seconds 1\.\d+e\+09$|^process_start_time_seconds \d{10}\.\d+$", text, re.M)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens_total"):
        assert re.search(rf'^{name}{{engine="0",model_name="tiny"}} \d+\.0$', text, re.M), name
    for reason in ("capacity", "deferred"):
        labels = f'engine="0",model_name="tiny",reason="{reason}"'
        assert re.search(rf"^vllm:num_requests_waiting_by_reason{{{labels}}} 0\.0$", text, re.M), reason
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


async def test_paths_are_hidden_only_where_files_usually_lie(api: Api) -> None:
    for path in ("no/such", "/nonesuch/x"):
        assert_error(
            await api.load("a", path), 404, "NotFoundError", f"Loading lora a failed: No adapter found for {path}"
        )


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
    await api.load("a", api.adapter("a1"))
    for model, said in (("tiny", "tiny"), ("alias", "tiny"), ("a", "a")):
        document = (await api.complete(model, "hello", 4)).json
        assert set(document) == COMPLETION
        assert (document["object"], document["model"]) == ("text_completion", said)
        (choice,) = document["choices"]
        assert set(choice) == CHOICE
        assert (choice["index"], choice["finish_reason"]) == (0, "length")
        assert choice["prompt_token_ids"] == [3 + byte for byte in b"hello"]
        assert len(choice["token_ids"]) == 4
        assert set(document["usage"]) == USAGE
        usage = {key: document["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert usage == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


async def test_completions_that_leave_things_out_or_ask_for_too_much(api: Api) -> None:
    answer = await api.call("POST", "/v1/completions", {"prompt": [1], "max_tokens": 1})
    assert (answer.status, answer.json["model"], answer.json["choices"][0]["token_ids"]) == (200, "tiny", None)
    nothing = await api.call("POST", "/v1/completions", {"model": "tiny", "max_tokens": 2})
    message = r"Either prompt or prompt_embeds must be provided and non-empty\. \(parameter=prompt\)"
    assert_error(nothing, 400, "BadRequestError", message, "prompt")
    message = rf"This model's maximum context length is {CONTEXT} tokens\..*"
    assert_error(await api.complete("tiny", "x" * (CONTEXT + 88), 2), 400, "BadRequestError", message, "input_tokens")
    assert len(await api.tokens("tiny", "x" * (CONTEXT - 12), 300)) <= 12


async def test_fields_that_count_for_nothing(api: Api) -> None:
    body = {"lora_name": "a", "lora_path": api.adapter("a1"), "base_model_name": "another", "no_such": 1}
    charset = {"Content-Type": "application/json; charset=utf-8"}
    answer = await api.call("POST", "/v1/load_lora_adapter", raw=json.dumps(body).encode(), **charset)
    assert_success(answer, "Success: LoRA adapter 'a' added successfully.")
    answer = await api.call("POST", "/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 999})
    assert_success(answer, "Success: LoRA adapter 'a' removed successfully.")


async def test_load_inplace_of_what_is_not_there(api: Api) -> None:
    assert (await api.load("a", api.adapter("a1"), load_inplace=True)).status == 200
    before = await api.tokens("a")
    answer = await api.load("a", api.broken("empty-dir"), load_inplace=True)
    assert_error(answer, 404, "NotFoundError", "Loading lora a failed: No adapter found for <path>")
    assert await api.adapters() == {"a": api.adapter("a1")}
    assert await api.tokens("a") == before


async def test_unload_while_a_request_runs(api: Api) -> None:
    await api.load("a", api.adapter("a1"))
    expected = await api.tokens("a", "hi", 600, ignore_eos=True)
    running = asyncio.create_task(api.tokens("a", "hi", 600, ignore_eos=True))
    await until_metric(api, "vllm:num_requests_running", 1)
    assert (await api.unload("a")).status == 200
    assert (await api.complete("a")).status == 404
    assert not running.done()
    assert await running == expected
