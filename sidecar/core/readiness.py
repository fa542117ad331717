"""When a worker may get traffic for the first time: /readyz.

Not before the engine has answered and placement was computed with this worker in it; then not until the adapters that
were wanted at that moment are settled. From then on ready for this engine process, whatever comes: later adapters,
updates, failures and outages never turn it back.
"""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.core.world import Status
from sidecar.model import State

SETTLED = (State.LOADED, State.WAITING, State.REJECTED, State.FAILED)


def reasons(wanted: frozenset[str] | None, statuses: Mapping[str, Status], engine_seen: bool) -> tuple[str, ...]:
    """Why this worker isn't ready yet; empty when it is. `wanted` None: placement was not computed with it yet."""
    if not engine_seen:
        return ("the engine has not answered yet",)
    if wanted is None:
        return ("placement was not computed with this worker in it yet",)
    open_ = []
    for key in sorted(wanted):
        status = statuses.get(key)
        # None: it is wanted here no longer.
        if status is not None and status.state not in SETTLED and not status.held:
            open_.append(f"adapter {key} is {status.state.value}")
    return tuple(open_)
