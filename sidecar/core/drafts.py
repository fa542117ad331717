"""A plan while it is being drafted: the planner's notepad."""

from __future__ import annotations

from sidecar.core.cacheguard import CacheGuard
from sidecar.core.memory import FOREVER, Retry, refused_revision, spoken, trial
from sidecar.core.poison import proven, rejected_until
from sidecar.core.world import Action, Load, Plan, Status, World
from sidecar.model import Adapter, Decision, State

HOLD_MESSAGE = (
    "held back: this vLLM keys its prefix cache by adapter name alone and would mix cached blocks of the old weights "
    "into the new. Restart the engine, upgrade to vLLM 0.31 or newer, start it with VLLM_SERVER_DEV_MODE=1 so that the "
    "cache can be reset, choose another servedName, or set spec.onStalePrefixCache: Replace."
)
QUARANTINED = "quarantined: engines of two or more workers died with this revision; nobody newly loads it"
DIED_TWICE = "the engine died twice with this revision"


def wanted_revision(world: World, adapter: Adapter) -> str | None:
    """The revision this worker should serve: the pool's, or the one before it if this engine or another's refused the
    pool's, or engines die of it."""
    decision = world.decisions.get(adapter.key)
    if decision is None:
        return None
    previous = world.memory.previous.get(adapter.key)
    if previous is None or previous not in world.disk or blocked(world, adapter.key, previous):
        return decision.revision
    refused = refused_revision(world.memory, adapter) == decision.revision
    refused = refused or refused_by(world, adapter.key, decision.revision) is not None
    # What serves isn't exchanged for what served before it, whatever other engines died of.
    serves = world.owned.get(adapter.served_name) == decision.revision
    poison = not serves and blocked(world, adapter.key, decision.revision) is not None
    return previous if refused or poison else decision.revision


def refused_by(world: World, key: str, revision: str) -> str | None:
    """The first by name of the other workers whose engine refused this revision while an older one serves there."""
    names = (n for n, p in world.peers.items() if p.alive and key in p.entries and p.entries[key].refused == revision)
    return min(names, default=None)


def blocked(world: World, key: str, revision: str) -> str | None:
    """Why this revision may not be newly loaded for adapter `key`: it kills engines. None if it may.

    What serves is left alone, in quarantine too: an engine that has it has survived it so far.
    """
    memory, now = world.memory, world.now
    until = rejected_until(memory, revision, now)
    if until is not None:
        return spoken(DIED_TWICE, until, now)
    if revision not in world.quarantined or proven(memory, key, revision, now):
        return None
    return spoken(QUARANTINED, memory.quarantine[revision].until if revision in memory.quarantine else FOREVER, now)


