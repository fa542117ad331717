"""What can be seen of the pool from outside: the engines' /v1/models, and what each agent says about itself."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from sidecar.cli.demo_plan import Item
from sidecar.cli.demo_pool import Worker
from sidecar.model import Entry, Record, State

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# A real engine on a busy CPU takes many seconds for its first answer.
_ANSWER_TIMEOUT = aiohttp.ClientTimeout(total=60.0)
_PROMPT = "The quick brown fox"
_decoder = msgspec.json.Decoder(Record)


class NoAnswer(Exception):
    """A request that failed; the text is short and for people. `status` is HTTP's, 0 if it didn't come to that."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """What a model said: the text, and the logarithms of its tokens' probabilities where the engine tells them."""

    text: str
    logprobs: tuple[float, ...] = ()

    def differs(self, other: Answer) -> bool:
        """Whether another model said it. Engines round differently from batch to batch, so not by equality."""
        if self.text != other.text or len(self.logprobs) != len(other.logprobs):
            return True
        return any(abs(a - b) > 0.01 for a, b in zip(self.logprobs, other.logprobs, strict=True))


@dataclass(frozen=True)
class Seen:
    """One worker at one moment. `record` None: its agent doesn't answer; `served` None: its engine doesn't.

    `served` is name -> root of what the engine serves from the demo's directory.
    """

    record: Record | None = None
    served: Mapping[str, str] | None = None

    def entry(self, item: Item) -> Entry | None:
        """What the agent says about an adapter."""
        entries = self.record.entries if self.record else ()
        return next((e for e in entries if e.adapter == item.key), None)

    def says_loaded(self, item: Item) -> bool:
        """Whether clients are told to send the adapter's requests here."""
        entry = self.entry(item)
        return entry is not None and entry.state is State.LOADED

    def serves(self, item: Item) -> bool:
        """Whether the engine lists the adapter."""
        return self.served is not None and item.served_name in self.served


@dataclass(frozen=True)
class Snapshot:
    """The present workers at one moment, by name. `began` is when the first was asked (monotonic)."""

    seen: Mapping[str, Seen] = field(default_factory=dict)
    began: float = 0.0

    def of(self, worker: Worker) -> Seen:
        """That worker, or one that nothing is known of."""
        return self.seen.get(worker.name, Seen())

    def holders(self, item: Item) -> frozenset[str]:
        """Workers whose engines list the adapter."""
        return frozenset(name for name, seen in self.seen.items() if seen.serves(item))

    def told(self, item: Item) -> list[str]:
        """Workers whose agents say Loaded, sorted."""
        return sorted(name for name, seen in self.seen.items() if seen.says_loaded(item))


class Eyes:
    """Asks agents and engines, over HTTP and nothing else."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def look(self, workers: Sequence[Worker]) -> Snapshot:
        """All of them at once."""
        began = time.monotonic()
        found = await asyncio.gather(*(self._see(worker) for worker in workers))
        return Snapshot({worker.name: seen for worker, seen in zip(workers, found, strict=True)}, began)

    async def ready(self, worker: Worker) -> str:
        """ "" if the agent's /readyz says 200, else why not."""
        try:
            answer = await self._json(f"http://{worker.address}/readyz", any_status=True)
        except NoAnswer as error:
            return str(error)
        return "" if answer.get("ready") is True else "; ".join(map(str, answer.get("reasons", ["not ready"])))

    async def received(self, worker: Worker) -> tuple[int, int]:
        """Fetches made, and bytes received from origins and peers, since the agent's start. Raises NoAnswer."""
        text = await self._text(f"http://{worker.address}/metrics")
        fetches = _total(text, r'lora_sidecar_fetches_total\{result="[a-z_]+"\}')
        return fetches, _total(text, r'lora_sidecar_received_bytes_total\{source="(?:origin|peer)"\}')

    async def base_model(self, engine_url: str) -> str:
        """The name of the model that an engine serves. Raises NoAnswer."""
        listed = await self._json(f"{engine_url}/v1/models")
        for card in listed.get("data", []):
            if isinstance(card, dict) and not card.get("parent") and card.get("id"):
                return str(card["id"])
        raise NoAnswer(f"{engine_url}/v1/models names no base model")

    async def complete(self, engine_url: str, model: str) -> Answer:
        """A short greedy completion. Raises NoAnswer."""
        body = {"model": model, "prompt": _PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1}
        answer = await self._json(f"{engine_url}/v1/completions", body, timeout=_ANSWER_TIMEOUT)
        try:
            choice = answer["choices"][0]
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
            return Answer(str(choice["text"]), tuple(float(p) for p in logprobs if p is not None))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise NoAnswer(f"{engine_url} gives no completion but {json.dumps(answer)[:200]}") from error

    async def unload(self, engine_url: str, name: str) -> None:
        """Take an adapter from an engine behind its agent's back. Raises NoAnswer."""
        await self._text(f"{engine_url}/v1/unload_lora_adapter", {"lora_name": name})

    async def _see(self, worker: Worker) -> Seen:
        record, served = await asyncio.gather(self._record(worker), self._served(worker))
        return Seen(record, served)

    async def _record(self, worker: Worker) -> Record | None:
        try:
            return _decoder.decode(await self._text(f"http://{worker.address}/v1/record"))
        except (NoAnswer, msgspec.DecodeError):
            return None

    async def _served(self, worker: Worker) -> Mapping[str, str] | None:
        try:
            listed = await self._json(f"{worker.engine_url}/v1/models")
        except NoAnswer:
            return None
        cards = [card for card in listed.get("data", []) if isinstance(card, dict) and card.get("parent")]
        mine = str(worker.adapters_dir)
        return {str(c.get("id")): str(c.get("root")) for c in cards if str(c.get("root")).startswith(mine)}

    async def _json(
        self,
        url: str,
        body: object | None = None,
        *,
        timeout: aiohttp.ClientTimeout = _TIMEOUT,
        any_status: bool = False,
    ) -> dict[str, Any]:
        text = await self._text(url, body, timeout=timeout, any_status=any_status)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise NoAnswer(f"{url} answers no JSON") from error
        if not isinstance(answer, dict):
            raise NoAnswer(f"{url} answers no object")
        return answer

    async def _text(
        self,
        url: str,
        body: object | None = None,
        *,
        timeout: aiohttp.ClientTimeout = _TIMEOUT,
        any_status: bool = False,
    ) -> str:
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as response:
                text = await response.text(errors="replace")
        except TimeoutError as error:
            raise NoAnswer(f"{url} does not answer within {timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"{url} can't be reached: {error}") from error
        if response.status != 200 and not any_status:
            raise NoAnswer(f"{url} answers {response.status}: {text[:200]}", response.status)
        return text


def _total(text: str, series: str) -> int:
    return int(sum(float(value) for value in re.findall(rf"(?m)^{series} (\S+)$", text)))
