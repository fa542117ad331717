"""The agent's main loop: look at everything, place, plan, act, tell."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping

import msgspec
import structlog

from sidecar.core import outcome, poison, sight
from sidecar.core.catalog import Catalog, select
from sidecar.core.decide import decided
from sidecar.core.dialect_vllm import stale_prefix_cache
from sidecar.core.handover import loaded_elsewhere, may_drop
from sidecar.core.memory import Memory, dump
from sidecar.core.placement import Assignment, isolated
from sidecar.core.plan import plan
from sidecar.core.report import entries
from sidecar.core.world import Peer, Plan, Rules, Status, Swap, Unload, World
from sidecar.loops.adapter_lists import AdapterLists
from sidecar.loops.engine_watch import EngineWatch
from sidecar.loops.execute import Executor
from sidecar.loops.fetches import Acting, Fetches
from sidecar.loops.keeper import Keeper
from sidecar.loops.placing import Placer
from sidecar.model import Adapter, Decision, EngineView, Head, Record, State
from sidecar.ports import Backend, BackendView, Clock, EdgeError, Engine, Fetcher, Meter, Peers, PeerUnreachable, Store

log = structlog.get_logger()

# Thought through at least this often, whatever happens or doesn't.
LONGEST_NAP = 10.0
SHORTEST_NAP = 0.05
# After a pass that took t seconds of thought the next begins no sooner than REST * t later (LONGEST_REST at most): what
# changes meanwhile is taken together. With few adapters that is a few milliseconds; while hundreds come at once it
# leaves the core to the work that they cause.
REST = 5.0
LONGEST_REST = 0.2
TIDY_EVERY = 15.0


class Reconciler:
    """One worker's agent, from its ports. `run` for ever; `snapshot` attributes are what the server shows."""

    def __init__(
        self,
        *,
        head: Head,
        backend: Backend,
        peers: Peers,
        engine: Engine,
        watch: EngineWatch,
        fetcher: Fetcher,
        store: Store,
        memory: Memory,
        clock: Clock,
        meter: Meter,
        rules: Rules,
        base_model: str = "",
        capacity: Callable[[], int] = lambda: 1,
        limits: Callable[[], str] = lambda: "",
        settle_seconds: float = 5.0,
        keep_files_seconds: float = 600.0,
        fetch_concurrency: int = 4,
        rng: random.Random | None = None,
    ) -> None:
        self._backend, self._store = backend, store
        self.peers, self.watch = peers, watch
        self._clock, self._meter, self._rules = clock, meter, rules
        self._base_model, self._capacity, self._limits = base_model, capacity, limits
        self._keep_files = keep_files_seconds
        self._settle_until = clock() + settle_seconds
        self._changed = asyncio.Event()
        self._index: dict[str, tuple[Record, Peer]] = {}
        self._heirless: dict[str, float] = {}
        self._placer = Placer()
        self.lists = AdapterLists()
        self._base_models: tuple[str, ...] = (base_model,) if base_model else ()
        self._saved = b""
        # Why the memory on disk is older than this one; "" if it isn't.
        self.unsaved = ""
        self._tidied = 0.0
        self._thought = 0.0
        self._keeper = Keeper(store, engine, memory)
        self._saving = asyncio.Lock()
        self.memory = memory
        self.head = head
        self.record = Record(head=head)
        self.plan: Plan | None = None
        self.world: World | None = None
        self.roster: sight.Roster | None = None
        self.namesake: Record | None = None
        self.adapters: dict[str, Adapter] = {}
        self.withdrawn: dict[str, float] = {}
        # Served names whose traffic the platform sends here, None: unknown; standalone there is no such platform.
        self.platform_routes: Callable[[], frozenset[str] | None] | None = None
        # Called after each pass: who shows this worker elsewhere looks again.
        self.on_step: Callable[[], None] = lambda: None
        # The platform was told that it may end the engine: nothing is put back into routing any more.
        self.handed_over = False
        self.wanted_first: frozenset[str] | None = None
        self.placed_with_me = False
        self.beat = clock()
        acting = Acting(
            memory=memory, clock=clock, meter=meter, save=self.save, changed=self.wake, rng=rng or random.Random()
        )
        tell_above = rules.small_content if rules.peer_bytes else None
        fetches = Fetches(acting, fetcher, concurrency=fetch_concurrency, tell_above=tell_above)
        self.executor = Executor(acting, engine, watch, store, fetches, confirm=self.confirm)
        watch.on_process = self._engine_process

    def wake(self) -> None:
        """Think again soon: something changed."""
        self._changed.set()

    def targets(self, key: str) -> tuple[str, ...]:
        """The targets of an adapter (namespace/name) in rank order; who will be them while engines are starting."""
        world = self.world
        found = [w.get(key) for w in (world.assignments, world.prefetch)] if world else []
        return next((tuple(a.targets) for a in found if a is not None and a.targets), ())

    async def run(self) -> None:
        """Reconcile for ever."""
        try:
            while True:
                self._changed.clear()
                began = self._clock()
                wake_at = await self.step()
                self.beat = self._clock()
                self._meter.reconciled(self.beat - began)
                await asyncio.sleep(min(REST * self._thought, LONGEST_REST))
                nap = min(max(wake_at - self._clock(), SHORTEST_NAP), LONGEST_NAP)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(nap):
                        await self._changed.wait()
        finally:
            await self.executor.stop()

    async def step(self) -> float:
        """One pass; returns when to think again at the latest."""
        began = self._clock()
        world = await self.look()
        plan_ = plan(world)
        self.memory.drains = dict(plan_.drains)
        self.memory.leaving = dict(plan_.leaving)
        self.world, self.plan = world, plan_
        self._tell(world, plan_)
        self._ready_progress(world)
        self.on_step()
        self._thought = self._clock() - began
        await self._keeper.before_actions(world)
        for action in plan_.actions:
            self.executor.start(action, self.adapters.get(action.key))
        await self._tidy(world)
        await self.save()
        return plan_.wake_at if world.settled else min(plan_.wake_at, self._settle_until)

    # Seeing

    async def look(self) -> World:
        """Everything that this worker knows now, as one value."""
        now = self._clock()
        view = self._backend.view()
        engine = self.watch.current()
        self._learn_base_models(engine)
        owned, foreign = sight.split_names(engine, self._store.revisions_dir)
        self.adapters = {a.key: a for a in view.adapters or ()}
        catalog = select(view.adapters or (), frozenset(self._base_models))
        self._set_head(view, engine, len(foreign))
        peers, rival = self._peer_index(), self.peers.namesake()
        # Everybody places by the record of who had the name first, so this worker does too, and holds no targets.
        me = self._me(now) if rival is None else sight.as_peer(rival, now, True)
        roster = sight.Roster(me, view.members or (), peers, len(self.peers.unheard()))
        self.roster, self.namesake = roster, rival
        assignments = await self._placer.place(catalog.active, roster.workers)
        cut_off = isolated(roster.reached, roster.listed)
        serves = {a.key: owned[a.served_name] for a in catalog.active if a.served_name in owned}
        outcome.found_loaded(self.memory, serves, now)
        if self.watch.first_answer is not None:  # some limits are the engine's to tell
            outcome.judged_by(self.memory, self._limits())
        mine = frozenset(k for k, a in assignments.items() if self.head.name in a.targets)
        if rival is not None:
            mine, roster.peers[me.head.name] = frozenset(), me
        elif cut_off:
            mine = await self._placer.isolated(catalog.active, roster.workers, me.head.name, frozenset(serves))
        prefetch: dict[str, Assignment] = {}
        if rival is None and not self.watch.seen:
            prefetch = await self._placer.hoped(catalog.active, roster.hoped, me.head.name)
        decisions = self._decisions(catalog, roster.peers)
        alone = sight.heirless(catalog.active, roster) if view.steering.terminating and view.members_fresh else ()
        self._heirless = {key: self._heirless.get(key, now) for key in alone}
        pool = {n: p for n, (r, _) in self._index.items() if (p := r.suspicions)}
        pool[self.head.name] = tuple(self.memory.suspicions)
        return World(
            now=now,
            me=self.head.name,
            catalog=catalog,
            adapters_fresh=view.adapters is not None and view.adapters_fresh,
            members_fresh=view.members is not None and view.members_fresh,
            isolated=cut_off,
            settled=roster.complete or now >= self._settle_until,
            terminating=view.steering.terminating,
            assignments=assignments,
            mine=mine,
            peers=roster.peers,
            prefetch=prefetch,
            unmatched=sight.unmatched(catalog.active, assignments, roster),
            engine=engine,
            engine_message=self.watch.message or "the engine does not answer",
            stale_cache=engine is not None and stale_prefix_cache(engine.version),
            owned=owned,
            foreign=foreign,
            disk=frozenset(self._store.revisions()),
            decisions=decisions,
            quarantined=poison.update_quarantine(self.memory, pool, now),
            withdrawn=self.withdrawn,
            busy_names=frozenset(self.executor.busy_names),
            going=frozenset(self.executor.going) | (owned.keys() if self.handed_over else frozenset()),
            busy_fetches=dict(self.executor.fetching),
            memory=self.memory,
            rules=self._rules,
            heirless=self._heirless,
        )

    def _learn_base_models(self, engine: EngineView | None) -> None:
        # A list without a base model is no list of this engine's: vLLM always has one.
        if engine is not None and engine.base_models:
            self._base_models = sight.base_model_names(engine, self._base_model)
            self.memory.base_models = self._base_models
        elif not self._base_models:
            self._base_models = self.memory.base_models

    def _set_head(self, view: BackendView, engine: EngineView | None, foreign: int) -> None:
        steering, seen = view.steering, self.watch.view
        now = self._clock()
        self.head = sight.own_head(
            self.head,
            labels=view.labels if view.labels is not None else self.head.labels,
            address=view.address or self.head.address,
            base_models=self._base_models,
            capacity=steering.capacity if steering.capacity is not None else self._capacity(),
            foreign=foreign,
            engine=(seen.process or "") if seen else "",
            engine_version=seen.version if seen else "",
            engine_up=engine is not None,
            engine_seen=self.watch.seen,
            cordoned=steering.cordoned,
            terminating=steering.terminating,
            resting=poison.resting(self.memory, now),
            adapter_list=self.lists.digest(view.adapters, now),
        )

    def _me(self, now: float) -> Peer:
        return Peer(head=self.head, entries={e.adapter: e for e in self.record.entries}, heard=now, alive=True)

    def _peer_index(self) -> dict[str, Peer]:
        """Peers with their entries by adapter; rebuilt only for records that changed."""
        fresh: dict[str, tuple[Record, Peer]] = {}
        for name, seen in self.peers.view().items():
            if name == self.head.name:
                continue
            old = self._index.get(name)
            peer = old[1] if old is not None and old[0] is seen.record else sight.as_peer(seen.record, 0.0, False)
            peer = msgspec.structs.replace(peer, heard=seen.heard, alive=seen.alive)
            fresh[name] = (seen.record, peer)
        self._index = fresh
        return {name: peer for name, (_, peer) in fresh.items()}

    def _decisions(self, catalog: Catalog, peers: Mapping[str, Peer]) -> dict[str, Decision]:
        found: dict[str, Decision] = {}
        told = sight.told_decisions(peers.values())
        for adapter in catalog.active:
            own = self.memory.decisions.get(adapter.source_id)
            decision = decided(adapter, (own, *told.get(adapter.key, ())))
            if decision is not None:
                found[adapter.key] = decision
                if decision != own and (decision.listing or own is None):
                    outcome.adopt(self.memory, decision)
        return found

    # Telling

    def _tell(self, world: World, plan_: Plan) -> None:
        before = {e.adapter: e for e in self.record.entries}
        shown = (self.platform_routes() or frozenset()) if self.platform_routes else None
        told = entries(
            self.adapters, plan_.statuses, before, world.decisions, self.memory, world.now, shown, self.executor.coming
        )
        suspicions = tuple(self.memory.suspicions)
        if (self.record.head, self.record.entries, self.record.suspicions) != (self.head, told, suspicions):
            self.record = Record(head=self.head, version=self.record.version + 1, entries=told, suspicions=suspicions)
            self.peers.announce(self.record)
        self._note_withdrawals(plan_.statuses, world)
        self._meter.adapters({s: n for s in State if (n := sum(1 for x in plan_.statuses.values() if x.state == s))})
        self._meter.engine(world.engine is not None)
        self._meter.peers(sum(1 for p in world.peers.values() if p.alive), len(world.peers))
        self._meter.other_lists(self.lists.look(world, self.adapters))
        self._meter.maybe_resident(len(self.memory.unloaded))

    def _note_withdrawals(self, statuses: Mapping[str, Status], world: World) -> None:
        """Names that the world no longer gets from us, and since when. The record is read from this moment on."""
        still = self.platform_routes() if self.platform_routes else frozenset()
        routed = {s.served_name for s in statuses.values() if s.routed}
        gone = [n for n in world.owned if n not in routed and still is not None and n not in still]
        fresh = {n: self.withdrawn.get(n, world.now) for n in gone}
        if fresh.keys() - self.withdrawn.keys():
            self.wake()
        self.withdrawn = fresh

    # Asking once more

    async def confirm(self, action: Unload | Swap) -> bool:
        """Directly before a copy goes: do the witnesses still say what they said?"""
        world = self.world
        if world is None or self.watch.current() is None:
            return False
        fresh = await asyncio.gather(*(self._ask(name) for name in action.witnesses))
        peers = dict(world.peers)
        peers.update({p.head.name: p for p in fresh if p is not None})
        gone = {n for n, p in zip(action.witnesses, fresh, strict=True) if p is None}
        peers = {n: p for n, p in peers.items() if n not in gone}
        view = self._backend.view()
        asked = msgspec.structs.replace(
            world,
            now=self._clock(),
            peers=peers,
            adapters_fresh=view.adapters is not None and view.adapters_fresh,
            members_fresh=view.members is not None and view.members_fresh,
        )
        return self._still_may(asked, action)

    def _still_may(self, world: World, action: Unload | Swap) -> bool:
        adapter = next((a for a in world.catalog.active if a.key == action.key), None)
        since = world.now - self._rules.witness_age
        if isinstance(action, Swap):
            return any(loaded_elsewhere(world, action.key, n, since) for n in action.witnesses)
        return adapter is not None and may_drop(world, adapter, self.memory.leaving.get(action.key, world.now))

    async def _ask(self, name: str) -> Peer | None:
        try:
            return sight.as_peer(await self.peers.ask(name), self._clock(), True)
        except PeerUnreachable:
            return None

    # Keeping

    def _engine_process(self, view: EngineView, lost_at: float) -> None:
        """Another engine process answers (`lost_at` 0: the first that this agent sees)."""
        if not lost_at:
            outcome.agent_started(self.memory, view.process, self._clock())
            return
        self._meter.engine_restarted()
        self.wanted_first = None
        suspect = None if self._backend.view().steering.terminating else poison.engine_died(self.memory, lost_at)
        log.warning("engine_restarted", version=view.version, suspected_revision=suspect)
        outcome.engine_restarted(self.memory, view.process, lost_at)

    def _ready_progress(self, world: World) -> None:
        """Which adapters were wanted when this worker first had a place and its engine answered."""
        workers = self.roster.workers if self.roster and self.namesake is None else ()
        included = any(w.name == self.head.name and w.up for w in workers)
        if self.wanted_first is None and included and world.settled and world.adapters_fresh:
            self.wanted_first = world.mine

    async def _tidy(self, world: World) -> None:
        if world.now - self._tidied < TIDY_EVERY:
            return
        self._tidied = world.now
        if world.adapters_fresh:
            outcome.forget(self.memory, self.adapters, world.now, self._keep_files)
        await self._keeper.tidy(world)

    async def save(self) -> None:
        """Keep the memory on disk if it changed; a full disk is said, and the agent goes on."""
        async with self._saving:
            data = dump(self.memory)
            if data == self._saved:
                self.unsaved = ""
                return
            try:
                await asyncio.to_thread(self._store.save, "memory.json", data)
            except EdgeError as error:
                if str(error) != self.unsaved:
                    log.error("state_not_saved", error=str(error))
                self.unsaved = str(error)
                return
            self._saved, self.unsaved = data, ""
