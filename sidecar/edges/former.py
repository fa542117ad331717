"""Requests of a name's former holder, which outlive its unload.

vLLM tells adapters in one batch apart by name alone. While a request of the old holder and one of the new run together
it keeps only one of the two in its slots, and as soon as the other's slot is needed for a third adapter, it dies of a
KeyError: seen on 0.30.0 and 0.32.0, with the requests of every adapter lost. So a name that was given up is loaded
again only when the requests of its former holder have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sidecar.ports import EngineUnavailable

PAUSE = 0.25
# How long to wait; then the load fails, and is tried again later.
TIMEOUT = 120.0
# How long to wait where the metrics don't tell: most requests have ended then.
UNKNOWN_TIMEOUT = 10.0
MAX_NAMES = 20_000

InFlight = Callable[[], Awaitable[frozenset[str] | None]]


class FormerHolders:
    """Names that were given up in the present engine process."""

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
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
        the metrics follow the engine's steps, and a request may be on its way to them.
        """
        time = asyncio.get_running_loop().time
        began = time()
        known = name in self._names
        quiet = 0
        while quiet < (2 if known else 1):
            busy = await self._in_flight()
            waited = time() - began
            if busy is None and (not known or waited >= UNKNOWN_TIMEOUT):
                break
            quiet = quiet + 1 if busy is not None and name not in busy else 0
            if waited >= TIMEOUT:
                raise EngineUnavailable(
                    f"not sent: requests to the former {name!r} still run after {TIMEOUT:g} s, and vLLM dies of two "
                    "adapters with one name"
                )
            known = known or not quiet
            if quiet < 2 and known:
                await asyncio.sleep(PAUSE)
        self._names.discard(name)
