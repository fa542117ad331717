"""Placement once more, literally and slowly, sharing no code with the product: what the tests hold it against.

`python -m tests.core.reference` fills in the answers in `vectors/placement-v1.json` after its questions were edited.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sidecar.core.placement import Assignment, Worker
from sidecar.model import Adapter, Distribution, Requirement, Selector, Source

VECTORS = Path(__file__).parent / "vectors" / "placement-v1.json"


def digest(*parts: str) -> int:
    framed = b"".join(len(p.encode()).to_bytes(4, "big") + p.encode() for p in ("lora-sidecar/hrw/v1", *parts))
    return int.from_bytes(hashlib.blake2b(framed, digest_size=8).digest(), "big")


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def points(adapter: Adapter, name: str) -> int:
    return mix(digest("adapter", adapter.namespace, adapter.name) ^ digest("worker", name))


def fits(adapter: Adapter, worker: Worker) -> bool:
    for key, value in adapter.selector.labels.items():
        if worker.labels.get(key) != value:
            return False
    for e in adapter.selector.expressions:
        has, is_in = e.key in worker.labels, worker.labels.get(e.key) in e.values
        if not {"In": is_in, "NotIn": not is_in, "Exists": has, "DoesNotExist": not has}[e.operator]:
            return False
    return adapter.base_model in worker.base_models and not worker.cordoned and not worker.terminating


def number(d: Distribution, members: int) -> int:
    if d.strategy == "all":
        return members
    if d.strategy == "fixed":
        return d.replicas if d.replicas < members else members
    exact = members * d.percentage // 100
    return 1 if exact == 0 and members and d.percentage else exact


def take(adapter: Adapter, candidates: list[Worker], count: int) -> list[Worker]:
    """One after the other, each time the best of those that are left."""
    left, taken = list(candidates), list[Worker]()
    while left and len(taken) < count:

        def appeal(w: Worker) -> tuple[bool, bool, int, int, str]:
            neighbours = [t for t in taken if t.zone == w.zone] if adapter.distribution.spread == "zone" else []
            return (adapter.key in w.avoids, w.resting, len(neighbours), -points(adapter, w.name), w.name)

        taken.append(min(left, key=appeal))
        left.remove(taken[-1])
    return taken


def place(adapters: list[Adapter], workers: list[Worker]) -> dict[str, Assignment]:
    """For workers that are distinct by UID and name."""
    used = {w.name: 0 for w in workers}
    result = {}
    for adapter in sorted(adapters, key=lambda a: (-a.priority, a.created, a.key)):
        members = [w for w in workers if fits(adapter, w)]
        candidates = [w for w in members if w.up]
        count = number(adapter.distribution, len(members))
        targets = take(adapter, [w for w in candidates if used[w.name] < w.room], count)
        waiting: list[str] = []
        if len(targets) < count:
            waiting = sorted(w.name for w in take(adapter, candidates, count) if w not in targets)
        for w in targets:
            used[w.name] += 1
        result[adapter.key] = Assignment(
            adapter=adapter.key,
            members=len(members),
            wanted=count,
            targets=tuple(w.name for w in targets),
            waiting=tuple(waiting),
            short=count - len(targets),
        )
    return result


def read_adapter(data: dict[str, Any]) -> Adapter:
    selector = data.get("selector", {})
    return Adapter(
        namespace=data["namespace"],
        name=data["name"],
        base_model=data["baseModel"],
        served_name=data["name"],
        source=Source(uri="file:///adapter"),
        distribution=Distribution(**data.get("distribution", {})),
        priority=data.get("priority", 0),
        created=data.get("created", 0),
        selector=Selector(
            labels=selector.get("matchLabels", {}),
            expressions=tuple(
                Requirement(key=e["key"], operator=e["operator"], values=tuple(e.get("values", ())))
                for e in selector.get("matchExpressions", ())
            ),
        ),
    )


def read_worker(data: dict[str, Any]) -> Worker:
    return Worker(
        name=data["name"],
        uid=data.get("uid", ""),
        zone=data.get("zone", ""),
        base_models=tuple(data["baseModels"]),
        labels=data.get("labels", {}),
        room=data["room"],
        up=data.get("up", True),
        cordoned=data.get("cordoned", False),
        terminating=data.get("terminating", False),
        resting=data.get("resting", False),
        avoids=frozenset(data.get("avoids", ())),
    )


def answer(case: dict[str, Any]) -> dict[str, Any]:
    placed = place([read_adapter(a) for a in case["adapters"]], [read_worker(w) for w in case["workers"]])
    return {key: written(a) for key, a in placed.items()}


def written(a: Assignment) -> dict[str, Any]:
    return {
        "members": a.members,
        "wanted": a.wanted,
        "targets": list(a.targets),
        "waiting": list(a.waiting),
        "short": a.short,
    }


def main() -> None:
    vectors = json.loads(VECTORS.read_text())
    for case in vectors["adapterHashes"]:
        case["hash"] = f"{digest('adapter', case['namespace'], case['name']):016x}"
    for case in vectors["workerHashes"]:
        case["hash"] = f"{digest('worker', case['name']):016x}"
    for case in vectors["scores"]:
        case["score"] = f"{mix(int(case['adapterHash'], 16) ^ int(case['workerHash'], 16)):016x}"
    for case in vectors["placements"]:
        case["expected"] = answer(case)
    VECTORS.write_text(json.dumps(vectors, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
