"""The status of one adapter as the whole pool sees it, and what in it is worth an Event (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from sidecar.core.annotations import moment
from sidecar.core.memory import unspoken
from sidecar.core.placement import Assignment
from sidecar.model import Adapter, Entry, Frozen, State

MAX_WORKERS = 50
MESSAGE_LIMIT = 256

ConditionStatus = Literal["True", "False", "Unknown"]
NO_CANDIDATES = "NoCandidates"
PROGRESSING = "Progressing"


class Condition(Frozen, frozen=True, kw_only=True, rename="camel", omit_defaults=False):
    """As in metav1.Condition."""

    type: str
    status: ConditionStatus
    reason: str
    message: str
    observed_generation: int
    last_transition_time: str = ""


class WorkerStatus(Frozen, frozen=True, kw_only=True):
    """One worker's line."""

    name: str
    state: State
    revision: str = ""
    message: str = ""


class AdapterStatus(Frozen, frozen=True, kw_only=True, rename="camel", omit_defaults=False):
    """What is written, by the names that the resource's schema has."""

    observed_generation: int
    targets: int
    loaded: int
    failed: int
    summary: str
    conditions: tuple[Condition, ...]
    workers: tuple[WorkerStatus, ...] = ()
    revision: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def under_way(self) -> bool:
        """Whether it will change by itself: workers are on their way to what is wanted, and none has failed."""
        return any(c.type == "Ready" and c.reason == PROGRESSING for c in self.conditions)


class Pool(Frozen, frozen=True, kw_only=True):
    """What the aggregation needs besides the adapter: everybody's entries for it, and the pool's base models."""

    entries: Mapping[str, Entry]
    base_models: tuple[str, ...] = ()


def aggregate(
    adapter: Adapter, assignment: Assignment | None, revision: str | None, pool: Pool, rejected: str = ""
) -> AdapterStatus:
    """The status without times. `rejected`: why the pool doesn't serve it at all (its name is another's)."""
    targets = assignment.targets if assignment else ()
    states = {name: pool.entries.get(name) for name in targets}
    loaded = [n for n, e in states.items() if e is not None and _has(e, revision)]
    failed = [n for n, e in states.items() if e is not None and e.state in (State.FAILED, State.REJECTED)]
    placed = _placed(adapter, assignment, pool, rejected)
    ready = _ready(adapter, targets, loaded, failed, pool, placed)
    return AdapterStatus(
        observed_generation=adapter.generation,
        targets=len(targets),
        loaded=len(loaded),
        failed=len(failed),
        summary=f"{len(loaded)}/{len(targets)}",
        revision=revision or msgspec.UNSET,
        conditions=(placed, ready),
        workers=_workers(targets, pool.entries),
    )


def _has(entry: Entry, revision: str | None) -> bool:
    return entry.state == State.LOADED and revision in (None, entry.revision)


def _workers(targets: tuple[str, ...], entries: Mapping[str, Entry]) -> tuple[WorkerStatus, ...]:
    """Targets in rank, then the others by name; those that say nothing yet are Pending."""
    others = sorted(n for n in entries if n not in targets)
    lines = []
    for name in [*targets, *others][:MAX_WORKERS]:
        entry = entries.get(name)
        if entry is None:
            lines.append(WorkerStatus(name=name, state=State.PENDING))
        else:
            lines.append(
                WorkerStatus(
                    name=name, state=entry.state, revision=entry.revision, message=entry.message[:MESSAGE_LIMIT]
                )
            )
    return tuple(lines)


def _placed(adapter: Adapter, assignment: Assignment | None, pool: Pool, rejected: str) -> Condition:
    def told(status: ConditionStatus, reason: str, message: str) -> Condition:
        return Condition(
            type="Placed", status=status, reason=reason, message=message, observed_generation=adapter.generation
        )

    if rejected:
        return told("False", "NameConflict", rejected)
    if assignment is None or not assignment.members:
        return told("False", NO_CANDIDATES, _nobody(adapter, pool))
    if assignment.targets:
        short = f"; {assignment.short} of {assignment.wanted} wanted find no room" if assignment.short else ""
        return told("True", "Placed", f"on {_some(assignment.targets)}{short}")
    if not assignment.wanted:
        return told("True", "NoneWanted", f"no worker is wanted by spec.distribution ({_wish(adapter)})")
    if assignment.waiting:
        return told("False", "NoRoom", f"no room on {_some(assignment.waiting)}: other adapters come first")
    return told("False", "NoneUp", f"{assignment.members} workers would fit, but none has an engine that answers")


