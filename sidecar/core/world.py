"""What the planner sees (World) and says (Plan): values only."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sidecar.core.catalog import Catalog
from sidecar.core.memory import Memory
from sidecar.core.placement import Assignment
from sidecar.model import Decision, EngineView, Entry, Frozen, Head, Listing, State


class Peer(Frozen, frozen=True, kw_only=True):
    """A peer's record as the planner reads it: entries by adapter key, and how fresh it is."""

    head: Head
    entries: Mapping[str, Entry]
    heard: float
    alive: bool


class Rules(Frozen, frozen=True, kw_only=True):
    """The settings that the planner obeys; seconds and bytes."""

    look_again_seconds: float = 3.0
    handover_patience: float = 600.0
    witness_age: float = 10.0
    # A replacement is listed as soon as it has an address, mostly 2 to 5 s after it was created.
    heir_seconds: float = 10.0
    small_content: int = 16 * 1024 * 1024
    # Files come from other workers too, also while those still download them.
    peer_bytes: bool = False


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one decision of this worker depends on.

    `owned` is served name -> revision of what the engine holds from our directory, `foreign` the other names it serves;
    both are meaningless while `engine` is None (unknown). `mine` are the keys that this worker should hold.
    `withdrawn` is served name -> when the world was told that this worker no longer serves it.
    """

    now: float
    me: str
    catalog: Catalog
    adapters_fresh: bool
    members_fresh: bool
    isolated: bool
    settled: bool
    terminating: bool
    assignments: Mapping[str, Assignment]
    mine: frozenset[str]
    peers: Mapping[str, Peer]
    # While this worker's engine is starting: what it would hold, were it up. It is fetched meanwhile, and no more.
    prefetch: Mapping[str, Assignment]
    # Keys whose selector and base model fit no listed worker at all, each of which has said who it is.
    unmatched: frozenset[str]
    engine: EngineView | None
    engine_message: str
    stale_cache: bool
    owned: Mapping[str, str]
    foreign: frozenset[str]
    disk: frozenset[str]
    decisions: Mapping[str, Decision]
    quarantined: frozenset[str]
    withdrawn: Mapping[str, float]
    busy_names: frozenset[str]
    # Names whose unload can no longer be called off.
    going: frozenset[str]
    busy_fetches: Mapping[str, tuple[int, int]]
    memory: Memory
    rules: Rules
    # While this worker's pod ends: keys that nobody else in the list could ever hold, and since when that is so.
    heirless: Mapping[str, float] = {}


class Fetch(Frozen, frozen=True, kw_only=True):
    """Bring the adapter's content onto the disk.

    `listing` None: read it from the origin first. `expected`: the only revision to accept. `limit`: bytes above which
    the pool's decision is waited for. `compare`: a refresh, nothing to do if the listing is still this one.
    `refresh`: the number that the resulting decision gets. `trial`: a look for new content, of no matter for what is
    decided on if it fails. `ahead`: the pool
    hasn't decided on it yet; it is of no matter for anything, but the bytes are here if it does.
    """

    key: str
    refresh: int
    listing: Listing | None = None
    expected: str | None = None
    limit: int | None = None
    compare: Decision | None = None
    trial: bool = False
    ahead: bool = False


class Load(Frozen, frozen=True, kw_only=True):
    """Load `revision` under `name`; `reset`: drop the prefix cache before."""

    key: str
    name: str
    revision: str
    reset: bool = False


class Unload(Frozen, frozen=True, kw_only=True):
    """Unload `name`. With `handover` the world is looked at once more before, by asking `witnesses`."""

    name: str
    revision: str
    key: str = ""
    handover: bool = False
    witnesses: tuple[str, ...] = ()


class Swap(Frozen, frozen=True, kw_only=True):
    """Unload and load back to back; if the engine refuses `new`, `old` again at once."""

    key: str
    name: str
    old: str
    new: str
    reset: bool = False
    witnesses: tuple[str, ...] = ()


Action = Fetch | Load | Unload | Swap


class Status(Frozen, frozen=True, kw_only=True):
    """Where an adapter stands on this worker; `routed`: it should get the adapter's traffic."""

    state: State
    served_name: str
    revision: str = ""
    message: str = ""
    avoid: bool = False
    routed: bool = False
    held: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now, what to tell, which names are being drained since when, and when to think again."""

    actions: tuple[Action, ...]
    statuses: Mapping[str, Status]
    drains: Mapping[str, float]
    leaving: Mapping[str, float]
    wake_at: float
