"""Bodies of the stub engine's requests and answers, in vLLM's shapes.

Part of the stub engine (`stub_engine`), which stands in for vLLM in the demo and in tests.
"""

from __future__ import annotations

import json
import time
from typing import Any

from aiohttp import web

_HIDDEN = tuple(f"/{name}/" for name in ["home", "usr", "opt", "var", "tmp", "root", "lib", "mnt", "srv"])
_PERMISSION: dict[str, Any] = {
    "id": "modelperm-stub",
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


class ApiError(Exception):
    """An answer in vLLM's shape of errors."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param


class Plain(web.Response):
    """A 200 with text and no content type, which is how vLLM says yes."""

    def __init__(self, text: str) -> None:
        super().__init__(body=text.encode())


async def drop_type(request: web.Request, response: web.StreamResponse) -> None:
    """Take away the content type, or the charset, that aiohttp gives a body; an `on_response_prepare` signal."""
    if isinstance(response, Plain):
        response.headers.popall("Content-Type", None)
    elif response.headers.get("Content-Type", "").startswith("application/json"):
        response.headers["Content-Type"] = "application/json"


def card(name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
    """One entry of /v1/models."""
    now = int(time.time())
    card: dict[str, Any] = {"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": root}
    return card | {"parent": parent, "max_model_len": length, "permission": [_PERMISSION | {"created": now}]}


def completion(model: str, prompt: list[int], tokens: list[int], *, ids: bool) -> dict[str, Any]:
    """The answer to a completion; with `ids` it holds the tokens."""
    text = bytes((token - 3) & 0xFF for token in tokens).decode("utf-8", "replace")
    choice = {"index": 0, "text": text, "finish_reason": "length"}
    choice |= {"token_ids": tokens if ids else None, "prompt_token_ids": prompt if ids else None}
    choice |= dict.fromkeys(("logprobs", "stop_reason", "prompt_logprobs", "routed_experts"))
    usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    usage |= {"total_tokens": len(prompt) + len(tokens)}
    usage |= dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))
    kind = {"id": "cmpl-stub", "object": "text_completion", "created": int(time.time()), "model": model}
    more = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
    return {**kind, "choices": [choice], "usage": usage, "system_fingerprint": "stub", **more}


def shown(path: str) -> str:
    """`path` as vLLM names it in errors: not at all below the usual directories."""
    return "<path>" if path.startswith(_HIDDEN) else path


async def read_json(request: web.Request, *required: str) -> dict[str, Any]:
    """The body as an object that has the required strings. Raises ApiError as vLLM's validation does."""
    if request.content_type != "application/json":
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed", None)
    try:
        body = json.loads(await request.read())
    except ValueError:
        raise _invalid("{'type': 'json_invalid', 'loc': 'body.0', 'msg': 'JSON decode error'}", "body.0") from None
    if not isinstance(body, dict):
        raise _invalid("{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'not a dictionary'}", "body")
    for key in required:
        kind, text = ("string_type", "Input should be a valid string") if key in body else ("missing", "Field required")
        if not isinstance(body.get(key), str):
            raise _invalid(f"{{'type': '{kind}', 'loc': 'body.{key}', 'msg': '{text}'}}", f"body.{key}")
    return body


def _invalid(detail: str, param: str | None) -> ApiError:
    return ApiError(400, "Bad Request", f"1 validation error:\n  {detail}", param)


def token_ids(prompt: str | list[int]) -> list[int]:
    """A byte-level tokenizer with three special tokens; a list of tokens stays what it is."""
    return [3 + byte for byte in prompt.encode()] if isinstance(prompt, str) else [int(token) for token in prompt]


def escaped(value: str) -> str:
    """`value` as a label value in the text format of /metrics."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
