"""When the prefix cache may be dropped for new weights: not while a request still runs on the old ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from sidecar.core.metrics_vllm import Traffic
from sidecar.loops.stale_cache import LOOKS, PAUSE, QUIET_SECONDS, can_drop, drop_blocks
from sidecar.ports import EngineUnavailable
from tests.loops.engine import UnaskedEngine
from tests.sim.loop import run


@dataclass
class Engine(UnaskedEngine):
    """Requests of "a" end at `until`, and show until then as `leaves`; `resets` notes when the cache was dropped."""

    until: float = 0.0
    leaves: Traffic = Traffic.SOME
    tells: bool = True
    resettable: bool = True
    resets: list[float] = field(default_factory=list)

    async def in_flight(self) -> frozenset[str] | None:
        return frozenset() if self.tells else None

    async def traffic(self, name: str) -> Traffic:
        if not self.tells:
            return Traffic.UNKNOWN
        return self.leaves if name == "a" and asyncio.get_running_loop().time() < self.until else Traffic.NONE

    async def reset_prefix_cache(self) -> bool:
        self.resets.append(asyncio.get_running_loop().time())
        return self.resettable


def test_the_cache_is_dropped_once_no_request_of_the_name_is_left() -> None:
    engine = Engine(until=7.0)
    assert run(drop_blocks(engine, "a")) is True
    assert engine.resets == [7.0 + (LOOKS - 1) * PAUSE]


def test_requests_of_other_names_do_not_matter() -> None:
    engine = Engine(until=1e9)
    assert run(drop_blocks(engine, "c")) is True
    assert len(engine.resets) == 1


@pytest.mark.parametrize("engine", [Engine(until=1e9), Engine(until=1e9, leaves=Traffic.PERHAPS), Engine(tells=False)])
def test_without_quiet_nothing_is_dropped(engine: Engine) -> None:
    with pytest.raises(EngineUnavailable, match=f"requests of 'a' still run, or may wait, after {QUIET_SECONDS:g} s"):
        run(drop_blocks(engine, "a"))
    assert engine.resets == []


def test_an_engine_without_a_way_to_says_so_before_the_name_is_out_of_service() -> None:
    assert run(can_drop(Engine())) is True
    assert run(can_drop(Engine(resettable=False))) is False
    with pytest.raises(EngineUnavailable, match="the metrics don't tell"):
        run(can_drop(Engine(tells=False)))
