"""Why an adapter is where it is: every worker of the pool with what decides, in words."""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.core.hashing import adapter_hash, score
from sidecar.core.placement import Assignment, taking_order
from sidecar.core.pool import Pool, Worker, not_a_member
from sidecar.model import Adapter, Frozen


class Explained(Frozen, frozen=True, kw_only=True, omit_defaults=False):
    """One worker in the light of one adapter.

    `score` is 16 hexadecimal digits (a 64-bit number loses digits in JSON readers that only know floats). `rank` counts
    the targets from 0 and is None for others. `up` is alive with an engine that answers. `why` says in words why the
    worker is a target, or is passed over.
    """

    worker: str
    score: str
    zone: str
    up: bool
    member: bool
    candidate: bool
    target: bool
    rank: int | None
    why: str


def explain(adapter: Adapter, workers: Iterable[Worker], assignment: Assignment) -> list[Explained]:
    """A row for each worker: the targets in rank, other candidates in the order in which they would be taken, the rest.

    `assignment` is what `place` made of the same workers. The rest is in the order of scores.
    """
    view = _View(adapter, Pool(workers), assignment)
    return [view.row(i) for i in view.order]


class _View:
    def __init__(self, adapter: Adapter, pool: Pool, assignment: Assignment) -> None:
        self.adapter = adapter
        self.pool = pool
        self.assignment = assignment
        own = adapter_hash(adapter.namespace, adapter.name)
        self.scores = [score(own, h) for h in pool.hashes]
        self.behind = pool.behind(adapter.key)
        self.zones = pool.zones if adapter.distribution.spread == "zone" else None
        self.reasons = [not_a_member(adapter, w) for w in pool.workers]
        self.candidates = pool.group(adapter).candidates
        index = {name: i for i, name in enumerate(pool.names)}
        self.targets = [index[t] for t in assignment.targets if t in index]
        taken = self._taking_order(self.candidates)
        others = sorted(set(range(len(pool.names))).difference(self.candidates), key=lambda i: -self.scores[i])
        self.order = [*self.targets, *(i for i in taken if i not in self.targets), *others]

    def _taking_order(self, candidates: Iterable[int]) -> list[int]:
        ranked = sorted(sorted(candidates), key=lambda i: -self.scores[i])
        return taking_order(ranked, self.behind, self.zones)

    def row(self, i: int) -> Explained:
        worker = self.pool.workers[i]
        target = i in self.targets
        return Explained(
            worker=worker.name,
            score=f"{self.scores[i]:016x}",
            zone=worker.zone,
            up=worker.up,
            member=not self.reasons[i],
            candidate=i in self.candidates,
            target=target,
            rank=self.targets.index(i) if target else None,
            why=self._target(i) if target else self._passed_over(i),
        )

    def _target(self, i: int) -> str:
        chosen = f"target {self.targets.index(i) + 1} of {self.assignment.wanted} wanted"
        if i in self.behind:
            return f"{chosen}, although it {self._reluctance(i)}: there is nobody else"
        return chosen

    def _reluctance(self, i: int) -> str:
        return "rests after its engine died twice" if i in self.pool.resting else "asked to be passed over for it"

    def _passed_over(self, i: int) -> str:
        if self.reasons[i]:
            return self.reasons[i]
        if not self.pool.workers[i].up:
            return "it is not heard, or its engine does not answer"
        if not self.assignment.wanted:
            return "none are wanted: replicas or percentage is 0"
        if self._would_be_target(i):
            return f"full: its room for {self.pool.room[i]} goes to adapters that come before this one"
        if i in self.behind:
            return f"it {self._reluctance(i)}"
        return self._beaten(i)

    def _would_be_target(self, i: int) -> bool:
        """Whether only room can have kept it out: it would be taken if it and the targets were all there is."""
        return i in self._taking_order([*self.targets, i])[: self.assignment.wanted]

    def _beaten(self, i: int) -> str:
        higher = sum(1 for t in self.targets if self.scores[t] > self.scores[i])
        count = f"{self.assignment.wanted} wanted"
        if higher < len(self.targets):
            return f"{count}, and its zone {self.pool.workers[i].zone!r} has its share already"
        return f"{count}, and as many have higher scores"