def _wish(adapter: Adapter) -> str:
    distribution = adapter.distribution
    number = distribution.replicas if distribution.strategy == "fixed" else distribution.percentage
    return f"{distribution.strategy} {number}"


def _nobody(adapter: Adapter, pool: Pool) -> str:
    if adapter.base_model not in pool.base_models:
        seen = ", ".join(pool.base_models) or "none yet"
        return f"no worker of this pool serves {adapter.base_model}; base models seen: {seen}"
    return "no worker of this pool matches spec.workers, or those that do are cordoned or ending"


def _ready(
    adapter: Adapter, targets: tuple[str, ...], loaded: list[str], failed: list[str], pool: Pool, placed: Condition
) -> Condition:
    def told(status: ConditionStatus, reason: str, message: str) -> Condition:
        return Condition(
            type="Ready", status=status, reason=reason, message=message, observed_generation=adapter.generation
        )

    if not targets:
        return told("False", placed.reason if placed.status == "False" else "NoneWanted", placed.message)
    if len(loaded) == len(targets):
        return told("True", "Loaded", f"loaded on all {len(targets)} targets")
    if failed:
        entry = pool.entries[failed[0]]
        return told("False", entry.state.value, f"{failed[0]}: {entry.message or 'no reason given'}"[:MESSAGE_LIMIT])
    missing = [n for n in targets if n not in loaded]
    return told("False", PROGRESSING, f"loaded on {len(loaded)} of {len(targets)} targets; missing {_some(missing)}")


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def digest(status: AdapterStatus) -> str:
    """Names the content, whatever the times are and the order of what the API holds as a map."""
    bare = sorted(
        (msgspec.structs.replace(c, last_transition_time="") for c in status.conditions), key=lambda c: c.type
    )
    workers = sorted(status.workers, key=lambda w: w.name)
    return _hash(msgspec.structs.replace(status, conditions=tuple(bare), workers=tuple(workers)))


def digest_of(document: msgspec.Raw) -> str:
    """`digest` of a status as the API shows it; "" for one that can't be read or is none."""
    try:
        status = msgspec.json.decode(document, type=AdapterStatus | None)
    except msgspec.MsgspecError:
        return ""
    return digest(status) if status is not None else ""


def _hash(status: AdapterStatus) -> str:
    return hashlib.blake2b(msgspec.json.encode(status, order="deterministic"), digest_size=8).hexdigest()


class Transition(Frozen, frozen=True):
    """A condition's status, and since when it has it."""

    status: str
    since: str


def timed(status: AdapterStatus, before: Mapping[str, Transition], now: float) -> AdapterStatus:
    """With lastTransitionTime: it moves only when a condition's status changes."""
    conditions = []
    for condition in status.conditions:
        old = before.get(condition.type)
        since = old.since if old is not None and old.status == condition.status and old.since else moment(now)
        conditions.append(msgspec.structs.replace(condition, last_transition_time=since))
    return msgspec.structs.replace(status, conditions=tuple(conditions))


class Happening(Frozen, frozen=True, kw_only=True):
    """Worth an Event about the adapter."""

    reason: Literal["Loaded", "Failed", "Rejected", "Moved", "StatusConflict"]
    message: str
    warning: bool = False


def happenings(before: AdapterStatus | None, after: AdapterStatus, was_ready: bool) -> list[Happening]:
    """What happened between two statuses; `before` None: only `was_ready` is known of it."""
    found = []
    old = {w.name: w for w in before.workers} if before else {}
    for worker in after.workers:
        known = old.get(worker.name)
        if worker.state not in (State.FAILED, State.REJECTED) or (known is not None and known.state == worker.state):
            continue
        reason: Literal["Failed", "Rejected"] = "Failed" if worker.state is State.FAILED else "Rejected"
        found.append(Happening(reason=reason, message=f"{worker.name}: {unspoken(worker.message)}", warning=True))
    ready = any(c.type == "Ready" and c.status == "True" for c in after.conditions)
    if ready and not was_ready:
        found.append(Happening(reason="Loaded", message=f"loaded on {_some(w.name for w in _loaded(after))}"))
    if before is not None:
        found += _moves(before, after)
    return found[:5]


def _loaded(status: AdapterStatus) -> list[WorkerStatus]:
    return [w for w in status.workers if w.state is State.LOADED]


def _moves(before: AdapterStatus, after: AdapterStatus) -> list[Happening]:
    old, new = ({w.name for w in _loaded(s)} for s in (before, after))
    left, joined = sorted(old - new), sorted(new)
    if not left or not new:
        return []
    return [Happening(reason="Moved", message=f"from {_some(left)}; loaded on {_some(joined)}")]
