"""The whole pool as one table, adapters by workers, for the web page."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidecar.model import Frozen, Problem
from sidecar.ports import Row

# More cells than this neither fit on a screen nor into a browser's patience; the page then asks for a name.
MAX_ADAPTERS = 200
MAX_WORKERS = 100
MAX_PROBLEMS = 50


class _Adapter(Frozen, frozen=True, rename="camel", omit_defaults=False, kw_only=True):
    name: str
    namespace: str = ""
    served_name: str = ""
    targets: tuple[str, ...] | None = ()
    revision: str | None = ""
    message: str | None = ""
    bytes_done: int | None = 0
    bytes_total: int | None = 0

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class _Cell(Frozen, frozen=True, omit_defaults=False, kw_only=True):
    state: str = ""
    revision: str | None = ""
    message: str | None = ""


class _Worker(Frozen, frozen=True, rename="camel", omit_defaults=False, kw_only=True):
    name: str
    address: str = ""
    zone: str = ""
    self: bool = False
    state: str = "unknown"
    since: float | None = None
    heard: float | None = None
    engine: str | None = ""
    engine_up: bool | None = None
    capacity: int | None = None
    cordoned: bool = False
    resting: bool = False
    adapters: dict[str, _Cell] = {}


def matrix(
    *,
    pool: str,
    worker: str,
    adapters: Sequence[Row],
    workers: Sequence[Row],
    problems: Sequence[Problem],
    wanted: str = "",
) -> Row:
    """What the page shows: the rows whose key or served name contains `wanted`, at most `MAX_ADAPTERS` of them.

    `adapters` and `workers` are rows as in AgentView. An adapter that only another worker knows has a row too.
    `total` says how many there are, `counts` sums the states on live workers.
    """
    known = {adapter.key: adapter for adapter in msgspec.convert(list(adapters), list[_Adapter])}
    columns = msgspec.convert(list(workers), list[_Worker])
    counts: dict[str, int] = {}
    for column in columns:
        for key, cell in column.adapters.items():
            if column.state == "alive":
                counts[cell.state] = counts.get(cell.state, 0) + 1
            if key not in known:
                namespace, _, name = key.rpartition("/")
                known[key] = _Adapter(namespace=namespace, name=name)
    text = wanted.casefold()
    rows = [
        adapter for key, adapter in known.items() if text in key.casefold() or text in adapter.served_name.casefold()
    ]
    rows.sort(key=lambda adapter: adapter.key)
    # The own worker and the living first: of too many, those are cut that say least.
    shown = sorted(columns, key=lambda column: (not column.self, column.state != "alive", column.name))[:MAX_WORKERS]
    shown.sort(key=lambda column: column.name)
    return {
        "pool": pool,
        "worker": worker,
        "total": {"adapters": len(known), "matching": len(rows), "workers": len(columns)},
        "alive": sum(column.state == "alive" for column in columns),
        "counts": counts,
        "workers": [_column(column) for column in shown],
        "adapters": [_row(adapter, shown) for adapter in rows[:MAX_ADAPTERS]],
        "problems": list(problems[:MAX_PROBLEMS]),
        "problemsTotal": len(problems),
    }


def _column(worker: _Worker) -> Row:
    fields = msgspec.to_builtins(worker)
    fields.pop("adapters", None)
    return {"loaded": sum(cell.state == "Loaded" for cell in worker.adapters.values()), **fields}


def _row(adapter: _Adapter, workers: Sequence[_Worker]) -> Row:
    targets = frozenset(adapter.targets or ())
    return {
        "key": adapter.key,
        "servedName": adapter.served_name,
        "revision": adapter.revision,
        "message": adapter.message,
        "bytesDone": adapter.bytes_done,
        "bytesTotal": adapter.bytes_total,
        "cells": [_cell(adapter.key, column, column.name in targets) for column in workers],
    }


def _cell(key: str, worker: _Worker, target: bool) -> Row | None:
    cell = worker.adapters.get(key)
    if cell is None:
        return {"target": True} if target else None
    return {"state": cell.state, "revision": cell.revision, "message": cell.message, "target": target}
