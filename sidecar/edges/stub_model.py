"""The inside of the stub engine: adapters in memory, requests, the prefix cache, and tokens that tell weights apart.

Part of the stub engine (`stub_engine`), which stands in for vLLM in the demo and in tests. It behaves as vLLM was seen
to behave: only `max_cpu_loras` adapters stay in memory and the others' files are read again when a request needs them,
an engine whose files are gone by then dies, at most `max_loras` different adapters run at once, an unload only forgets
the name, from 0.12 to 0.30 the prefix cache takes a new adapter for the old one of the same name, and two adapters of
one name that run together end the engine as soon as one of them has lost its slot.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from sidecar.edges.stub_lora import LoraError, read_adapter


@dataclass(frozen=True, kw_only=True)
class StubOptions:
    """How the stub is started; names and defaults are vLLM's where it has them."""

    model: str = "tiny"
    served_names: tuple[str, ...] = ()
    version: str = "0.32.0"
    api_keys: tuple[str, ...] = ()
    max_loras: int = 1
    max_cpu_loras: int | None = None
    max_lora_rank: int = 16
    max_model_len: int = 512
    # name -> path, loaded at the start.
    lora_modules: tuple[tuple[str, str], ...] = ()
    runtime_updating: bool = True
    dev_mode: bool = False
    # Tokens of one block of the prefix cache.
    block_size: int = 128
    # Seconds that one generated token, and one load, takes.
    token_seconds: float = 0.0
    load_seconds: float = 0.0
    # Hidden size of the base model, against which adapters are checked; None doesn't check.
    hidden_size: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the base model in /v1/models."""
        return self.served_names or (self.model,)

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor) of the version."""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A loaded adapter as the API server knows it."""

    name: str
    number: int
    path: str
    inplace: bool = False


class EngineDead(Exception):
    """The engine behind the API server has died; its process ends."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


