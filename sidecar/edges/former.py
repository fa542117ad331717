"""Requests of a name's former holder, which outlive its unload.

vLLM tells adapters in one batch apart by name alone. While a request of the old holder and one of the new run together
it keeps only one of the two in its slots, and as soon as the other's slot is needed for a third adapter, it dies of a
KeyError: seen on 0.30.0 and 0.32.0, with the requests of every adapter lost. So a name that was given up is loaded
again only when the requests of its former holder have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sidecar.core.metrics_vllm import Traffic
from sidecar.ports import EngineUnavailable

PAUSE = 0.25
# How long to wait; then the load fails, and is tried again later.
TIMEOUT = 120.0
# How long to wait where the metrics don't tell: most requests have ended then.
UNKNOWN_TIMEOUT = 10.0
# How long to wait while some request waits for a slot, and whose it is can't be told: that would be for ever on an
# engine that always has more adapters in use than slots. Few requests wait so long.
PERHAPS_TIMEOUT = 30.0
MAX_NAMES = 20_000

PATIENCE = {Traffic.UNKNOWN: UNKNOWN_TIMEOUT, Traffic.PERHAPS: PERHAPS_TIMEOUT}

AskTraffic = Callable[[str, bool], Awaitable[Traffic]]


class FormerHolders:
    """Names that were given up in the present engine process."""

    def __init__(self, traffic: AskTraffic) -> None:
        """`traffic` tells about requests of a name; with True it makes sure that none is on its way unseen."""
        self._traffic = traffic
        self._names: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """Given up, and not loaded since."""
        return frozenset(self._names)

    def gave_up(self, name: str) -> None:
        """`name` was unloaded."""
        if len(self._names) < MAX_NAMES:
            self._names.add(name)

    def forget(self) -> None:
        """Another engine process: no request of old is left."""
        self._names.clear()

    async def ended(self, name: str) -> None:
        """Wait until no request of `name`, which isn't loaded, is in flight. Raises EngineUnavailable if some stay.

        A name that isn't known to have been given up may have been by an earlier agent: one look then. Else two, since
        a request may still be on its way from the API server to the engine.
        """
        time = asyncio.get_running_loop().time
        began = time()
        known = name in self._names
        quiet = 0
        while quiet < (2 if known else 1):
            found = await self._traffic(name, known)
            waited = time() - began
            quiet = quiet + 1 if found is Traffic.NONE else 0
            known = known or found is Traffic.SOME
            if found in PATIENCE and (not known or waited >= PATIENCE[found]):
                break
            if waited >= TIMEOUT:
                raise EngineUnavailable(
                    f"not sent: requests to the former {name!r} still run after {TIMEOUT:g} s, and vLLM dies of two "
                    "adapters with one name"
                )
            if known and quiet < 2:
                await asyncio.sleep(PAUSE)
        self._names.discard(name)
