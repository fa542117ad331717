"""The laws, watched from outside: what the engines hold, and what the agents say about it."""

from __future__ import annotations

import asyncio
from functools import partial

from sidecar.core.placement import place
from sidecar.core.sight import as_peer, worker_of
from sidecar.core.world import World
from sidecar.model import State

from .pool import SimPool, SimWorker
from .views import Views
from .world import DIRECTORY, SimEngine, revision

LONGEST_SWAP = 3.0


class Broken(AssertionError):
    """A law was broken."""


class Watcher:
    """Looks at a pool all the time. `excuse(seconds)`: a sudden death may cost service for so long."""

    def __init__(self, pool: SimPool) -> None:
        self.pool = pool
        self.views = Views(pool)
        self.checked = self.views.checked
        self.faults: list[str] = []
        self.log: list[str] = []
        self._served: dict[str, float] = {}
        self._excused_until = 0.0
        self._sudden = -60.0
        self._watched: set[SimEngine] = set()
        self._routed: dict[tuple[str, str], float] = {}
        self._loading: dict[tuple[str, str], float] = {}
        self._said: dict[str, dict[str, State]] = {}
        self._stale: dict[str, float] = {}
        self._frozen: dict[str, float] = {}
        pool.stepped = self._stepped

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
            if worker.engine not in self._watched:
                self._watched.add(worker.engine)
                worker.engine.on_change = partial(self._engine_event, worker)

    def _fault(self, text: str) -> None:
        self.note(f"BROKEN {text}")
        self.faults.append(text)

    def _engine_event(self, worker: SimWorker, what: str, name: str) -> None:
        self.note(f"{worker.key}: {what} {name}")
        if what == "died":
            self.excuse(900)
        if what == "unload" and self.pool.workers.get(worker.key) is worker:
            self.checked["unload"] += 1
            self._check_unload(worker, name)

    def _check_unload(self, worker: SimWorker, name: str) -> None:
        """Routed away before, for the drain's time; or alone, back to back."""
        now = asyncio.get_running_loop().time()
        key, record = worker.key, worker.agent.record if worker.agent else None
        adapter = next((a for a in worker.backend.adapters or () if a.served_name == name), None)
        # The engine takes a moment for what it was asked before; an agent that was stopped meanwhile can't know.
        if self._stale_for(worker) > 0.2 and now - self._frozen.get(key, -60.0) > 1.0:
            self._fault(f"{key} unloads {name} while its lists are stale")
        entry = next((e for e in record.entries if e.served_name == name), None) if record else None
        if adapter is None or entry is None or entry.state in (State.DRAINING, State.REJECTED):
            drained = now - self._routed.get((key, name), -60.0)
            # One that was being changed over when it was deleted is no longer called off.
            swapping = adapter is None and now - self._loading.get((key, name), -60.0) < 0.5
            if drained < 1.8 and not swapping:
                self._fault(f"{key} unloads {name} after {drained:.2f} s of drain")
            # What a peer reported up to 10 s ago may have died since: no protocol survives that.
            lately = now - self._sudden < 10.0
            must = adapter is not None and self._must_serve(adapter.key)
            if must and not lately and not self._elsewhere(key, name):
                self._fault(f"{key} unloads {name}, the last copy")
            return
        if entry.state == State.LOADING and not self._elsewhere(key, name):
            return
        if entry.state == State.LOADING:
            self.note(f"{key} swaps {name} without a drain")
            return
        self._fault(f"{key} unloads {name} in state {entry.state}")

    def _stale_for(self, worker: SimWorker) -> float:
        """Seconds for which the worker's lists have been stale, as far as was seen."""
        now = asyncio.get_running_loop().time()
        return 0.0 if worker.backend.fresh else now - self._stale.get(worker.key, now)

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

    def _elsewhere(self, key: str, name: str) -> bool:
        return any(k != key and w.engine.up and name in w.engine.adapters for k, w in self.pool.workers.items())

    async def run(self) -> None:
        """Watch for ever."""
        loop = asyncio.get_running_loop()
        rounds = 0
        while True:
            now = loop.time()
            self.attach()
            for worker in self.pool.workers.values():
                self._check_worker(worker, now)
            for key, adapter in self.pool.adapters.items():
                self._check_service(key, adapter.served_name, now)
            rounds += 1
            if rounds % 3 == 0:
                for fault in self.views.look():
                    self._fault(fault)
                self._check_air()
            await asyncio.sleep(0.2)

    def _check_worker(self, worker: SimWorker, now: float) -> None:
        if (error := worker.crashed()) is not None:
            raise Broken(f"{worker.key}: {error!r}") from error
        self._check_files(worker)
        if worker.process.frozen:
            self._frozen[worker.key] = now
        if worker.backend.fresh:
            self._stale.pop(worker.key, None)
        else:
            self._stale.setdefault(worker.key, now)

    def _stepped(self, worker: SimWorker) -> None:
        """The agent has told the others where it stands."""
        if worker.agent is None:
            return
        now, key = asyncio.get_running_loop().time(), worker.key
        entries = {e.served_name: e.state for e in worker.agent.record.entries}
        # What was routed here was so until now.
        for name, state in (*self._said.get(key, {}).items(), *entries.items()):
            if state is State.LOADED:
                self._routed[key, name] = now
            elif state is State.LOADING:
                self._loading[key, name] = now
        self._said[key] = entries

    def _check_air(self) -> None:
        air = self.pool.air
        if air.crashes:
            raise Broken(f"what a peer asked ended in {air.crashes[0]!r}") from air.crashes[0]
        if air.oversized:
            self._fault(f"a datagram of {air.oversized.pop()} bytes")

    def _check_files(self, worker: SimWorker) -> None:
        for served, path in worker.engine.adapters.items():
            if path.startswith(DIRECTORY) and path not in worker.disk.paths:
                self._fault(f"{worker.key}: the files of {served} are gone while the engine lists it")

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
        if pool.kind != "plain" and (wrong := self.views.unequal()):
            return wrong
        agents = {w.name: (w, w.agent) for w in pool.workers.values() if w.agent is not None}
        # The truth as every agent should see it: each worker's own word, all up.
        workers = [worker_of(as_peer(agent.record, pool.clock(), True)) for _, agent in agents.values()]
        world = next(iter(agents.values()))[1].world
        if world is None:
            return ["an agent has not looked yet"]
        truth = place(world.catalog.active, workers)
        targets = {k: a.targets for k, a in truth.items()}
        wrong = []
        for name, (worker, agent) in agents.items():
            if agent.world is None or {k: a.targets for k, a in agent.world.assignments.items()} != targets:
                wrong.append(f"{name} places otherwise")
            want = {
                a.served_name: f"{DIRECTORY}/{revision(pool.origin.contents[a.source.uri]).removeprefix('sha256:')}"
                for a in world.catalog.active
                if name in truth[a.key].targets
            }
            if worker.engine.adapters != want and not self._known_bad(worker, want):
                wrong.append(f"{name} holds {worker.engine.adapters}, should hold {want}")
        return wrong

    def _known_bad(self, worker: SimWorker, want: dict[str, str]) -> bool:
        """What an engine refuses, or the origin has broken, can't be held; everything else must be."""
        bad = worker.engine.refuses | worker.engine.dies_of
        bad |= {f"{DIRECTORY}/{revision(c).removeprefix('sha256:')}" for c in self.pool.origin.bad}
        left = {n: p for n, p in want.items() if p not in bad}
        held = worker.engine.adapters
        return bool(bad) and all(held.get(n) == p for n, p in left.items()) and held.keys() <= want.keys()
