"""Bodies of the stub engine's requests and answers, in vLLM's shapes.

Part of the stub engine (`stub_engine`), which stands in for vLLM in the demo and in tests.
"""

from __future__ import annotations

import json
import time
from typing import Any

from aiohttp import web


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
    """Take away the content type that aiohttp gives every body; an `on_response_prepare` signal."""
    if isinstance(response, Plain):
        response.headers.popall("Content-Type", None)


def card(name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
    """One entry of /v1/models."""
    now = int(time.time())
    permission = {"id": "modelperm-stub", "object": "model_permission", "created": now, "organization": "*"}
    card: dict[str, Any] = {"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": root}
    return card | {"parent": parent, "max_model_len": length, "permission": [permission]}


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
