"""Several API servers behind one port: each knows only the adapters that it was asked to load, so the lists disagree.

One look tells nothing. What gives it away is a name that comes back to what it was although nobody asked for it, or an
answer to a call that the last look said was impossible. Either happens once for honest reasons (a person with curl, a
load that timed out and took effect later); twice for one name within `WINDOW` seconds counts as a contradiction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

WINDOW = 120.0
ENOUGH = 2
_MAX_NAMES = 20_000


class Contradictions:
    """Collects evidence from looks and calls. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._now: dict[str, str] | None = None
        # What a name's root was before its last change; "" is absent. Only names that changed without a call of ours.
        self._before: dict[str, str] = {}
        self._called: set[str] = set()
        self._evidence: list[tuple[float, str]] = []

    def called(self, name: str) -> None:
        """The agent itself asked for a change of this name: its past says nothing about the next look."""
        self._called.add(name)

    def saw(self, adapters: Mapping[str, str], now: float) -> None:
        """One good look: name -> root."""
        last, self._now = self._now, dict(adapters)
        if last is None:
            self._called.clear()
            return
        for name in last.keys() | adapters.keys():
            old, new = last.get(name, ""), adapters.get(name, "")
            if name in self._called:
                self._before.pop(name, None)
            elif old != new:
                if self._before.get(name) == new:
                    self._add(name, now)
                self._before[name] = old
        self._called.clear()
        if len(self._before) > _MAX_NAMES:
            self._before.clear()

    def answered(self, name: str, served: bool, now: float) -> None:
        """The engine's answer to a call tells whether it serves `name`: evidence if the last look said otherwise."""
        if self._now is not None and name not in self._called and (name in self._now) != served:
            self._add(name, now)

    def forget(self) -> None:
        """The engine may have restarted: whatever it lists next is no contradiction."""
        self._now = None
        self._before.clear()
        self._called.clear()
        self._evidence.clear()

    def names(self, now: float) -> tuple[str, ...]:
        """Names about which the engine contradicts itself, sorted."""
        self._evidence = [(at, name) for at, name in self._evidence if now - at <= WINDOW]
        count = Counter(name for _, name in self._evidence)
        return tuple(sorted(name for name, pieces in count.items() if pieces >= ENOUGH))

    def _add(self, name: str, now: float) -> None:
        self._evidence = [*self._evidence[-255:], (now, name)]
