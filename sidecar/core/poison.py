"""Engines that die of an adapter: suspicion, own rejection, and the pool's quarantine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sidecar.core.memory import PROVEN_SECONDS, Attempt, Memory, Quarantine, Rest
from sidecar.model import Suspicion

BLAME_SECONDS = 60.0
SUSPICION_SECONDS = 1800.0
QUARANTINE_FIRST = 3600.0
QUARANTINE_CAP = 86_400.0
BAN_FIRST = 600.0
BAN_CAP = 7200.0
REST_WINDOW = 600.0
REST_FIRST = 600.0
REST_CAP = 7200.0
# After a day without one, the next ban, rest or quarantine is a first one again.
CALM_SECONDS = 86_400.0
MAX_KEPT = 64


def blamed(attempts: Iterable[Attempt], now: float) -> Attempt | None:
    """The load that an engine's death at `now` is blamed on.

    The first of those in flight, since the engine takes one after the other, and those behind it were answered by a
    dead one; or else the only one that ended in the last 60 s: two may not condemn each other.
    """
    recent = [a for a in attempts if a.ended is None or now - a.ended <= BLAME_SECONDS]
    running = [a for a in recent if a.ended is None]
    if running:
        return running[0]
    return recent[0] if len({a.revision for a in recent}) == 1 else None


def engine_died(memory: Memory, now: float) -> str | None:
    """Note a death of the engine; returns the revision that is suspected, if any."""
    memory.deaths = [t for t in memory.deaths if now - t <= REST_WINDOW] + [now]
    if len(memory.deaths) >= 2:
        lately = memory.rest is not None and now - memory.rest.until < CALM_SECONDS
        step = memory.rest.step + 1 if memory.rest is not None and lately else 0
        memory.rest = Rest(until=now + min(REST_CAP, REST_FIRST * 2**step), step=step)
    attempt = blamed(memory.attempts, now)
    memory.attempts = []
    if attempt is None:
        return None
    revision, ban = attempt.revision, memory.banned.get(attempt.revision)
    again = ban is not None or revision in suspected(memory, now)
    memory.suspicions = [*memory.suspicions[-MAX_KEPT:], Suspicion(revision=revision, kind="death", at=now)]
    if again:
        memory.suspicions.append(Suspicion(revision=revision, kind="rejection", at=now))
        step = ban.step + 1 if ban else 0
        until = now + min(BAN_CAP, BAN_FIRST * 2**step)
        memory.banned[revision] = Quarantine(until=until, step=step, since=now)
    return revision


def resting(memory: Memory, now: float) -> bool:
    """Whether this worker asks to be passed over because its engine keeps dying."""
    return memory.rest is not None and now < memory.rest.until


def suspected(memory: Memory, now: float) -> frozenset[str]:
    """Revisions that this worker's engine died with lately: loaded last."""
    return frozenset(s.revision for s in memory.suspicions if s.kind == "death" and now - s.at <= SUSPICION_SECONDS)


def rejected_until(memory: Memory, revision: str, now: float) -> float | None:
    """Until when this worker won't load the revision again, because its engine died with it twice; None if it may.

    Whatever else may have ended the engine can't condemn content for ever: it is tried again after 10 minutes, and
    after each further death for twice as long, up to 2 hours.
    """
    ban = memory.banned.get(revision)
    return ban.until if ban is not None and now < ban.until else None


def proven(memory: Memory, key: str, revision: str, now: float) -> bool:
    """Whether this worker has had it loaded for so long that it may load it again after a restart of its engine."""
    held = memory.held.get(key)
    return held is not None and held.revision == revision and now - held.since >= PROVEN_SECONDS


def update_quarantine(memory: Memory, pool: Mapping[str, tuple[Suspicion, ...]], now: float) -> frozenset[str]:
    """Quarantine what three suspicions of at least two workers in 30 minutes point at; returns what is quarantined now.

    `pool` maps worker names (the own one included) to their suspicions. They are told for as long as the quarantine
    lasts, so that who comes later finds the same.
    """
    told: dict[str, list[tuple[float, str]]] = {}
    for worker, suspicions in pool.items():
        for s in suspicions:
            told.setdefault(s.revision, []).append((s.at, worker))
    for revision, votes in told.items():
        _count(memory, revision, sorted(votes), now)
    return frozenset(r for r, q in memory.quarantine.items() if now < q.until)


def _count(memory: Memory, revision: str, votes: list[tuple[float, str]], now: float) -> None:
    """Each vote counts for one quarantine: only those after the last that led to one say anything new."""
    window: list[tuple[float, str]] = []
    for at, worker in votes:
        old = memory.quarantine.get(revision)
        if old is not None and at <= old.since:
            continue
        window = [v for v in window if at - v[0] <= SUSPICION_SECONDS] + [(at, worker)]
        if len(window) >= 3 and len({w for _, w in window}) >= 2:
            step = old.step + 1 if old else 0
            until = min(at, now) + min(QUARANTINE_CAP, QUARANTINE_FIRST * 2**step)
            memory.quarantine[revision] = Quarantine(until=until, step=step, since=at)
            window = []


def forget(memory: Memory, now: float) -> None:
    """Drop what says nothing any more. How often something was shut out is remembered for a day after its end."""
    lasting = {r for r, q in memory.quarantine.items() if now < q.until}
    memory.suspicions = [s for s in memory.suspicions if s.revision in lasting or now - s.at < SUSPICION_SECONDS]
    memory.quarantine = {r: q for r, q in memory.quarantine.items() if now < q.until + CALM_SECONDS}
    harmless = {h.revision for h in memory.held.values() if now - h.since >= PROVEN_SECONDS}
    memory.banned = {
        r: b for r, b in memory.banned.items() if now < b.until or (r not in harmless and now < b.until + CALM_SECONDS)
    }
