"""An agent as the writing loops see it: its last look, its plan and its record, set by the test."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from sidecar.core.catalog import Catalog
from sidecar.core.pool import Worker
from sidecar.core.world import Peer, Status
from sidecar.model import Adapter, BaseModel, Decision, EngineView, Entry, Head, Record, Source, State

REVISION = "sha256:" + "a" * 64
ADAPTER = Adapter(
    namespace="ns", name="a", base_model="base", served_name="A", source=Source(uri="file:///a"), generation=1
)


class FakeAgent:
    """The parts of a Reconciler that the loops read; `woken` counts its wakes."""

    def __init__(self, *, name: str = "w-0") -> None:
        self.head = Head(uid="u0", name=name, engine_version="0.32.0", capacity=4, base_models=("base",), sidecar="0")
        self.adapters = {ADAPTER.key: ADAPTER}
        self.woken = 0
        view = EngineView(process="p", base_models=(BaseModel(id="base"),))
        self.watch = SimpleNamespace(view=view)
        self.plan: Any = None
        self.world: Any = None
        self.roster: Any = SimpleNamespace(workers=[self._worker(name)], peers={})
        self.record = Record(head=self.head)

    def _worker(self, name: str, *base_models: str) -> Worker:
        return Worker(name=name, base_models=base_models or ("base",))

    def wake(self) -> None:
        self.woken += 1

    def stands(self, state: State, *, engine: bool = True, assignment: Any = None, fresh: bool = True) -> None:
        """The adapter stands so on this worker; with the engine unknown nothing is routed by the plan."""
        routed = engine and state is State.LOADED
        self.plan = SimpleNamespace(
            statuses={ADAPTER.key: Status(state=state, served_name="A", revision=REVISION, routed=routed)}
        )
        self.world = SimpleNamespace(
            engine=self.watch.view if engine else None,
            settled=True,
            isolated=False,
            adapters_fresh=fresh,
            assignments={ADAPTER.key: assignment} if assignment else {},
            decisions={ADAPTER.key: Decision(source_id="s", refresh=0, revision=REVISION)},
            catalog=Catalog(active=(ADAPTER,)),
        )
        entry = Entry(adapter=ADAPTER.key, state=state, revision=REVISION, served_name="A", since=1.0)
        self.record = Record(head=self.head, version=self.record.version + 1, entries=(entry,))

    def holds_nothing(self) -> None:
        """No adapter is any of this worker's business."""
        self.stands(State.PENDING)
        self.plan = SimpleNamespace(statuses={})
        self.record = Record(head=self.head, version=self.record.version + 1)

    def with_peer(self, name: str, state: State) -> None:
        """Another live worker."""
        entry = Entry(adapter=ADAPTER.key, state=state, revision=REVISION)
        peer = Peer(head=Head(uid=name, name=name), entries={ADAPTER.key: entry}, heard=time.time(), alive=True)
        self.roster.peers[name] = peer
        self.roster.workers.append(self._worker(name))
