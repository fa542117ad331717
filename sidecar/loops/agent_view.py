"""What the agent shows over HTTP, read from its loops: implements `ports.AgentView`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from sidecar.core import readiness
from sidecar.core.explain import explain
from sidecar.core.placement import Assignment
from sidecar.core.report import row
from sidecar.loops.reconcile import Reconciler
from sidecar.model import Adapter, Problem, Record
from sidecar.ports import Backend, Clock, Row

DRAINED_LIMIT = 60.0
# A loop that has not come round for so long hangs: every wait in the loops has an end well before.
STALL_SECONDS = 30.0


class LiveView:
    """See ports.AgentView.

    `beats` gives, by loop, when it came round last; `more_problems` what the edges have to say; `more_of_peers`, by
    worker name, what is known of peers beyond their records. `look_again` reads anew whether this worker is ending: who
    asks for the hand-over may have heard of it first.
    """

    def __init__(
        self,
        agent: Reconciler,
        backend: Backend,
        clock: Clock,
        *,
        ready_timeout: float,
        beats: Callable[[], dict[str, float]],
        more_problems: Callable[[], Sequence[Problem]],
        more_of_peers: Callable[[], Mapping[str, Row]] = dict,
        look_again: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._agent, self._backend, self._clock = agent, backend, clock
        self._ready_timeout = ready_timeout
        self._beats, self._more_problems = beats, more_problems
        self._more_of_peers = more_of_peers
        self._look_again = look_again

    def healthy(self) -> tuple[bool, Row]:
        """See ports.AgentView."""
        now = self._clock()
        ages = {name: round(now - beat, 1) for name, beat in self._beats().items()}
        return all(age < STALL_SECONDS for age in ages.values()), {"secondsSinceLastStep": ages}

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        """See ports.AgentView. Once ready for an engine process, ready until another one answers."""
        agent = self._agent
        engine = agent.watch.view
        process = (engine.process or "unknown") if engine else None
        if process is None and agent.memory.ready_process is not None:
            return True, ()
        if process is not None and agent.memory.ready_process == process:
            return True, ()
        statuses = agent.plan.statuses if agent.plan else {}
        reasons = readiness.reasons(agent.wanted_first, statuses, agent.watch.seen)
        waited = (
            agent.watch.first_answer is not None and self._clock() - agent.watch.first_answer >= self._ready_timeout
        )
        if reasons and not (process is not None and waited):
            return False, reasons
        agent.memory.ready_process = process
        return True, ()

    def adapters(self) -> Sequence[Row]:
        """See ports.AgentView."""
        agent = self._agent
        since = {e.adapter: e.since for e in agent.record.entries}
        statuses = agent.plan.statuses if agent.plan else {}
        world = agent.world
        rows = []
        for key in sorted(agent.adapters):
            adapter = agent.adapters[key]
            assignment = world.assignments.get(key) if world else None
            decision = world.decisions.get(key) if world else None
            fetching = agent.executor.fetching.get(key)
            rows.append(
                row(adapter, agent.head.name, assignment, statuses.get(key), decision, since.get(key, 0.0), fetching)
            )
        return rows

    def explain(self, name: str) -> Row | None:
        """See ports.AgentView."""
        found = self._find(name)
        if not found:
            return None
        agent, adapter = self._agent, found[0]
        workers = agent.roster.workers if agent.roster else []
        world = agent.world
        assignment = (world.assignments.get(adapter.key) if world else None) or Assignment(
            adapter=adapter.key, members=0, wanted=0
        )
        rejected = world.catalog.rejected.get(adapter.key, "") if world else ""
        return {
            "adapter": adapter.key,
            "servedName": adapter.served_name,
            "baseModel": adapter.base_model,
            "members": assignment.members,
            "wanted": assignment.wanted,
            "targets": list(assignment.targets),
            "waiting": list(assignment.waiting),
            "rejected": rejected,
            "isolated": world.isolated if world else False,
            "workers": [msgspec.to_builtins(e) for e in explain(adapter, workers, assignment)],
            "also": [a.key for a in found[1:]],
        }

    def _find(self, name: str) -> list[Adapter]:
        adapters = self._agent.adapters
        if name in adapters:
            return [adapters[name]]
        ordered = sorted(adapters.values(), key=lambda a: a.order)
        return [a for a in ordered if a.name == name] or [a for a in ordered if a.served_name == name]

    def record(self) -> Record:
        """See ports.AgentView."""
        return self._agent.record

    def peers(self) -> Sequence[Row]:
        """See ports.AgentView."""
        agent, now = self._agent, self._clock()
        rows: list[Row] = [_peer_row(agent.record, heard=now, alive=True, own=True)]
        observed = agent.peers.view()
        more, lists = self._more_of_peers(), agent.lists.rows()
        unknown: Row = {"adapterList": "unknown"}
        rows += [
            {
                **_peer_row(o.record, heard=o.heard, alive=o.alive, own=False),
                **lists.get(name, unknown),
                **more.get(name, {}),
            }
            for name, o in observed.items()
        ]
        for address in sorted(agent.peers.unheard()):
            rows.append({"name": address, "address": address, "self": False, "state": "unknown", "adapters": {}})
        return sorted(rows, key=lambda r: str(r["name"]))

    async def drained(self) -> Row:
        """See ports.AgentView."""
        until = self._clock() + DRAINED_LIMIT
        if self._look_again is not None and not self._backend.view().steering.terminating:
            await self._look_again()
        while self._backend.view().steering.terminating and self._clock() < until:
            waiting = self._not_handed_over()
            if not waiting:
                self._agent.handed_over = True
                return {"drained": True, "waiting": []}
            await asyncio.sleep(0.5)
        waiting = []
        if self._backend.view().steering.terminating:
            waiting = self._not_handed_over()
            self._agent.handed_over = True
            self._agent.wake()
        return {"drained": not waiting, "waiting": waiting}

    def _not_handed_over(self) -> list[str]:
        """Adapters that still get traffic here, or whose drain isn't over."""
        agent, now = self._agent, self._clock()
        if agent.plan is None or agent.world is None or not agent.world.terminating:
            return ["placement was not computed since the pod began to terminate"]
        waiting = []
        for key, status in agent.plan.statuses.items():
            if status.routed:
                waiting.append(key)
            elif status.served_name in agent.world.owned:
                told = agent.withdrawn.get(status.served_name)
                seconds = agent.memory.drain_seconds.get(status.served_name, 5)
                if told is None or now - told < seconds:
                    waiting.append(key)
        return sorted(waiting)

    def problems(self) -> Sequence[Problem]:
        """See ports.AgentView."""
        found = [*self._backend.view().problems, *self._more_problems()]
        if self._agent.unsaved:
            found.append(Problem(where="memory.json", message=self._agent.unsaved))
        return found


def _peer_row(record: Record, *, heard: float, alive: bool, own: bool) -> Row:
    head = record.head
    return {
        "name": head.name,
        "address": head.address,
        "uid": head.uid,
        "zone": head.zone,
        "self": own,
        "state": "alive" if alive else "dead",
        "heard": heard,
        "engine": head.engine_version,
        "engineUp": head.engine_up,
        "capacity": head.capacity,
        "cordoned": head.cordoned,
        "resting": head.resting,
        "terminating": head.terminating,
        "baseModels": list(head.base_models),
        "adapters": {
            e.adapter: {"state": e.state.value, "revision": e.revision, "message": e.message, "avoid": e.avoid}
            for e in record.entries
        },
    }
