"""How many adapters this worker can hold, and of which rank."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.core.vllm_args import VllmArgs
from sidecar.loops.engine_watch import EngineWatch
from sidecar.model import Problem
from sidecar.settings import Settings

# vLLM's own.
DEFAULT_CAPACITY = 1


class Capacity:
    """How many adapters this worker can hold: --capacity, else what the engine was told, else vLLM's default.

    `told` is what the engine's container says, where there is one to read.
    """

    def __init__(self, settings: Settings, watch: EngineWatch, told: VllmArgs | None) -> None:
        self._settings, self._watch, self._told = settings, watch, told

    def __call__(self) -> int:
        if self._settings.capacity:
            return self._settings.capacity
        if self._told is not None and self._told.capacity is not None:
            return self._told.capacity
        limits = self._watch.limits
        return limits.max_cpu_loras if limits else DEFAULT_CAPACITY

    def rank(self) -> int:
        """--max-lora-rank, else the engine's; 0 is unknown."""
        if self._settings.max_lora_rank:
            return self._settings.max_lora_rank
        if self._told is not None and self._told.max_lora_rank is not None:
            return self._told.max_lora_rank
        return self._watch.limits.max_lora_rank if self._watch.limits else 0

    def problems(self) -> Sequence[Problem]:
        """A guessed capacity, said once the engine could have told."""
        told = self._told is not None and self._told.capacity is not None
        if self._settings.capacity or told or self._watch.limits or not self._watch.seen:
            return ()
        return (
            Problem(
                where="capacity",
                message=f"the engine does not tell its --max-cpu-loras; taken as vLLM's default, {DEFAULT_CAPACITY}. "
                "Set --capacity (LORA_SIDECAR_CAPACITY) to its --max-cpu-loras, or --max-loras where that is unset.",
            ),
        )
