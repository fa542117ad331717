"""The pool as placement sees it: its workers, and who among them may hold which adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from sidecar.core.hashing import worker_hash
from sidecar.core.selector import matches
from sidecar.model import Adapter, Distribution, Frozen, Selector


class Worker(Frozen, frozen=True, kw_only=True):
    """One worker, put together from what the backend lists and from the worker's own record.

    `room` is how many adapters it can hold: its capacity without the names that the engine serves from elsewhere, never
    negative. `up` means alive, and its engine answers. `avoids` holds the keys (`namespace/name`) of the adapters for
    which it asks to be passed over; `resting` asks the same for all of them.
    """

    name: str
    uid: str = ""
    zone: str = ""
    base_models: frozenset[str] | tuple[str, ...] = ()
    labels: dict[str, str] = {}
    room: int = 1
    up: bool = True
    cordoned: bool = False
    terminating: bool = False
    resting: bool = False
    avoids: frozenset[str] = frozenset()


def wanted(distribution: Distribution, members: int) -> int:
    """How many of `members` workers should hold an adapter.

    `fixed` beyond the members means all of them; a percentage is rounded down, but above 0 to one at least.
    """
    if distribution.strategy == "all":
        return members
    if distribution.strategy == "fixed":
        return min(distribution.replicas, members)
    if distribution.percentage <= 0 or members == 0:
        return 0
    return max(1, members * min(distribution.percentage, 100) // 100)


def not_a_member(adapter: Adapter, worker: Worker) -> str:
    """Why the adapter is none of this worker's business; empty for a member."""
    if worker.terminating:
        return "its pod is terminating"
    if worker.cordoned:
        return "it is cordoned"
    if adapter.base_model not in worker.base_models:
        served = ", ".join(sorted(worker.base_models)) or "nothing known yet"
        return f"it serves {served}, not {adapter.base_model}"
    if not matches(adapter.selector, worker.labels):
        return "its labels don't match spec.workers"
    return ""


def distinct(workers: Iterable[Worker]) -> list[Worker]:
    """The workers in the order of their names, each pod once, whatever the order they came in.

    A pod can stand in several EndpointSlices; then one that is said to be terminating counts. Of two UIDs with one name
    the smaller stays.
    """
    found = sorted(workers, key=lambda w: (w.name, w.uid))
    by_name: dict[str, Worker] = {}
    uids: dict[str, str] = {}
    for worker in found:
        if uids.setdefault(worker.uid or worker.name, worker.name) != worker.name:
            continue
        known = by_name.get(worker.name)
        if known is None or (known.uid == worker.uid and _settling(worker) < _settling(known)):
            by_name[worker.name] = worker
    return list(by_name.values())


def _settling(worker: Worker) -> tuple[bool, bytes]:
    """Which of two listings of one pod counts: any total order will do, as long as everyone has the same."""
    return (not worker.terminating, msgspec.json.encode(worker, order="deterministic"))


class Group(Frozen, frozen=True):
    """The workers for all adapters with one base model and one selector.

    `members` counts those that could hold such an adapter, `candidates` are the ones among them that are up, as
    ascending indices into the pool's workers.
    """

    number: int
    members: int
    candidates: tuple[int, ...]


_EVERYWHERE = Selector()


class Pool:
    """All workers in the order of their names, with the members of every adapter, looked up once for each kind."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.workers = distinct(workers)
        self.names = [w.name for w in self.workers]
        self.hashes = [worker_hash(w.name) for w in self.workers]
        zones: dict[str, int] = {}
        self.zones = [zones.setdefault(w.zone, len(zones)) for w in self.workers]
        self.room = [w.room for w in self.workers]
        self.resting = frozenset(i for i, w in enumerate(self.workers) if w.resting)
        self._only_resting = dict.fromkeys(self.resting, 1)
        self._avoiding: dict[str, set[int]] = {}
        for index, worker in enumerate(self.workers):
            for key in worker.avoids:
                self._avoiding.setdefault(key, set()).add(index)
        self._groups: dict[tuple[str, bytes], Group] = {}

    def behind(self, key: str) -> Mapping[int, int]:
        """Workers that come after all others for this adapter, and how far behind.

        Who rests (1) comes before who avoids the adapter (2; 3 for both): an engine that died may well serve it, one
        that refuses it won't, and an adapter of one copy would be nowhere while only those two kinds are left.
        """
        avoiding = self._avoiding.get(key)
        if not avoiding:
            return self._only_resting
        return {**self._only_resting, **{i: 2 + (i in self.resting) for i in avoiding}}

    def avoided(self, key: str) -> bool:
        """Whether any worker avoids this adapter by itself."""
        return key in self._avoiding

    def group(self, adapter: Adapter) -> Group:
        """Members and candidates of the adapter; one object for all adapters with the same ones."""
        selector = adapter.selector
        wire = b"" if selector == _EVERYWHERE else msgspec.json.encode(selector, order="deterministic")
        found = self._groups.get((adapter.base_model, wire))
        if found is None:
            members = [i for i, w in enumerate(self.workers) if not not_a_member(adapter, w)]
            found = Group(len(self._groups), len(members), tuple(i for i in members if self.workers[i].up))
            self._groups[adapter.base_model, wire] = found
        return found
