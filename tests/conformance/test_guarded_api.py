"""What vLLM's API guards with a key, what it answers in dev mode, and without runtime updating: stub and real."""

from __future__ import annotations

import pytest

from tests.conformance.api import Api, assert_error


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_a_key_guards_what_is_below_v1(guarded_api: Api, key: str) -> None:
    guarded_api.key = key
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/load_lora_adapter"),
        ("GET", "/v1/nowhere"),
    ):
        answer = await guarded_api.call(method, path, {"model": "tiny"} if method == "POST" else None)
        assert (answer.status, answer.type, answer.json) == (401, "application/json", {"error": "Unauthorized"}), path


async def test_and_nothing_else(guarded_api: Api) -> None:
    guarded_api.key = ""
    for path in ("/health", "/version", "/metrics", "/server_info?config_format=json"):
        assert (await guarded_api.call("GET", path)).status == 200, path
    assert (await guarded_api.call("POST", "/reset_prefix_cache")).status == 200


async def test_with_the_key(guarded_api: Api) -> None:
    assert (await guarded_api.adapters())["fixed"] == guarded_api.adapter("a6")
    assert len(await guarded_api.tokens("fixed")) == 12
    answer = await guarded_api.call("GET", "/v1/nowhere")
    assert (answer.status, answer.json) == (404, {"detail": "Not Found"})
    taken = await guarded_api.load("fixed", guarded_api.adapter("a1"))
    assert_error(taken, 400, "InvalidUserInput", "The lora adapter 'fixed' has already been loaded.*")


async def test_dev_mode(guarded_api: Api) -> None:
    for query in ("", "?reset_running_requests=true"):
        answer = await guarded_api.call("POST", f"/reset_prefix_cache{query}")
        assert (answer.status, answer.json) == (200, {"success": True})
    answer = await guarded_api.call("GET", "/reset_prefix_cache")
    assert (answer.status, answer.json) == (405, {"detail": "Method Not Allowed"})
    document = (await guarded_api.call("GET", "/server_info?config_format=json")).json
    limits = {"max_lora_rank": 16, "max_loras": 2, "max_cpu_loras": 3, "target_modules": None}
    assert limits.items() <= document["vllm_config"]["lora_config"].items()
    assert document["vllm_config"]["model_config"]["model"] == str(guarded_api.folder / "model")
    text = (await guarded_api.call("GET", "/server_info")).json["vllm_config"]
    assert "max_lora" not in text


async def test_without_runtime_updating(static_api: Api) -> None:
    path = static_api.adapter("a1")
    for answer in (
        await static_api.load("a", path),
        await static_api.unload("a"),
        await static_api.load("fixed", path),
    ):
        assert (answer.status, answer.type, answer.json) == (404, "application/json", {"detail": "Not Found"})
    assert await static_api.adapters() == {"fixed": static_api.adapter("a6")}
    for path in ("/reset_prefix_cache", "/server_info"):
        assert (await static_api.call("GET", path)).status == 404
