"""What this worker tells: its record's entries, and the rows of /v1/adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.core.memory import MESSAGE_LIMIT, Memory, refused_revision
from sidecar.core.placement import Assignment
from sidecar.core.world import Status
from sidecar.model import Adapter, Decision, Entry


def entries(
    adapters: Mapping[str, Adapter],
    statuses: Mapping[str, Status],
    before: Mapping[str, Entry],
    decisions: Mapping[str, Decision],
    memory: Memory,
    now: float,
    shown: frozenset[str] | None = None,
    coming: Mapping[str, Decision] | None = None,
) -> tuple[Entry, ...]:
    """The record's entries, one for each adapter that this worker has something to say about.

    `shown` are the served names that the platform sends here; None where there is no such platform.
    `coming` is, by key, what is being downloaded to decide on it.
    `since` stays while state and revision stay. Progress in bytes is not told: it would change the record each moment.
    """
    result = []
    for key in sorted(statuses):
        status, old = statuses[key], before.get(key)
        same = old is not None and (old.state, old.revision) == (status.state, status.revision)
        adapter = adapters.get(key)
        decision = decisions.get(key)
        result.append(
            Entry(
                adapter=key,
                state=status.state,
                revision=status.revision,
                served_name=status.served_name or (adapter.served_name if adapter else ""),
                since=old.since if same and old is not None else round(now, 3),
                message=status.message[:MESSAGE_LIMIT],
                avoid=status.avoid,
                refused=refused_revision(memory, adapter) if adapter else "",
                hidden=shown is not None and status.routed and status.served_name not in shown,
                gone=decision is not None and memory.gone.get(key) == decision.refresh,
                decision=decision if decision is not None and decision.listing else None,
                coming=coming.get(key) if coming else None,
            )
        )
    return tuple(result)


def row(
    adapter: Adapter,
    me: str,
    assignment: Assignment | None,
    status: Status | None,
    decision: Decision | None,
    since: float,
    progress: tuple[int, int] | None,
) -> dict[str, Any]:
    """One row of /v1/adapters. `rank` counts from 0 among the targets; null for who is none."""
    targets = list(assignment.targets) if assignment else []
    done, total = progress or (0, 0)
    return {
        "namespace": adapter.namespace,
        "name": adapter.name,
        "servedName": adapter.served_name,
        "baseModel": adapter.base_model,
        "source": adapter.source.uri,
        "strategy": adapter.distribution.strategy,
        "priority": adapter.priority,
        "wantedHere": me in targets,
        "rank": targets.index(me) if me in targets else None,
        "targets": targets,
        "members": assignment.members if assignment else 0,
        "wanted": assignment.wanted if assignment else 0,
        "waiting": list(assignment.waiting) if assignment else [],
        "state": status.state.value if status else None,
        "revision": status.revision if status else "",
        "wantedRevision": decision.revision if decision else None,
        "refresh": decision.refresh if decision else None,
        "routed": bool(status and status.routed),
        "message": status.message if status else "",
        "since": since,
        "bytesDone": done,
        "bytesTotal": total,
    }
