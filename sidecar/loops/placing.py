"""Placement for the reconcile loop: computed anew only when its inputs change, in a thread when it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from sidecar.core.placement import Assignment, place, place_isolated
from sidecar.core.pool import Worker
from sidecar.model import Adapter

T = TypeVar("T")

# Placements up to so many pairs are computed in the event loop, beyond that in a thread (20,000 take about 20 ms).
PAIRS_IN_LOOP = 5_000


class Placer:
    """Remembers the last answer to each question."""

    def __init__(self) -> None:
        self._placed: tuple[object, dict[str, Assignment]] | None = None
        self._hoped: tuple[object, dict[str, Assignment]] | None = None
        self._alone: tuple[object, frozenset[str]] | None = None

    async def place(self, adapters: tuple[Adapter, ...], workers: Sequence[Worker]) -> dict[str, Assignment]:
        """As core.placement.place."""
        inputs = (adapters, tuple(workers))
        if self._placed is None or self._placed[0] != inputs:
            self._placed = (inputs, await _compute(inputs, lambda: place(adapters, workers)))
        return self._placed[1]

    async def hoped(self, adapters: tuple[Adapter, ...], workers: Sequence[Worker], me: str) -> dict[str, Assignment]:
        """What `me` holds by the `workers`, among which those whose engines are still starting count as up."""
        inputs = (adapters, tuple(workers))
        if self._hoped is None or self._hoped[0] != inputs:
            placed = await _compute(inputs, lambda: place(adapters, workers))
            self._hoped = (inputs, {k: a for k, a in placed.items() if me in a.targets})
        return self._hoped[1]

    async def isolated(
        self, adapters: tuple[Adapter, ...], workers: Sequence[Worker], me: str, held: frozenset[str]
    ) -> frozenset[str]:
        """As core.placement.place_isolated, with all listed workers taken as up on the one hand."""
        inputs = (adapters, tuple(workers), held)
        if self._alone is None or self._alone[0] != inputs:
            everyone = [msgspec.structs.replace(w, up=True) for w in workers]
            mine = await _compute(inputs, lambda: place_isolated(adapters, everyone, workers, me, held))
            self._alone = (inputs, mine)
        return self._alone[1]


async def _compute(inputs: tuple[Sequence[Adapter], Sequence[Worker], *tuple[object, ...]], work: Callable[[], T]) -> T:
    if len(inputs[0]) * len(inputs[1]) > PAIRS_IN_LOOP:
        return await asyncio.to_thread(work)
    return work()
