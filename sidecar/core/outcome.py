"""What the agent learns from what happened: every change of Memory that follows an action or a look at the engine."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import msgspec

from sidecar.core import poison
from sidecar.core.decide import better
from sidecar.core.memory import (
    FOREVER,
    MAX_DOUBTS,
    MAX_HISTORY,
    MESSAGE_LIMIT,
    PROVEN_SECONDS,
    Attempt,
    Avoid,
    Held,
    LoadedOnce,
    Memory,
    Refused,
    Retry,
    Trial,
    refused_revision,
    trial,
)
from sidecar.core.retry import Backoff
from sidecar.model import Adapter, Decision, Listing

# A transient fault clears in seconds; a wrong prefix or a missing permission takes a person.
FETCH = Backoff(first=1.0, factor=2.0, cap=300.0)
DENIED = Backoff(first=15.0, factor=2.0, cap=600.0)
# With a Secret the person is most likely about to grant a Role or to rotate a key, and watches.
DENIED_SECRET = Backoff(first=5.0, factor=2.0, cap=60.0)
LOAD = Backoff(first=1.0, factor=3.0, cap=300.0)
# Memory does not come free within seconds: case of an engine out of GPU memory.
SCARCE = Backoff(first=30.0, factor=2.0, cap=900.0)

# The engine is looked at once a second.
UNREACHED = 1.0
FAILURES_TO_AVOID = 3
AVOID_FIRST = 600.0
AVOID_CAP = 7200.0


def failed(
    memory: Memory, adapter: Adapter, revision: str, message: str, backoff: Backoff, now: float, unit_random: float
) -> None:
    """One more failure in a row; from the third on this worker asks to be passed over for the adapter."""
    input_ = f"{adapter.source_id}@{revision}" if revision else adapter.source_id
    old = memory.retries.get(adapter.key)
    failures = old.failures + 1 if old and _same_source(old.input, adapter.source_id) else 1
    not_before = now + backoff.delay(failures, unit_random)
    memory.retries[adapter.key] = Retry(input=input_, failures=failures, not_before=not_before, message=message)
    if failures % FAILURES_TO_AVOID == 0:
        _avoid(memory, adapter, revision, now)


def denied(adapter: Adapter) -> Backoff:
    """When an origin that refuses us is asked again."""
    return DENIED if adapter.source.secret is None else DENIED_SECRET


def put_off(memory: Memory, adapter: Adapter, revision: str, message: str, now: float) -> None:
    """The engine was not reached: no failure of this adapter, but no use to try at once again either."""
    old = memory.retries.get(adapter.key)
    input_ = f"{adapter.source_id}@{revision}"
    failures = old.failures if old and _same_source(old.input, adapter.source_id) else 0
    memory.retries[adapter.key] = Retry(input=input_, failures=failures, not_before=now + UNREACHED, message=message)


def _same_source(input_: str, source_id: str) -> bool:
    return input_.split("@", 1)[0] == source_id


def _avoid(memory: Memory, adapter: Adapter, revision: str, now: float) -> None:
    old = memory.avoid.get(adapter.key)
    step = old.step + 1 if old and old.source_id == adapter.source_id else 0
    until = now + min(AVOID_CAP, AVOID_FIRST * 2**step)
    memory.avoid[adapter.key] = Avoid(source_id=adapter.source_id, revision=revision, until=until, step=step)


def rejected(memory: Memory, adapter: Adapter, revision: str, message: str) -> None:
    """Permanent until the spec or the content changes. `revision` "" if the content has none yet."""
    input_ = f"{adapter.source_id}@{revision}" if revision else adapter.source_id
    memory.retries[adapter.key] = Retry(
        input=input_, failures=FAILURES_TO_AVOID, not_before=FOREVER, message=message, rejected=True
    )
    memory.avoid[adapter.key] = Avoid(source_id=adapter.source_id, revision=revision, until=FOREVER)


def judged_by(memory: Memory, limits: str) -> None:
    """What this worker accepts now (any text that tells limits apart; "" is unknown): with other limits than before,
    what was rejected is looked at again."""
    if limits and memory.limits and limits != memory.limits:
        memory.retries = {k: r for k, r in memory.retries.items() if not r.rejected}
        memory.avoid = {k: a for k, a in memory.avoid.items() if a.until < FOREVER}
        memory.trials = {k: t for k, t in memory.trials.items() if t.listing is None}
    memory.limits = limits or memory.limits


def trial_failed(
    memory: Memory, adapter: Adapter, message: str, listing: Listing | None, now: float, unit_random: float
) -> None:
    """Looking for new content failed: no matter for what is decided on. `listing`: it is no adapter, as long as this is
    what the origin holds."""
    old = trial(memory, adapter)
    failures = old.failures + 1 if old else 1
    memory.refreshed[adapter.source_id] = now
    memory.trials[adapter.key] = Trial(
        source_id=adapter.source_id,
        message=message,
        failures=failures,
        not_before=now + denied(adapter).delay(failures, unit_random),
        listing=listing,
    )


def nothing_new(memory: Memory, adapter: Adapter, now: float) -> None:
    """The origin holds what is decided on."""
    memory.refreshed[adapter.source_id] = now
    memory.trials.pop(adapter.key, None)


def fetched(memory: Memory, adapter: Adapter, decision: Decision, now: float) -> None:
    """The decided content is on the disk."""
    best = better(memory.decisions.get(decision.source_id), decision)
    if best is not None:
        memory.decisions[decision.source_id] = best
    memory.refreshed[decision.source_id] = now
    memory.gone.pop(adapter.key, None)
    memory.trials.pop(adapter.key, None)
    memory.large.pop(adapter.key, None)
    retry = memory.retries.get(adapter.key)
    # Failures to load the very same revision outlive a new fetch of it.
    if retry is None:
        return
    other = retry.input != f"{adapter.source_id}@{decision.revision}"
    if other or (not retry.rejected and retry.not_before <= now):
        del memory.retries[adapter.key]


def doubted(memory: Memory, revision: str, warnings: Sequence[str]) -> None:
    """What the check found strange is said for as long as the content serves: it may give the base model's answers."""
    memory.doubts.pop(revision, None)
    if warnings:
        memory.doubts[revision] = "; ".join(warnings)[:MESSAGE_LIMIT]
        for oldest in list(memory.doubts)[:-MAX_DOUBTS]:
            del memory.doubts[oldest]


