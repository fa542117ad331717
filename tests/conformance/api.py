"""A server of vLLM's API, stub or real, and what its answers have to look like."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sidecar.edges.stub_engine import StubOptions
from tests.vllm.model import CONTEXT, HIDDEN

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
    key: str = ""

    def adapter(self, name: str) -> str:
        return str(self.folder / "adapters" / name)

    def broken(self, kind: str) -> str:
        return str(self.folder / "broken" / kind)

    async def call(
        self, method: str, path: str, body: object = None, raw: bytes | None = None, **headers: str
    ) -> Answer:
        if raw is None and body is not None:
            raw, headers = json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        if self.key:
            headers = {"Authorization": f"Bearer {self.key}", **headers}
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

    async def complete(self, model: str, prompt: str = "hello", count: int = 12, **more: object) -> Answer:
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
        return await self.call("POST", "/v1/completions", body | more)

    async def tokens(self, model: str, prompt: str = "hello", count: int = 12, **more: object) -> list[int]:
        answer = await self.complete(model, prompt, count, **more)
        assert answer.status == 200, answer.body
        return list(answer.json["choices"][0]["token_ids"])

    async def adapters(self) -> dict[str, str]:
        cards = (await self.call("GET", "/v1/models")).json["data"]
        return {card["id"]: card["root"] for card in cards if card["parent"] is not None}


def like_the_real_one(tiny: Path, **more: Any) -> StubOptions:
    """Options of the stub that make it what the tests' real servers are."""
    return StubOptions(
        model=str(tiny / "model"),
        served_names=("tiny", "alias"),
        max_loras=2,
        max_cpu_loras=3,
        max_lora_rank=16,
        hidden_size=HIDDEN,
        max_model_len=CONTEXT,
        token_seconds=0.002,
        **more,
    )


def assert_error(answer: Answer, status: int, kind: str, message: str, param: str | None = None) -> None:
    """`message` is a regular expression for all of it; `<path>` stands for what vLLM puts in place of paths."""
    assert answer.status == status, answer.body
    assert answer.type == "application/json"
    assert set(answer.json) == {"error"}
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    assert re.fullmatch(message, error["message"], re.DOTALL), error["message"]


def assert_success(answer: Answer, text: str) -> None:
    assert (answer.status, answer.type, answer.body.decode()) == (200, None, text)


async def until_metric(api: Api, name: str, value: float) -> None:
    """Until the metric, which one engine reports, has this value: it follows the engine's steps."""
    loop = asyncio.get_running_loop()
    end, seen = loop.time() + 30, []
    while loop.time() < end:
        text = (await api.call("GET", "/metrics")).body.decode()
        found = re.search(rf'^{name}{{engine="0",model_name="tiny"}} (\S+)$', text, re.M)
        seen.append((round(loop.time() - end + 30, 2), float(found[1]) if found else None))
        if seen[-1][1] == value:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{name} was never {value:g}, but (after seconds) {seen[:20]} and so on")
