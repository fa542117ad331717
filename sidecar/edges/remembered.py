"""What an agent saved before, as a value."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
import structlog

from sidecar.ports import EdgeError

log = structlog.get_logger()

T = TypeVar("T")


class Saved(Protocol):
    """Where something may have been saved; the adapters directory's `state/`."""

    def read(self, name: str) -> bytes | None:
        """What was saved last, or None. Raises EdgeError."""


def remembered(state: Saved, name: str, kind: type[T]) -> T | None:
    """The value saved under `name`; None if there is none, or what is there can't be read, which is logged."""
    try:
        data = state.read(name)
        return msgspec.json.decode(data, type=kind) if data else None
    except (EdgeError, msgspec.MsgspecError) as error:
        log.warning("state_unreadable", name=name, error=str(error))
        return None
