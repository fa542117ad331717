"""Engines that die of an adapter: suspicion, own rejection, and the pool's quarantine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sidecar.core.memory import FOREVER, Attempt, Memory, Quarantine, Rest
from sidecar.model import Suspicion

BLAME_SECONDS = 60.0
SUSPICION_SECONDS = 1800.0
QUARANTINE_FIRST = 3600.0
QUARANTINE_CAP = 86_400.0
REST_WINDOW = 600.0
REST_FIRST = 600.0
REST_CAP = 7200.0
MAX_KEPT = 64


def blamed(attempts: Iterable[Attempt], now: float) -> Attempt | None:
    """The load that an engine's death at `now` is blamed on.

    One in flight, or else the only one that ended in the last 60 s: two may not condemn each other.
    """
    recent = [a for a in attempts if a.ended is None or now - a.ended <= BLAME_SECONDS]
    running = [a for a in recent if a.ended is None]
    if running:
        return running[-1]
    return recent[0] if len({a.revision for a in recent}) == 1 else None


def engine_died(memory: Memory, now: float) -> str | None:
    """Note a death of the engine; returns the revision that is suspected, if any."""
    memory.deaths = [t for t in memory.deaths if now - t <= REST_WINDOW] + [now]
    if len(memory.deaths) >= 2:
        step = memory.rest.step + 1 if memory.rest else 0
        memory.rest = Rest(until=now + min(REST_CAP, REST_FIRST * 2**step), step=step)
    attempt = blamed(memory.attempts, now)
    memory.attempts = []
    if attempt is None:
        return None
    again = attempt.revision in suspected(memory, now)
    memory.suspicions = [*memory.suspicions[-MAX_KEPT:], Suspicion(revision=attempt.revision, kind="death", at=now)]
    if again:
        memory.suspicions.append(Suspicion(revision=attempt.revision, kind="rejection", at=now))
    return attempt.revision


def resting(memory: Memory, now: float) -> bool:
    """Whether this worker asks to be passed over because its engine keeps dying."""
    return memory.rest is not None and now < memory.rest.until


def suspected(memory: Memory, now: float) -> frozenset[str]:
    """Revisions that this worker's engine died with lately: loaded last."""
    return frozenset(s.revision for s in memory.suspicions if s.kind == "death" and now - s.at <= SUSPICION_SECONDS)


def rejected(memory: Memory) -> frozenset[str]:
    """Revisions that this worker won't load again: its engine died with them twice."""
    return frozenset(s.revision for s in memory.suspicions if s.kind == "rejection")


def update_quarantine(memory: Memory, pool: Mapping[str, tuple[Suspicion, ...]], now: float) -> frozenset[str]:
    """Quarantine what three suspicions of at least two workers in 30 minutes point at; returns what is quarantined now.

    `pool` maps worker names (the own one included) to their suspicions.
    """
    votes: dict[str, dict[str, int]] = {}
    for worker, suspicions in pool.items():
        for s in suspicions:
            if now - s.at <= SUSPICION_SECONDS:
                by_worker = votes.setdefault(s.revision, {})
                by_worker[worker] = by_worker.get(worker, 0) + 1
    for revision, by_worker in votes.items():
        if len(by_worker) >= 2 and sum(by_worker.values()) >= 3:
            _quarantine(memory, revision, now)
    return frozenset(r for r, q in memory.quarantine.items() if now < q.until)


def _quarantine(memory: Memory, revision: str, now: float) -> None:
    old = memory.quarantine.get(revision)
    if old is not None and now < old.until:
        return
    step = old.step + 1 if old else 0
    until = min(FOREVER, now + min(QUARANTINE_CAP, QUARANTINE_FIRST * 2**step))
    memory.quarantine[revision] = Quarantine(until=until, step=step)