@dataclass
class StubModel:
    """One engine process: made anew, it has forgotten everything."""

    options: StubOptions
    started: float = field(default_factory=time.time)
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._resident: OrderedDict[int, str] = OrderedDict()
        # The slots: adapters that can run now, the least recently used first. At most `max_loras`.
        self._active: OrderedDict[int, None] = OrderedDict()
        # Adapters with running requests, in the order in which they began.
        self._batch: dict[int, Lora] = {}
        self._running: Counter[int] = Counter()
        self._names: Counter[str] = Counter()
        self._freed = asyncio.Condition()
        self._blocks: dict[str, str] = {}
        self._resets = 0
        self._series: dict[str, float] = {}
        self.running = 0
        self.waiting = 0
        self.prompt_tokens = 0

    def add(self, lora: Lora) -> None:
        """Read an adapter into memory, then put out the least recently used beyond the limit. Raises LoraError."""
        self._resident[lora.number] = read_adapter(lora.path, self.options.max_lora_rank, self.options.hidden_size)
        self._resident.move_to_end(lora.number)
        while len(self._resident) > (self.options.max_cpu_loras or self.options.max_loras):
            self._active.pop(self._resident.popitem(last=False)[0], None)
        self._activate(lora.number)

    def _activate(self, number: int) -> None:
        if number not in self._active and len(self._active) >= self.options.max_loras:
            self._active.popitem(last=False)
        self._active[number] = None
        self._active.move_to_end(number)

    async def _step(self) -> None:
        """Give every running adapter a slot, as vLLM does before each step: of those with one name, only the first."""
        first: dict[str, Lora] = {}
        for lora in self._batch.values():
            first.setdefault(lora.name, lora)
        for lora in first.values():
            await self._weights(lora)
            self._activate(lora.number)
        if not self._batch.keys() <= self._active.keys():
            await self.die()
            raise EngineDead

    def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        """Forget cached blocks; refused while a request holds some, unless those start over, filling it again."""
        if self.running and not preempt:
            return False
        self._resets += 1
        self._blocks.clear()
        return True

    async def die(self) -> None:
        """End the engine: whatever runs or waits fails."""
        self.dead.set()
        async with self._freed:
            self._freed.notify_all()

    async def generate(self, prompt: list[int], lora: Lora | None, count: int) -> list[int]:
        """`count` greedy tokens. Raises EngineDead."""
        number = lora.number if lora else 0
        try:
            self.waiting += 1
            try:
                await self._admit(number)
            finally:
                self.waiting -= 1
            self.running += 1
            self._running[number] += 1
            if lora is not None:
                self._batch.setdefault(number, lora)
            try:
                return await self._decode(prompt, lora, count)
            finally:
                self.running -= 1
                self._running -= Counter([number])
                if number not in self._running:
                    self._batch.pop(number, None)
        finally:
            self._sample()
            async with self._freed:
                self._freed.notify_all()

    def lora_series(self) -> dict[str, float]:
        """The label value of every combination of adapters ever in flight -> when it last was."""
        return dict(self._series)

    async def _admit(self, number: int) -> None:
        """Wait until this adapter may run beside those that do."""
        async with self._freed:
            await self._freed.wait_for(lambda: self.dead.is_set() or self._fits(number))
        if self.dead.is_set():
            raise EngineDead

    def _fits(self, number: int) -> bool:
        others = self._running.keys() - {0, number}
        return number == 0 or len(others) < self.options.max_loras

    async def _decode(self, prompt: list[int], lora: Lora | None, count: int) -> list[int]:
        weights = await self._weights(lora)
        seen, resets = self._prefix(prompt, lora, weights), self._resets
        tokens: list[int] = []
        try:
            for step in range(count):
                await asyncio.sleep(self.options.token_seconds)
                if self.dead.is_set():
                    raise EngineDead
                await self._step()
                if resets != self._resets:
                    seen, resets = self._prefix(prompt, lora, weights), self._resets
                if lora is not None and lora.inplace:
                    weights = await self._weights(lora)
                if not tokens:
                    # An adapter is listed from its request's first token on, not while that waits or is read.
                    self._note(lora, +1)
                    self._sample()
                tokens.append(_token(f"{seen}|{weights}", prompt, step))
        finally:
            if tokens:
                self._note(lora, -1)
        self.prompt_tokens += len(prompt)
        return tokens

    async def _weights(self, lora: Lora | None) -> str:
        if lora is None:
            return f"base {self.options.model}"
        if lora.number not in self._resident or lora.inplace:
            try:
                self.add(lora)
            except LoraError:
                await self.die()
                raise EngineDead from None
        self._resident.move_to_end(lora.number)
        return self._resident[lora.number]

    def _prefix(self, prompt: list[int], lora: Lora | None, weights: str) -> str:
        """Look up and fill the prefix cache; "" unless a block that was computed with other weights is used."""
        key = self._cache_key(lora)
        size = self.options.block_size
        chain, stale, hit = key, "", True
        for end in range(size, len(prompt) + 1, size):
            chain = hashlib.sha256(f"{chain}|{prompt[end - size : end]}".encode()).hexdigest()
            # The last token is always computed, so a block that ends the prompt is not taken from the cache.
            hit = hit and chain in self._blocks and end < len(prompt)
            if not hit:
                self._blocks[chain] = weights
            elif self._blocks[chain] != weights:
                stale = self._blocks[chain]
        return stale

    def _cache_key(self, lora: Lora | None) -> str:
        if lora is None:
            return "base"
        release = self.options.release
        if release < (0, 12):
            return f"number {lora.number}"
        return f"name {lora.name}" if release < (0, 31) else f"name {lora.name} path {lora.path}"

    def _note(self, lora: Lora | None, change: int) -> None:
        if lora is not None:
            self._names[lora.name] += change
            self._names = +self._names

    def _sample(self) -> None:
        self._series[",".join(sorted(self._names))] = time.time()


def _token(weights: str, prompt: list[int], step: int) -> int:
    digest = hashlib.sha256(f"{weights}|{prompt}|{step}".encode()).digest()
    return 3 + digest[0]
