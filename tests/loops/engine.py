"""An engine of which a loop asks next to nothing: a test says what it answers to that."""

from __future__ import annotations

from sidecar.core.metrics_vllm import Traffic
from sidecar.model import EngineView


class UnaskedEngine:
    """Everything that a test doesn't override must not be asked."""

    async def look(self) -> EngineView:
        raise NotImplementedError

    async def load(self, name: str, path: str) -> None:
        raise NotImplementedError

    async def unload(self, name: str) -> None:
        raise NotImplementedError

    async def reset_prefix_cache(self) -> bool:
        raise NotImplementedError

    async def in_flight(self) -> frozenset[str] | None:
        raise NotImplementedError

    async def limits(self) -> None:
        raise NotImplementedError

    async def traffic(self, name: str) -> Traffic:
        raise NotImplementedError
