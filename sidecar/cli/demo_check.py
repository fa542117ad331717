"""What the demo holds the pool against: pure comparisons of a snapshot with what should be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sidecar.cli.demo_look import Answer, Snapshot
from sidecar.cli.demo_plan import Item, as_adapter
from sidecar.cli.demo_pool import Worker
from sidecar.core import placement

Targets = Mapping[str, tuple[str, ...]]
"""Adapter's key -> names of the workers that should hold it, in rank."""


class StepFailed(Exception):
    """A step did not end as it should. `seen`: a line for each difference; `logs`: workers whose logs may tell."""

    def __init__(self, expected: str, seen: Sequence[str], logs: Sequence[Worker] = ()) -> None:
        super().__init__(expected)
        self.expected = expected
        self.seen = tuple(seen)
        self.logs = tuple(logs)


def targets(
    items: Iterable[Item], members: Iterable[Worker], base_model: str, capacity: int, without: Worker | None = None
) -> Targets:
    """Where placement puts the adapters; `members` that aren't present, and `without`, count for percentages only."""
    adapters = [as_adapter(item, base_model) for item in items]
    workers = [
        placement.Worker(name=w.name, base_models=(base_model,), room=capacity, up=w.present and w is not without)
        for w in members
    ]
    return {key: found.targets for key, found in placement.place(adapters, workers).items()}


def misplaced(snapshot: Snapshot, items: Iterable[Item], workers: Sequence[Worker], wanted: Targets) -> list[str]:
    """Where the engines or the agents' words differ from the targets."""
    found = []
    for worker in workers:
        seen = snapshot.of(worker)
        if seen.served is None:
            found.append(f"{worker.name}: its engine does not answer")
        elif seen.record is None:
            found.append(f"{worker.name}: its agent does not answer")
        else:
            found += filter(None, (_difference(snapshot, item, worker, wanted) for item in items))
    return found


def _difference(snapshot: Snapshot, item: Item, worker: Worker, wanted: Targets) -> str:
    seen, entry = snapshot.of(worker), snapshot.of(worker).entry(item)
    said = f"{entry.state}{f' ({entry.message})' if entry.message else ''}" if entry else "nothing"
    if worker.name not in wanted[item.key]:
        return f"{worker.name}: its engine still serves {item.name}; its agent says {said}" if seen.serves(item) else ""
    if seen.serves(item) and seen.says_loaded(item):
        return ""
    listed = "lists" if seen.serves(item) else "does not list"
    return f"{worker.name}: its engine {listed} {item.name}; its agent says {said}"


def miscounted(snapshot: Snapshot, items: Iterable[Item], members: int, up: int) -> list[str]:
    """Where the number of engines that serve an adapter isn't what its distribution says of so many members."""
    found = []
    for item in items:
        holders, number = snapshot.holders(item), min(item.number(members), up)
        if len(holders) != number:
            found.append(f"{item.name} is on {len(holders)} engines ({names(holders)}) and not on {number}")
    return found


def moves_beyond(before: Mapping[str, frozenset[str]], after: Mapping[str, frozenset[str]], changed: str) -> list[str]:
    """Assignments (by adapter) that changed without being from or to the worker `changed`.

    An adapter that is wanted on more workers than before may also gain so many others.
    """
    found = []
    for name, old in before.items():
        new = after[name]
        gained, lost = new - old - {changed}, old - new - {changed}
        allowed = len(new) - len(old)
        if len(gained) > max(0, allowed) or (lost and changed not in new):
            found.append(f"{name} went from {names(old)} to {names(new)}")
    return found


def unlike(answers: Mapping[str, Sequence[Answer]], known: Mapping[str, Sequence[Answer]]) -> list[str]:
    """Adapters that gave an answer which is none of theirs: somebody else's weights."""
    return [
        f"{name} gave an answer that is not its own"
        for name, heard in answers.items()
        if any(all(answer.differs(own) for own in known[name]) for answer in heard)
    ]


def names(workers: Iterable[str]) -> str:
    """For people: sorted, with commas; "nobody" for none."""
    return ", ".join(sorted(workers)) or "nobody"
