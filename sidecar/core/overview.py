"""Adapters and pods as the pods' annotations tell: what `lora-sidecar status` shows (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from sidecar.core.annotations import ROUTED, SUMMARY, WORKER, adapter_key
from sidecar.model import ADAPTER_PREFIX, Frozen

_SHORT_REVISION = 12

T = TypeVar("T", bound=msgspec.Struct)


class Cell(Frozen, frozen=True, kw_only=True, rename="camel"):
    """One adapter on one pod. `routed`: the pod carries the adapter's label, so a Service's selector finds it."""

    state: str = ""
    revision: str = ""
    served_name: str = ""
    since: str = ""
    message: str = ""
    routed: bool = False


class PodLine(Frozen, frozen=True, kw_only=True, rename="camel", omit_defaults=False):
    """One worker. `adapters` by resource name."""

    name: str
    namespace: str
    pool: str = ""
    base_model: str = ""
    engine: str = ""
    capacity: int | None = None
    sidecar: str = ""
    summary: str = ""
    terminating: bool = False
    cordoned: bool = False
    adapters: dict[str, Cell] = {}


class _Worker(Frozen, frozen=True, rename="camel"):
    base_model: str = ""
    engine: str = ""
    capacity: int | None = None
    sidecar: str = ""


def pod_line(
    name: str,
    namespace: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    *,
    pool: str,
    cordoned: bool,
    terminating: bool,
) -> PodLine:
    """Read one pod's labels and annotations; what can't be read is left empty."""
    worker = _decoded(annotations.get(WORKER, "{}"), _Worker) or _Worker()
    prefix = f"{ADAPTER_PREFIX}/"
    names = {key.removeprefix(prefix) for key in (*labels, *annotations) if key.startswith(prefix)}
    cells = {}
    for adapter in sorted(names):
        key = adapter_key(adapter)
        cell = _decoded(annotations.get(key, "{}"), Cell) or Cell(state="?")
        cells[adapter] = msgspec.structs.replace(cell, routed=labels.get(key) == ROUTED)
    return PodLine(
        name=name,
        namespace=namespace,
        pool=pool,
        base_model=worker.base_model,
        engine=worker.engine,
        capacity=worker.capacity,
        sidecar=worker.sidecar,
        summary=annotations.get(SUMMARY, ""),
        terminating=terminating,
        cordoned=cordoned,
        adapters=cells,
    )


def _decoded(text: str, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(text.encode(), type=kind)
    except msgspec.MsgspecError:
        return None


def matrix(pods: Iterable[PodLine]) -> list[tuple[str, ...]]:
    """Header and rows: adapters by pods. A loaded copy that gets no traffic is marked with `*`."""
    ordered = sorted(pods, key=lambda p: (p.namespace, p.name))
    adapters = sorted({name for pod in ordered for name in pod.adapters})
    header = ("ADAPTER", "LOADED", *_short_names([p.name for p in ordered]))
    rows: list[tuple[str, ...]] = [header]
    for adapter in adapters:
        cells = [pod.adapters.get(adapter) for pod in ordered]
        known = [c for c in cells if c is not None]
        loaded = sum(1 for c in known if c.state == "Loaded")
        rows.append((adapter, f"{loaded}/{len(known)}", *(_cell(c) for c in cells)))
    return rows


def long_table(pods: Iterable[PodLine]) -> list[tuple[str, ...]]:
    """Header and rows: one line for each adapter on each pod, with everything that is told."""
    rows: list[tuple[str, ...]] = [("ADAPTER", "POD", "STATE", "ROUTED", "REVISION", "SERVED NAME", "SINCE", "MESSAGE")]
    lines = [(adapter, pod.name, cell) for pod in pods for adapter, cell in pod.adapters.items()]
    for adapter, pod_name, cell in sorted(lines, key=lambda line: line[:2]):
        rows.append(
            (
                adapter,
                pod_name,
                cell.state or "-",
                "yes" if cell.routed else "no",
                cell.revision.removeprefix("sha256:")[:_SHORT_REVISION] or "-",
                cell.served_name or adapter,
                cell.since or "-",
                cell.message,
            )
        )
    return rows


def pods_table(pods: Iterable[PodLine]) -> list[tuple[str, ...]]:
    """Header and rows: the workers themselves."""
    rows: list[tuple[str, ...]] = [("POD", "POOL", "BASE MODEL", "ENGINE", "CAPACITY", "STATE", "SUMMARY")]
    for pod in sorted(pods, key=lambda p: (p.namespace, p.name)):
        state = "ending" if pod.terminating else "cordoned" if pod.cordoned else "ok" if pod.summary else "silent"
        capacity = "-" if pod.capacity is None else str(pod.capacity)
        rows.append((pod.name, pod.pool, pod.base_model or "-", pod.engine or "-", capacity, state, pod.summary or "-"))
    return rows


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return cell.state + ("*" if cell.state == "Loaded" and not cell.routed else "")


def _short_names(names: list[str]) -> list[str]:
    """Without what all of them begin with, up to the last dash in it: pods of one Deployment differ in their tails."""
    if len(names) < 2:
        return names
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    cut = first.rfind("-", 0, same) + 1
    return [name[cut:] or name for name in names]
