"""Clients of an engine: completions, and loads that go past the agent."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm.fixtures import KEY

# Longer than two blocks (128 tokens each) of the prefix cache.
LONG = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be " * 3


@dataclass
class Client:
    """Synchronous, one connection a call."""

    url: str

    def post(self, path: str, **body: object) -> tuple[int, Any]:
        """(status, JSON document or text)."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    def complete(self, model: str, prompt: str = "hello", count: int = 12) -> tuple[int, Any]:
        """(200, tokens) or (status, document)."""
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        status, document = self.post("/v1/completions", **body, return_token_ids=True)
        return status, document["choices"][0]["token_ids"] if status == 200 else document

    def tokens(self, model: str, prompt: str = "hello", count: int = 12) -> list[int]:
        """Greedy tokens. Raises AssertionError for anything but 200."""
        status, answer = self.complete(model, prompt, count)
        assert status == 200, answer
        return list(answer)

    def models(self) -> dict[str, str]:
        """Adapters in /v1/models: name -> root."""
        request = urllib.request.Request(f"{self.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            cards = json.load(answer)["data"]
        return {card["id"]: card["root"] for card in cards if card["parent"] is not None}

    def direct(self, path: Path, *prompts: str, count: int = 12) -> list[list[int]]:
        """What the adapter at `path` says when it is loaded past any agent, under a name of its own."""
        name = f"direct-{path.name}"
        assert self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path))[0] == 200
        try:
            return [self.tokens(name, prompt, count) for prompt in prompts]
        finally:
            self.post("/v1/unload_lora_adapter", lora_name=name)


class Asker:
    """Asks one model again and again from a thread, and keeps every different answer."""

    def __init__(self, client: Client, model: str, prompt: str, count: int = 12) -> None:
        self.client, self.model, self.prompt, self.count = client, model, prompt, count
        self.answers: list[tuple[int, object]] = []
        self.asked = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def tokens(self) -> list[object]:
        """Different answers of status 200, in the order of their first appearance."""
        return [answer for status, answer in self.answers if status == 200]

    def statuses(self) -> set[int]:
        """Statuses of all answers."""
        return {status for status, _ in self.answers}

    def _run(self) -> None:
        while not self._ended.is_set():
            answer = self.client.complete(self.model, self.prompt, self.count)
            self.asked += 1
            if answer[0] != 200:
                answer = (answer[0], None)
            if answer not in self.answers:
                self.answers.append(answer)
