"""Old weights' blocks in the prefix cache of a vLLM that would take them for those of new weights under the same name.

Dropping the cache is half of it. An unload ends no request: one that still runs on the old weights computes blocks
after the reset too (all the more as a reset makes it start over), under the very name that the new weights will get.
"""

from __future__ import annotations

import asyncio

from sidecar.core.metrics_vllm import Traffic
from sidecar.ports import Engine, EngineUnavailable

# How long a name may be out of service until the requests on its old weights have ended.
QUIET_SECONDS = 30.0
# A request may still be on its way from the API server to the engine, so one look is not enough.
PAUSE = 0.5
LOOKS = 2


async def can_drop(engine: Engine) -> bool:
    """Before a name is taken out of service: could its blocks be dropped? False if this engine has no way to.

    Drops the cache, since nothing else tells. Raises EngineUnavailable if now is not the time, EngineTimeout.
    """
    if await engine.in_flight() is None:
        raise EngineUnavailable("the prefix cache is not reset: the metrics don't tell which adapters have requests")
    return await engine.reset_prefix_cache()


async def drop_blocks(engine: Engine, name: str) -> bool:
    """Wait until no request of `name`, which is not loaded, is in flight; then drop the cache.

    False if this engine has no way to. Raises EngineUnavailable if the requests don't end, EngineTimeout.
    """
    time = asyncio.get_running_loop().time
    until = time() + QUIET_SECONDS
    quiet = 0
    while time() < until:
        quiet = quiet + 1 if await engine.traffic(name) is Traffic.NONE else 0
        if quiet == LOOKS:
            return await engine.reset_prefix_cache()
        await asyncio.sleep(PAUSE)
    raise EngineUnavailable(
        f"the prefix cache is not reset: requests of {name!r} still run, or may wait, after {QUIET_SECONDS:g} s"
    )
