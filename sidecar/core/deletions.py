"""Which adapters are in force while the platform's list comes and goes: unknown is never empty (pure).

When a CRD is deleted, the API server first deletes every resource one by one, and only then answers 404. So a deletion
is not believed at once:

- It takes effect when the list still answers 200 two seconds later, and one that would take all of two or more adapters
  when it does so sixty seconds later.
- A 404, or a list that came back empty after the watch had ended, brings back what was deleted within the last sixty
  seconds, and for the grace period nothing is taken away that is merely missing.
- Anything else than 200 tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from sidecar.model import Adapter, Frozen

SOON = 2.0
ALL_AT_ONCE = 60.0
REMEMBERED = 60.0


class Gone(Frozen, frozen=True):
    """A deletion: what was deleted, and when that was seen."""

    adapter: Adapter
    since: float


class Believed(msgspec.Struct):
    """The adapters in force, `doubted` among them: said to be deleted, not believed yet. `buried` took effect lately.

    Changed only by the functions of this module; times are the caller's clock.
    """

    grace: float
    adapters: dict[str, Adapter] = {}
    doubted: dict[str, float] = {}
    buried: dict[str, Gone] = {}
    missing: bool = False
    grace_until: float = 0.0


def seen(state: Believed, adapter: Adapter) -> bool:
    """The platform shows `adapter` (again); whether anything in force changed. A change of the status alone is none."""
    state.doubted.pop(adapter.key, None)
    state.buried.pop(adapter.key, None)
    old = state.adapters.get(adapter.key)
    if old is not None and old.status_revision and _same_but_status(old, adapter):
        return False
    state.adapters[adapter.key] = adapter
    return old != adapter


def deleted(state: Believed, key: str, now: float) -> None:
    """The platform says that `key` is gone; `due` tells when to ask whether that is to be believed."""
    if key in state.adapters:
        state.doubted.setdefault(key, now)


def listed(state: Believed, adapters: Iterable[Adapter], broken: Iterable[str], now: float) -> bool:
    """A complete list was answered, at the start or after a watch had ended: if it is empty, it may be a new CRD's.

    `broken` are keys that are there but can't be read: their last good one stays. Returns whether anything in force
    changed.
    """
    there = {a.key: a for a in adapters}
    kept = set(broken)
    state.missing = False
    changed = False
    if not there and not kept and _recent(state, now):
        before = len(state.adapters)
        _doubt_everything(state, now)
        changed = len(state.adapters) != before
    for adapter in there.values():
        changed |= seen(state, adapter)
    for key in kept:
        state.doubted.pop(key, None)
    for key in state.adapters.keys() - there.keys() - kept:
        state.doubted.setdefault(key, now)
    return changed


def not_found(state: Believed, now: float) -> bool:
    """The list answers 404: the CRD is missing. Returns whether anything in force changed."""
    state.missing = True
    before = len(state.adapters)
    _doubt_everything(state, now)
    state.doubted.clear()
    return len(state.adapters) != before


def due(state: Believed) -> float | None:
    """When the list is to be asked whether the oldest doubted deletion is true; None if there is nothing to ask."""
    if not state.doubted or state.missing:
        return None
    return min(_due(state, key) for key in state.doubted)


def confirmed(state: Believed, now: float, *, empty: bool) -> tuple[str, ...]:
    """The list (limit=1) has answered 200 just now, without items if `empty`. Returns the keys that go by that.

    An empty list while something is in force that nobody said was deleted is no confirmation: the watch lags, or the
    CRD is another one.
    """
    state.buried = {k: g for k, g in state.buried.items() if now - g.since < REMEMBERED}
    if state.missing or (empty and len(state.doubted) < len(state.adapters)):
        return ()
    gone = tuple(key for key in state.doubted if now >= _due(state, key))
    for key in gone:
        state.doubted.pop(key)
        state.buried[key] = Gone(state.adapters.pop(key), now)
    return gone


def _due(state: Believed, key: str) -> float:
    everything = len(state.doubted) == len(state.adapters) and len(state.adapters) > 1
    since = max(state.doubted.values()) if everything else state.doubted[key]
    return max(since + (ALL_AT_ONCE if everything else SOON), state.grace_until)


def _doubt_everything(state: Believed, now: float) -> None:
    """Bring back what was deleted lately, and wait for the grace period."""
    for key, gone in state.buried.items():
        if now - gone.since < REMEMBERED:
            state.adapters.setdefault(key, gone.adapter)
    state.buried.clear()
    state.grace_until = now + state.grace


def doubtful(state: Believed, now: float) -> bool:
    """Whether a watch that ends now may have ended with its CRD: then the list is to be read again."""
    return bool(state.doubted) or any(now - gone.since < REMEMBERED for gone in state.buried.values())


def _recent(state: Believed, now: float) -> bool:
    return bool(state.adapters) or doubtful(state, now)


def _same_but_status(old: Adapter, new: Adapter) -> bool:
    return msgspec.structs.replace(old, status_revision=None) == msgspec.structs.replace(new, status_revision=None)


def in_force(state: Believed) -> tuple[Adapter, ...]:
    """The adapters in force, in the order of their keys."""
    return tuple(state.adapters[key] for key in sorted(state.adapters))


def remembered(state: Believed, adapters: Mapping[str, Adapter]) -> None:
    """Begin with what an earlier process saw last."""
    state.adapters = dict(adapters)