def adopt(memory: Memory, decision: Decision) -> None:
    """Keep a peer's decision, so that a restart without peers changes nothing."""
    best = better(memory.decisions.get(decision.source_id), decision)
    if best is not None:
        memory.decisions[decision.source_id] = best


def load_begins(memory: Memory, key: str, name: str, revision: str, process: str, now: float) -> None:
    """To be kept on disk before the call: from now on the engine may hold blocks of this revision under this name."""
    past = LoadedOnce(process=process, name=name, revision=revision)
    if past not in memory.history:
        memory.history = [*memory.history[-MAX_HISTORY:], past]
    memory.attempts = [a for a in memory.attempts if a.ended is None or now - a.ended <= 600.0]
    memory.attempts.append(Attempt(key=key, revision=revision, started=now))


def load_ended(memory: Memory, key: str, revision: str, now: float) -> None:
    """The engine answered (or the call was given up): whatever kills it later isn't this call in flight."""
    memory.attempts = [
        Attempt(key=a.key, revision=a.revision, started=a.started, ended=now)
        if a.ended is None and a.key == key and a.revision == revision
        else a
        for a in memory.attempts
    ]


def load_unsent(memory: Memory, key: str, revision: str) -> None:
    """The engine was not even reached: whatever it died of, it wasn't this."""
    for index in reversed(range(len(memory.attempts))):
        attempt = memory.attempts[index]
        if attempt.ended is None and (attempt.key, attempt.revision) == (key, revision):
            # Only this one: an earlier one may be what the engine died of.
            memory.attempts = memory.attempts[:index] + memory.attempts[index + 1 :]
            return


def loaded(memory: Memory, adapter: Adapter, revision: str, now: float) -> None:
    """The engine said yes, and lists the name with our path."""
    # The older revision is back in place of what was refused: that stays so, and so does its message.
    back = refused_revision(memory, adapter) not in ("", revision) and memory.previous.get(adapter.key) == revision
    memory.previous[adapter.key] = revision
    memory.drain_seconds[adapter.served_name] = adapter.drain_seconds
    found_loaded(memory, {adapter.key: revision}, now)
    memory.unloaded.pop(revision, None)
    if back:
        return
    memory.refused.pop(adapter.key, None)
    memory.retries.pop(adapter.key, None)
    memory.avoid.pop(adapter.key, None)