class Draft:
    """Collects actions, statuses and waits for one World."""

    def __init__(self, world: World) -> None:
        self.world = world
        process = (world.engine.process if world.engine else None) or ""
        self.cache = CacheGuard(
            world.memory.history, process, stale=world.stale_cache, resettable=process not in world.memory.no_reset
        )
        self._adapters = {a.key: a for a in world.catalog.active}
        self._actions: list[Action] = []
        self._last: list[Load] = []
        self._statuses: dict[str, Status] = {}
        self._drains: dict[str, float] = {}
        self._leaving: dict[str, float] = {}
        self._wake = FOREVER
        self._unfinished = False

    def finish(self) -> Plan:
        """The plan. Suspected revisions are loaded only when nothing else is left to load, and one at a time."""
        for key, adapter in self._adapters.items():
            if key not in self._statuses and self.avoids(adapter):
                self.avoided(adapter)
        for shut_out in (*self.world.memory.banned.values(), *self.world.memory.quarantine.values()):
            self.wake(shut_out.until)
        if self._last and not self._unfinished and not self.world.busy_names:
            self._actions.append(self._last[0])
        return Plan(
            actions=tuple(self._actions),
            statuses=self._statuses,
            drains=self._drains,
            leaving=self._leaving,
            wake_at=self._wake,
        )

    def act(self, action: Action) -> None:
        """Do this now."""
        self._actions.append(action)

    def load(self, action: Load, *, last: bool) -> None:
        """Load now, or after everything else if the revision is under suspicion."""
        if last:
            self._last.append(action)
        else:
            self._unfinished = True
            self._actions.append(action)

    def wake(self, at: float) -> None:
        """Think again at `at` at the latest."""
        if at > self.world.now:
            self._wake = min(self._wake, at)

    def say(
        self,
        key: str,
        state: State,
        name: str,
        *,
        revision: str = "",
        message: str = "",
        avoid: bool = False,
        routed: bool = False,
        held: bool = False,
    ) -> None:
        """Report `state` for `key`. The wish to be passed over goes with it whatever the state: placement obeys it."""
        adapter = self._adapters.get(key)
        avoid = avoid or (adapter is not None and self.avoids(adapter))
        self._statuses[key] = Status(
            state=state, served_name=name, revision=revision, message=message, avoid=avoid, routed=routed, held=held
        )

    def loaded(self, adapter: Adapter, revision: str, message: str = "") -> None:
        """It serves, and gets its traffic."""
        self.say(
            adapter.key, State.LOADED, adapter.served_name,
            revision=revision, message=message or self._remark(adapter, revision), routed=True,
        )  # fmt: skip

    def _remark(self, adapter: Adapter, revision: str) -> str:
        """What keeps newer content than the one that serves from this worker, else what is strange about that."""
        memory, decision = self.world.memory, self.world.decisions.get(adapter.key)
        if decision is not None and decision.revision != revision:
            if refused_revision(memory, adapter) == decision.revision:
                retry = memory.retries.get(adapter.key)
                return retry.message if retry else "the engine refused newer content; this revision goes on serving"
            if refuser := refused_by(self.world, adapter.key, decision.revision):
                return f"new content waits: the engine of {refuser} refused it"
            if why := blocked(self.world, adapter.key, decision.revision):
                return f"newer content is held back: {why}"
        elif revision in self.world.quarantined:
            return QUARANTINED
        looked = trial(memory, adapter)
        if looked is not None:
            return f"looking for new content failed, this revision goes on serving: {looked.message}"
        return memory.doubts.get(revision, "")

    def draining(self, adapter: Adapter, revision: str) -> None:
        """It serves still, but no longer gets traffic."""
        self.say(adapter.key, State.DRAINING, adapter.served_name, revision=revision)

    def held(self, adapter: Adapter, have: str) -> None:
        """Held back by the prefix-cache guard; another worker should take it."""
        state = State.LOADED if have else State.PENDING
        self.say(
            adapter.key, state, adapter.served_name,
            revision=have, message=HOLD_MESSAGE, avoid=True, routed=bool(have), held=True,
        )  # fmt: skip

    def rejected(self, adapter: Adapter, revision: str, message: str, have: str | None) -> None:
        """Not loaded here; what is loaded goes on serving."""
        if have is not None and have != revision:
            self.loaded(adapter, have, message=message)
            return
        self.say(adapter.key, State.REJECTED, adapter.served_name, revision=revision, message=message, avoid=True)

    def avoided(self, adapter: Adapter) -> None:
        """No target here any more, because this worker asked to be passed over: say why."""
        want = wanted_revision(self.world, adapter)
        if want is not None and self.cache.verdict(adapter, want) == "hold":
            self.held(adapter, "")
            return
        why = blocked(self.world, adapter.key, want) if want is not None else None
        if want is not None and why is not None:
            self.rejected(adapter, want, why, None)
            return
        retry = self.world.memory.retries.get(adapter.key)
        state = State.REJECTED if retry and retry.rejected else State.FAILED
        avoid = self.world.memory.avoid.get(adapter.key)
        until = avoid.until if avoid else FOREVER
        message = spoken(retry.message if retry else "", until, self.world.now)
        self.say(adapter.key, state, adapter.served_name, message=message, avoid=True)

    def avoids(self, adapter: Adapter) -> bool:
        """Whether this worker asks to be passed over for the adapter as it is now."""
        decision = self.world.decisions.get(adapter.key)
        if self._unwelcome(adapter):
            return True
        avoid = self.world.memory.avoid.get(adapter.key)
        if avoid is None or avoid.source_id != adapter.source_id:
            return False
        permanent = avoid.until >= FOREVER
        if decision is not None and avoid.revision != decision.revision and (avoid.revision or permanent):
            return False  # it was other content: what the pool decides on is an adapter
        self.wake(avoid.until)
        return self.world.now < avoid.until

    def _unwelcome(self, adapter: Adapter) -> bool:
        """Whether the wanted revision may not be loaded here, target or not: only so is the wish to be passed over
        steady. Nothing is said against a copy that serves, and an older one that goes on serving is no ground for
        avoiding, unless the prefix cache holds the new one back: a clean worker takes that."""
        world, name = self.world, adapter.served_name
        want, have = wanted_revision(world, adapter), world.owned.get(name) if world.engine else None
        if want is None or have == want:
            return False
        hold = self.cache.verdict(adapter, want) == "hold"
        return hold or (have is None and blocked(world, adapter.key, want) is not None)

    def retry(self, adapter: Adapter, revision: str) -> Retry | None:
        """The failures in a row of the present input (source and revision), if any."""
        retry = self.world.memory.retries.get(adapter.key)
        if retry is None or retry.input not in (adapter.source_id, f"{adapter.source_id}@{revision}"):
            return None
        if retry.rejected and revision and retry.input == adapter.source_id:
            return None  # it was other content: what the pool decides on is an adapter
        return retry

    def first_in_rank(self, key: str) -> str | None:
        """The target that decides for the pool; while there is none because engines are starting, who will be it."""
        assignment = self.world.assignments.get(key)
        if assignment is None or not assignment.targets:
            assignment = self.world.prefetch.get(key)
        return assignment.targets[0] if assignment and assignment.targets else None

    def bytes_are_gone(self, key: str, decision: Decision) -> bool:
        """Whether a target can't get the decided bytes from anywhere: the origin has moved on, and where workers read
        from each other, nobody has them any more."""
        if self.world.rules.peer_bytes and self._somebody_has(key, decision.revision):
            return False
        own = self.world.memory.gone.get(key) == decision.refresh and decision.revision not in self.world.disk
        if own:
            return True
        targets = self.world.assignments[key].targets if key in self.world.assignments else ()
        for name in targets:
            peer = self.world.peers.get(name)
            entry = peer.entries.get(key) if peer and peer.alive else None
            if entry is not None and entry.gone and entry.revision in ("", decision.revision):
                return True
        return False

    def _somebody_has(self, key: str, revision: str) -> bool:
        peers = (p.entries[key] for p in self.world.peers.values() if p.alive and key in p.entries)
        return revision in self.world.disk or any(e.revision == revision and e.state == State.LOADED for e in peers)

    def leaving_since(self, key: str) -> float:
        """When this worker stopped being a target of `key`; noted for the next plan."""
        since = self.world.memory.leaving.get(key, self.world.now)
        self._leaving[key] = since
        return since

    def drained(self, name: str, seconds: float) -> bool:
        """Whether `name` has been out of routing for `seconds`; starts or goes on with its drain.

        The clock starts when the world was told, not when we decided.
        """
        since = self.world.memory.drains.get(name, self.world.now)
        self._drains[name] = since
        told = self.world.withdrawn.get(name)
        if name not in self.world.memory.drains or told is None:
            self.wake(self.world.now + 0.5)
            return False
        done = max(since, told) + seconds
        self.wake(done)
        return self.world.now >= done
