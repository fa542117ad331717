"""One worker as plain values: an engine's names, a disk, a memory, and an agent that can be killed after any step.

What an action does is cut into the steps between which a process can die. What was not saved by then is forgotten, and
so is every wait; the engine and the disk stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sidecar.core import outcome
from sidecar.core.memory import Memory, dump, restore
from sidecar.core.plan import plan
from sidecar.core.world import Fetch, Load, Plan, Swap, Unload, World
from sidecar.model import Adapter, State

from .worlds import NOW, decision, revision, world

Step = Callable[[], None]
PROCESS = "p1"


class Killed(Exception):
    """The agent's process is gone."""


class OneWorker:
    """`facts(worker)` gives the world's fields that the worker doesn't decide itself; `contents` is URI -> content."""

    def __init__(
        self,
        adapters: list[Adapter],
        facts: Callable[[OneWorker], dict[str, Any]],
        *,
        engine: dict[str, str] | None = None,
        disk: set[str] | None = None,
        memory: Memory | None = None,
        contents: dict[str, str] | None = None,
        refuses: frozenset[str] = frozenset(),
    ) -> None:
        self.adapters = adapters
        self.facts = facts
        self.engine = dict(engine or {})
        self.disk = set(disk or ())
        self.contents = contents or {}
        self.refuses = refuses
        self.now = NOW
        self.withdrawn: dict[str, float] = {}
        self.memory = memory or Memory(process=PROCESS)
        self.saved = dump(self.memory)
        self.log: list[str] = []
        self.killed_after: frozenset[int] = frozenset()
        self.steps = 0

    def world(self) -> World:
        """What the agent sees now."""
        known = {
            a.key: d for a in self.adapters if (d := self.memory.decisions.get(a.source_id)) is not None
        }  # fmt: skip
        fields: dict[str, Any] = {
            "owned": self.engine,
            "disk": self.disk,
            "memory": self.memory,
            "now": self.now,
            "withdrawn": self.withdrawn,
            "decisions": known,
        }
        return world(*self.adapters, **(fields | self.facts(self)))

    def run(self, killed_after: frozenset[int] = frozenset()) -> dict[str, Any]:
        """Go on until nothing changes any more, killed after these steps; returns the end state."""
        self.killed_after = killed_after
        quiet = 0
        for _ in range(400):
            before = (dict(self.engine), set(self.disk), self.steps)
            try:
                made = self._pass()
            except Killed:
                self._start_anew()
                quiet = 0
                continue
            quiet = quiet + 1 if before == (self.engine, self.disk, self.steps) and not made.actions else 0
            if quiet > 12:
                return self._end(made)
            self.now = min(max(made.wake_at, self.now + 0.05), self.now + 60.0)
        raise AssertionError("it never comes to rest: " + "; ".join(self.log[-20:]))

    def _pass(self) -> Plan:
        seen = self.world()
        made = plan(seen)
        self.memory.drains, self.memory.leaving = dict(made.drains), dict(made.leaving)
        routed = {s.served_name for s in made.statuses.values() if s.routed}
        self.withdrawn = {n: self.withdrawn.get(n, self.now) for n in self.engine if n not in routed}
        self._save()
        for action in made.actions:
            for step in self._steps_of(action):
                step()
                self.steps += 1
                if self.steps in self.killed_after:
                    raise Killed
        self._save()
        return made

    def _start_anew(self) -> None:
        self.log.append(f"killed after step {self.steps}")
        self.memory = restore(self.saved, self.now)
        self.withdrawn = {}
        self.now += 1.0

    def _save(self) -> None:
        self.saved = dump(self.memory)

    def _end(self, made: Plan) -> dict[str, Any]:
        told = {k: (s.state, s.revision, s.routed, s.avoid) for k, s in made.statuses.items()}
        return {"engine": self.engine, "disk": self.disk, "told": told}

    def _adapter(self, key: str) -> Adapter:
        return next(a for a in self.adapters if a.key == key)

    # -- what actions do

    def _steps_of(self, action: Fetch | Load | Unload | Swap) -> Iterator[Step]:
        self.log.append(f"{self.now - NOW:.2f} {action}"[:120])
        if isinstance(action, Fetch):
            yield from self._fetch(action)
        elif isinstance(action, Load):
            yield from self._load(action.key, action.name, action.revision)
        elif isinstance(action, Unload):
            yield from self._unload(action.name, action.revision)
            yield lambda: outcome.let_go(self.memory, action.key)
            yield self._save
        else:
            yield from self._unload(action.name, action.old)
            yield from self._load(action.key, action.name, action.new)
            if action.name not in self.engine:
                yield from self._load(action.key, action.name, action.old)

    def _fetch(self, action: Fetch) -> Iterator[Step]:
        adapter = self._adapter(action.key)
        found = revision(self.contents[adapter.source.uri])
        if action.expected not in (None, found):
            raise AssertionError(f"{action} asks for what the origin doesn't have")
        yield lambda: self.disk.add(found)
        yield lambda: outcome.fetched(self.memory, adapter, decision(adapter, found, refresh=action.refresh), self.now)
        yield self._save

    def _load(self, key: str, name: str, rev: str) -> Iterator[Step]:
        adapter = self._adapter(key)
        if rev not in self.disk or name in self.engine:
            raise AssertionError(f"{name} from {rev}: not here, or loaded already")

        def begins() -> None:
            outcome.load_begins(self.memory, key, name, rev, PROCESS, self.now)
            self._save()

        def note() -> None:
            outcome.load_ended(self.memory, key, rev, self.now)
            if rev not in self.refuses:
                outcome.loaded(self.memory, adapter, rev, self.now)
            elif outcome.falls_back(self.memory, adapter, rev, self.disk):
                outcome.update_refused(self.memory, adapter, rev, "refused")
            else:
                outcome.failed(self.memory, adapter, rev, "refused", outcome.LOAD, self.now, 1.0)

        yield begins
        if rev not in self.refuses:
            yield lambda: self.engine.update({name: rev})
        yield note

    def _unload(self, name: str, rev: str) -> Iterator[Step]:
        if self.engine.get(name) != rev:
            raise AssertionError(f"{name} is not loaded from {rev}")

        def gone() -> None:
            del self.engine[name]

        yield gone
        yield lambda: outcome.unloaded(self.memory, rev, self.now)
        yield self._save


def states(end: dict[str, Any]) -> dict[str, State]:
    """State by resource name."""
    return {k.partition("/")[2]: told[0] for k, told in end["told"].items()}
