"""What a worker shows on its own pod: labels that route, annotations that tell (pure).

Annotations of one object may hold 256 KiB together, and a patch beyond that is refused as a whole, so that *nothing*
is told. Ours stay under half of it: first messages are cut, then entries become state and 12 hex digits, then
`Waiting` ones are left out, then whatever is least urgent; the summary says `truncated`. Labels route traffic and are
never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

from sidecar.core.memory import MESSAGE_LIMIT
from sidecar.core.world import Status
from sidecar.model import ADAPTER_PREFIX, LABEL_PREFIX, Entry, Frozen, Head, Record, State

WORKER = f"{LABEL_PREFIX}/worker"
SUMMARY = f"{LABEL_PREFIX}/summary"
CORDON = f"{LABEL_PREFIX}/cordon"
CAPACITY = f"{LABEL_PREFIX}/capacity"
POOL = f"{LABEL_PREFIX}/pool"
ROUTED = "loaded"
LIMIT = 128 * 1024

_PENDING = (State.PENDING, State.DOWNLOADING, State.LOADING)
_SHOWN_OF_HEAD = ("base_models", "engine_version", "capacity", "sidecar")
_FAILED = (State.FAILED, State.REJECTED)
# What stays when even the shortest form of everything doesn't fit.
_URGENCY = (
    *(State.LOADED, State.FAILED, State.REJECTED, State.DRAINING),
    *(State.LOADING, State.DOWNLOADING, State.PENDING, State.WAITING),
)


class Shown(Frozen, frozen=True, kw_only=True):
    """Everything on the own pod that is the agent's: complete, so that what isn't in it is to be removed."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Told(Frozen, frozen=True, omit_defaults=False):
    state: State
    revision: str
    servedName: str
    since: str
    message: str


class _Short(Frozen, frozen=True):
    state: State
    revision: str = ""


class _Worker(Frozen, frozen=True, omit_defaults=False):
    baseModel: str
    engine: str
    capacity: int
    sidecar: str


def adapter_key(name: str) -> str:
    """The key of label and annotation for the resource `name`."""
    return f"{ADAPTER_PREFIX}/{name}"


def is_ours(key: str) -> bool:
    """Whether a label or annotation of the own pod is written by the agent, and so may be removed by it."""
    return key.startswith(f"{ADAPTER_PREFIX}/") or key in (WORKER, SUMMARY)


def show(head: Head, base_model: str, entries: Iterable[Entry], routed: Iterable[str]) -> Shown:
    """Labels and annotations for a worker's record; `routed` holds the `namespace/name` of what gets traffic here."""
    ordered = sorted(entries, key=lambda e: e.adapter)
    annotations, cut = _fitting(ordered, LIMIT - _reserve(head, base_model, ordered))
    annotations[WORKER] = _worker(head, base_model)
    annotations[SUMMARY] = summary(ordered, truncated=cut)
    return Shown(labels={adapter_key(_name(key)): ROUTED for key in sorted(routed)}, annotations=annotations)


def routed_here(statuses: Mapping[str, Status], engine_known: bool, shown: Mapping[str, str]) -> frozenset[str]:
    """Resource names that should carry the label.

    While the engine's content is unknown no label is taken away (and none is added): `shown` are the pod's labels now.
    """
    if engine_known:
        return frozenset(_name(key) for key, status in statuses.items() if status.routed)
    prefix = f"{ADAPTER_PREFIX}/"
    return frozenset(key.removeprefix(prefix) for key, value in shown.items() if key.startswith(prefix) and value)


def news(before: Record, now: Record) -> Literal["none", "passing", "lasting"]:
    """What of `now` isn't shown by what was written for `before`: "passing" if all of it are states that pass by
    themselves, Pending, Downloading or Loading. They tell people something, but route nothing; what comes next may.
    """
    if any(getattr(before.head, name) != getattr(now.head, name) for name in _SHOWN_OF_HEAD):
        return "lasting"
    old = {e.adapter: e for e in before.entries}
    if not old.keys() <= {e.adapter for e in now.entries}:
        return "lasting"
    fresh = [e for e in now.entries if _said(old.get(e.adapter)) != _said(e)]
    if not fresh:
        return "none"
    return "passing" if all(e.state in _PENDING for e in fresh) else "lasting"


def _said(entry: Entry | None) -> tuple[State, str, str, str] | None:
    return (entry.state, entry.revision, entry.served_name, entry.message) if entry is not None else None


def summary(entries: Iterable[Entry], *, truncated: bool = False) -> str:
    """`loaded=2 pending=1 failed=0`, with waiting and draining if there are any, and `truncated`."""
    states = [e.state for e in entries]
    parts = [
        f"loaded={states.count(State.LOADED)}",
        f"pending={sum(map(states.count, _PENDING))}",
        f"failed={sum(map(states.count, _FAILED))}",
    ]
    parts += [f"{s.value.lower()}={n}" for s in (State.WAITING, State.DRAINING) if (n := states.count(s))]
    return " ".join([*parts, "truncated"] if truncated else parts)


def difference(now: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """The part of a merge patch that turns our keys in `now` into `wanted`; None removes. Other keys stay untouched."""
    change: dict[str, str | None] = {key: None for key in now if is_ours(key) and key not in wanted}
    change.update({key: value for key, value in wanted.items() if now.get(key) != value})
    return change


def moment(seconds: float) -> str:
    """Seconds since the epoch as Kubernetes writes times: `2026-01-31T08:00:00Z`."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _worker(head: Head, base_model: str) -> str:
    engine = f"vllm {head.engine_version}" if head.engine_version else ""
    return _json(_Worker(baseModel=base_model, engine=engine, capacity=head.capacity, sidecar=head.sidecar))


def _reserve(head: Head, base_model: str, entries: list[Entry]) -> int:
    """Bytes of what is there besides the adapters' own annotations."""
    # One more: under the limit, not at it.
    return _size(WORKER, _worker(head, base_model)) + _size(SUMMARY, summary(entries, truncated=True)) + 1


def _fitting(entries: list[Entry], room: int) -> tuple[dict[str, str], bool]:
    for messages in (MESSAGE_LIMIT, 64, 0):
        whole = {adapter_key(_name(e.adapter)): _long(e, messages) for e in entries}
        if _total(whole) <= room:
            return whole, messages < MESSAGE_LIMIT and any(len(e.message) > messages for e in entries)
    brief = {adapter_key(_name(e.adapter)): _brief(e) for e in entries}
    if _total(brief) <= room:
        return brief, True
    return _filled([e for e in entries if e.state != State.WAITING], room), True


def _filled(entries: list[Entry], room: int) -> dict[str, str]:
    """As many of `entries` as there is room for, the most urgent first."""
    result: dict[str, str] = {}
    for entry in sorted(entries, key=lambda e: (_URGENCY.index(e.state), e.adapter)):
        key, value = adapter_key(_name(entry.adapter)), _brief(entry)
        room -= _size(key, value)
        if room < 0:
            break
        result[key] = value
    return result


def _long(entry: Entry, messages: int) -> str:
    return _json(
        _Told(
            state=entry.state,
            revision=entry.revision,
            servedName=entry.served_name,
            since=moment(entry.since),
            message=entry.message[:messages],
        )
    )


def _brief(entry: Entry) -> str:
    return _json(_Short(entry.state, entry.revision.removeprefix("sha256:")[:12]))


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _size(key: str, value: str) -> int:
    return len(key.encode()) + len(value.encode())


def _total(annotations: Mapping[str, str]) -> int:
    return sum(_size(key, value) for key, value in annotations.items())