def found_loaded(memory: Memory, serves: Mapping[str, str], now: float) -> None:
    """The engine lists these (adapter's key -> revision); not all need have been loaded by this agent's process."""
    for key, revision in serves.items():
        held = memory.held.get(key)
        if held is None or held.revision != revision:
            memory.held[key] = Held(revision, now)


def falls_back(memory: Memory, adapter: Adapter, revision: str, disk: Container[str]) -> bool:
    """Whether an older revision can serve if the engine refuses this one: a change over, finished or cut short."""
    previous = memory.previous.get(adapter.key)
    return previous is not None and previous != revision and previous in disk


def update_refused(memory: Memory, adapter: Adapter, revision: str, message: str) -> None:
    """The engine refused new content while the old one can serve on: no ground for avoiding."""
    memory.refused[adapter.key] = Refused(source_id=adapter.source_id, revision=revision)
    memory.retries[adapter.key] = Retry(
        input=f"{adapter.source_id}@{revision}", failures=1, not_before=FOREVER, message=message
    )


def unloaded(memory: Memory, revision: str, now: float) -> None:
    """The name is gone from the engine; the files stay, since requests that are still queued may read them."""
    memory.unloaded[revision] = now


def let_go(memory: Memory, key: str) -> None:
    """This worker serves the adapter no longer: what it had is nothing to fall back to when it comes again."""
    memory.previous.pop(key, None)
    memory.held.pop(key, None)


def engine_restarted(memory: Memory, process: str | None, lost_at: float) -> None:
    """Another engine process than the one that was lost at `lost_at`: what that had in its cache is of no interest any
    more, and what it had only just loaded has proved nothing.

    An unknown process id keeps the history: it may be the same process.
    """
    if process is not None and process != memory.process:
        memory.history = [h for h in memory.history if h.process == process]
        memory.no_reset = set()
        memory.process = process
    memory.held = {k: h for k, h in memory.held.items() if lost_at - h.since >= PROVEN_SECONDS}
    memory.drains = {}


def agent_started(memory: Memory, process: str | None, now: float) -> None:
    """The first look of a new agent at the engine: a load that its predecessor began is over, one way or another.

    Another process than before is no evidence against that load: whatever ended the agent may have ended the engine.
    """
    if process is not None and process != memory.process:
        engine_restarted(memory, process, now)
        memory.attempts = []
    memory.attempts = [msgspec.structs.replace(a, ended=now) if a.ended is None else a for a in memory.attempts]


def forget(memory: Memory, live: dict[str, Adapter], now: float, keep_files: float) -> None:
    """Drop what belongs to adapters or waits that are no more. `live` must be a fresh list, by key."""
    for table in (
        memory.avoid, memory.retries, memory.previous, memory.held, memory.refused, memory.gone, memory.trials,
        memory.large,
    ):  # fmt: skip
        for key in [k for k in table if k not in live]:
            del table[key]
    for key, adapter in live.items():
        retry = memory.retries.get(key)
        if retry is not None and not _same_source(retry.input, adapter.source_id):
            del memory.retries[key]
        avoid = memory.avoid.get(key)
        if avoid is not None and avoid.source_id != adapter.source_id:
            del memory.avoid[key]
        if not refused_revision(memory, adapter):
            memory.refused.pop(key, None)
        if trial(memory, adapter) is None:
            memory.trials.pop(key, None)
    sources = {a.source_id for a in live.values()}
    memory.decisions = {s: d for s, d in memory.decisions.items() if s in sources}
    memory.refreshed = {s: t for s, t in memory.refreshed.items() if s in sources}
    memory.unloaded = {r: t for r, t in memory.unloaded.items() if now - t < keep_files}
    # Here too, and not only at the next load: there may be none before there is room, which their files take.
    memory.attempts = [a for a in memory.attempts if a.ended is None or now - a.ended < keep_files]
    poison.forget(memory, now)
