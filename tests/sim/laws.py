"""The laws, watched from outside: what the engines hold, and what the agents say about it."""

from __future__ import annotations

import asyncio
from functools import partial

from sidecar.core.placement import place
from sidecar.core.sight import as_peer, worker_of
from sidecar.core.world import World
from sidecar.model import State

from .pool import SimPool
from .world import DIRECTORY, revision

LONGEST_SWAP = 3.0


class Broken(AssertionError):
    """A law was broken."""


class Watcher:
    """Looks at a pool all the time. `excuse(seconds)`: a sudden death may cost service for so long."""

    def __init__(self, pool: SimPool) -> None:
        self.pool = pool
        self.faults: list[str] = []
        self.log: list[str] = []
        self._served: dict[str, float] = {}
        self._excused_until = 0.0
        self._sudden = -60.0
        self._watched: set[str] = set()
        self._routed: dict[tuple[str, str], float] = {}
        self._stale: dict[str, float] = {}

    def note(self, text: str) -> None:
        """Keep an event for the report of a failure."""
        self.log.append(f"{asyncio.get_running_loop().time():9.2f} {text}")

    def excuse(self, seconds: float) -> None:
        """Something dies now without a word: for so long an adapter may be served nowhere."""
        self._sudden = asyncio.get_running_loop().time()
        self._excused_until = max(self._excused_until, asyncio.get_running_loop().time() + seconds)

    def attach(self) -> None:
        """Hear of every engine call."""
        for worker in self.pool.workers.values():
            if worker.name not in self._watched:
                self._watched.add(worker.name)
                worker.engine.on_change = partial(self._engine_event, worker.name)

    def _fault(self, text: str) -> None:
        self.note(f"BROKEN {text}")
        self.faults.append(text)

    def _engine_event(self, worker: str, what: str, name: str) -> None:
        self.note(f"{worker}: {what} {name}")
        if what == "died":
            self.excuse(900)
        if what == "unload":
            self._check_unload(worker, name)

    def _check_unload(self, worker: str, name: str) -> None:
        """Routed away before, for the drain's time; or alone, back to back."""
        record = self.pool.network.records.get(worker)
        backend = self.pool.workers[worker].backend
        adapter = next((a for a in backend.adapters or () if a.served_name == name), None)
        # The engine takes a moment for what it was asked before.
        if self._stale_for(worker) > 0.2:
            self._fault(f"{worker} unloads {name} while its lists are stale")
        entry = next((e for e in record.entries if e.served_name == name), None) if record else None
        if adapter is None or entry is None or entry.state in (State.DRAINING, State.REJECTED):
            drained = asyncio.get_running_loop().time() - self._routed.get((worker, name), -60.0)
            if drained < 1.8:
                self._fault(f"{worker} unloads {name} after {drained:.2f} s of drain")
            # What a peer reported up to 10 s ago may have died since: no protocol survives that.
            lately = asyncio.get_running_loop().time() - self._sudden < 10.0
            # An engine that died of it may not load it again; what serves stays, in quarantine too.
            must = adapter is not None and self._has_room(adapter.key)
            if must and not lately and not self._elsewhere(worker, name):
                self._fault(f"{worker} unloads {name}, the last copy")
            return
        if entry.state == State.LOADING and not self._elsewhere(worker, name):
            return
        if entry.state == State.LOADING:
            self.note(f"{worker} swaps {name} without a drain")
            return
        self._fault(f"{worker} unloads {name} in state {entry.state}")

    def _stale_for(self, worker: str) -> float:
        """Seconds for which the worker's lists have been stale, as far as was seen."""
        now = asyncio.get_running_loop().time()
        return 0.0 if self.pool.workers[worker].backend.fresh else now - self._stale.get(worker, now)

    def _must_serve(self, key: str) -> bool:
        # What killed engines of several workers may be served nowhere.
        poison = (w.quarantined and (d := w.decisions.get(key)) and d.revision in w.quarantined for w in self._worlds())
        return self._has_room(key) and not any(poison)

    def _has_room(self, key: str) -> bool:
        """Where room runs out, what comes last by priority and age is served nowhere, and says so."""
        wanted = key in self.pool.adapters
        return wanted and not any(key in w.assignments and not w.assignments[key].targets for w in self._worlds())

    def _worlds(self) -> list[World]:
        return [w.agent.world for w in self.pool.workers.values() if w.agent and w.agent.world]

    def _elsewhere(self, worker: str, name: str) -> bool:
        return any(n != worker and w.engine.up and name in w.engine.adapters for n, w in self.pool.workers.items())

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            now = asyncio.get_running_loop().time()
            self.attach()
            for worker in self.pool.workers.values():
                if (error := worker.crashed()) is not None:
                    raise Broken(f"{worker.name}: {error!r}") from error
                self._check_files(worker.name)
                if worker.backend.fresh:
                    self._stale.pop(worker.name, None)
                else:
                    self._stale.setdefault(worker.name, now)
                record = self.pool.network.records.get(worker.name)
                for entry in record.entries if record else ():
                    if entry.state == State.LOADED:
                        self._routed[worker.name, entry.served_name] = now
            for key, adapter in self.pool.adapters.items():
                self._check_service(key, adapter.served_name, now)
            await asyncio.sleep(0.1)

    def _check_files(self, name: str) -> None:
        worker = self.pool.workers[name]
        for served, path in worker.engine.adapters.items():
            if path.startswith(DIRECTORY) and f"sha256:{path.rsplit('/', 1)[1]}" not in worker.disk.published:
                self._fault(f"{name}: the files of {served} are gone while the engine lists it")

    def _check_service(self, key: str, served: str, now: float) -> None:
        if any(w.engine.up and served in w.engine.adapters for w in self.pool.workers.values()):
            self._served[key] = now
            return
        if not self._must_serve(key):
            self._served.pop(key, None)
        last = self._served.get(key)
        if last is None or now <= self._excused_until:
            return
        if now - last > LONGEST_SWAP:
            self._fault(f"{key} is served nowhere since {now - last:.2f} s")
            del self._served[key]

    def settled(self) -> list[str]:
        """What is not yet as it should be, everything being quiet: empty when the pool has converged."""
        pool = self.pool
        agents = {n: w for n, w in pool.workers.items() if w.agent is not None}
        # The truth as every agent should see it: each worker's own word, all up.
        workers = [worker_of(as_peer(pool.network.records[n], pool.clock(), True)) for n in agents]
        catalog = next(iter(agents.values())).agent.world.catalog  # type: ignore[union-attr]  # started above
        truth = place(catalog.active, workers)
        wrong = []
        for name, worker in agents.items():
            world = worker.agent.world if worker.agent else None
            if world is None or {k: a.targets for k, a in world.assignments.items()} != {
                k: a.targets for k, a in truth.items()
            }:
                wrong.append(f"{name} places otherwise")
            want = {
                a.served_name: f"{DIRECTORY}/{revision(pool.origin.contents[a.source.uri]).removeprefix('sha256:')}"
                for a in catalog.active
                if name in truth[a.key].targets
            }
            if worker.engine.adapters != want and not self._known_bad(name, want):
                wrong.append(f"{name} holds {worker.engine.adapters}, should hold {want}")
        return wrong

    def _known_bad(self, name: str, want: dict[str, str]) -> bool:
        """What an engine refuses, or the origin has broken, can't be held; everything else must be."""
        worker = self.pool.workers[name]
        bad = worker.engine.refuses | worker.engine.dies_of
        bad |= {f"{DIRECTORY}/{revision(c).removeprefix('sha256:')}" for c in self.pool.origin.bad}
        left = {n: p for n, p in want.items() if p not in bad}
        held = worker.engine.adapters
        return bool(bad) and all(held.get(n) == p for n, p in left.items()) and held.keys() <= want.keys()
