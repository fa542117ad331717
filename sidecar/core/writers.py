"""Who writes an adapter's status: found anew only where the live workers have changed (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sidecar.core.hashing import adapter_hash, score, worker_hash
from sidecar.core.pool import Worker
from sidecar.model import Adapter


class Writers:
    """The highest-scored live worker for each adapter, candidate or not; nobody is elected.

    Among those that serve the adapter's base model, if any does: only they know where it is placed. In a pool, the
    workers of one base model, that is everybody. A worker whose pod is ending comes after the others: it is gone soon.
    Finding all of them costs a microsecond for each pair of adapter and worker, a worker that joins or leaves one for
    each adapter.
    """

    def __init__(self) -> None:
        self._groups: dict[str, frozenset[str]] = {}
        self._best: dict[str, tuple[frozenset[str], str | None]] = {}

    def update(self, adapters: Mapping[str, Adapter], workers: Iterable[Worker], alive: frozenset[str]) -> None:
        """Take the pool as it is now. `alive` are the names of the workers that live."""
        live = [w for w in workers if w.name in alive]
        live = [w for w in live if not w.terminating] or live
        everybody = frozenset(w.name for w in live)
        models = {a.base_model for a in adapters.values()}
        groups = {m: frozenset(w.name for w in live if m in w.base_models) or everybody for m in models}
        # Equal sets stay one object: comparing them then costs nothing.
        self._groups = {m: old if (old := self._groups.get(m)) == g else g for m, g in groups.items()}
        self._best = {key: self._found(adapter) for key, adapter in adapters.items()}

    def of(self, key: str) -> str | None:
        """The name of the writer of adapter `key`; None if nobody lives."""
        found = self._best.get(key)
        return found[1] if found else None

    def _found(self, adapter: Adapter) -> tuple[frozenset[str], str | None]:
        group = self._groups[adapter.base_model]
        old = self._best.get(adapter.key)
        if old is None or old[1] is None or old[1] not in group:
            return group, _best(adapter, group)
        if old[0] is group:
            return old
        return group, _best(adapter, (group - old[0]) | {old[1]})


def _best(adapter: Adapter, names: Iterable[str]) -> str | None:
    own = adapter_hash(adapter.namespace, adapter.name)
    return min(names, key=lambda name: (-score(own, worker_hash(name)), name), default=None)
