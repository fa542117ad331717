"""Keeps cached blocks of old weights out of new answers.

vLLM 0.12 to 0.30 key the prefix cache of an adapter by its name alone: new weights under an old name would be given
cached blocks of the old ones. There the cache is reset if the engine lets us, or else the new content is held back. The
guard goes by engine process and name, whatever happened between: moved away and back, deleted and made anew, another
resource. While it is unknown whether the engine restarted, the history counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from sidecar.core.memory import LoadedOnce
from sidecar.model import Adapter

Verdict = Literal["free", "reset", "hold"]


class CacheGuard:
    """The history of one engine process, indexed by name.

    `stale`: this vLLM mixes cached blocks. `resettable`: False once the engine declined to reset its cache.
    """

    def __init__(self, history: Iterable[LoadedOnce], process: str, *, stale: bool, resettable: bool) -> None:
        self._stale = stale
        self._resettable = resettable
        self._seen: dict[str, set[str]] = {}
        if stale:
            for past in history:
                if not process or past.process in ("", process):
                    self._seen.setdefault(past.name, set()).add(past.revision)

    def verdict(self, adapter: Adapter, revision: str) -> Verdict:
        """Whether `revision` may be loaded under the adapter's name as things are, after a reset, or not at all."""
        if not self._stale or adapter.on_stale_prefix_cache == "Replace":
            return "free"
        if self._seen.get(adapter.served_name, set()) <= {revision}:
            return "free"
        return "reset" if self._resettable else "hold"
