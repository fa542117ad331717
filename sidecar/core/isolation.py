"""A worker that reaches less than half of the pool doubts itself, not the others.

Ten workers that each believe they are alone would all hold the same adapters, and most adapters would be nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.core.placement import place
from sidecar.core.pool import Worker
from sidecar.model import Adapter


def isolated(reached: int, listed: int) -> bool:
    """Whether a worker that reaches `reached` of `listed` workers (itself counted in both) reaches less than half."""
    return 2 * reached < listed


def place_isolated(
    adapters: Sequence[Adapter],
    everyone: Sequence[Worker],
    reachable: Sequence[Worker],
    me: str,
    held: frozenset[str],
) -> frozenset[str]:
    """Keys that isolated worker `me` should hold.

    What it holds, what placement over `everyone` gives it, and what placement over `reachable` gives it only where
    there is free room for that.
    """
    full = place(adapters, everyone)
    near = place(adapters, reachable)
    mine = held | {k for k, a in full.items() if me in a.targets}
    room = next((w.room for w in everyone if w.name == me), 0)
    extra = [k for k, a in near.items() if me in a.targets and k not in mine]
    return frozenset(mine | set(extra[: max(0, room - len(mine))]))
