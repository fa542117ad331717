"""What goes wrong in the stub engine on purpose.

Part of the stub engine (`stub_engine`), which stands in for vLLM in the demo and in tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Faults:
    """What goes wrong on purpose. Names are adapters' names, "*" any; an empty value means: nothing does.

    `hang_load`, `hang_unload`: no answer until the fault is taken back, then the call takes effect after all.
    `refuse`: name -> message of a failed load. `hide`: paths (prefixes) that the engine can't see.
    `die_on_load`, `die_on_use`: the engine dies. `die_after_load`: name -> seconds. `lie_on_load`: answers 200 and
    doesn't load. `models_status`, `models_body`: what /v1/models answers instead. `load_status`, `load_body`: likewise.
    """

    hang_load: list[str] = field(default_factory=list)
    hang_unload: list[str] = field(default_factory=list)
    refuse: dict[str, str] = field(default_factory=dict)
    hide: list[str] = field(default_factory=list)
    die_on_load: list[str] = field(default_factory=list)
    die_on_use: list[str] = field(default_factory=list)
    die_after_load: dict[str, float] = field(default_factory=dict)
    lie_on_load: list[str] = field(default_factory=list)
    models_status: int = 0
    models_body: str = ""
    load_status: int = 0
    load_body: str = ""

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()

    def set(self, **values: Any) -> None:
        """Change some faults; every call that hangs looks again. Raises KeyError for a name that isn't one."""
        known = {f.name for f in fields(self)}
        for name, value in values.items():
            if name not in known:
                raise KeyError(name)
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    def clear(self) -> None:
        """Take everything back."""
        self.set(**{f.name: getattr(Faults(), f.name) for f in fields(self)})

    async def changed(self) -> None:
        """Wait for the next `set`."""
        await self._changed.wait()


def hit(names: Container[str], name: str) -> bool:
    """Whether `name` is among `names`, or anything is."""
    return name in names or "*" in names
