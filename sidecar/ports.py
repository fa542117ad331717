"""Every edge of the agent as a Protocol, and the few errors that edges may raise.

The loops know only these; tests and the simulation put their own behind them. An error's text is shown to people:
it names the thing, the value, the limit and the way out, and holds no secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from sidecar.core.dialect_vllm import Limits
from sidecar.core.metrics_vllm import Traffic
from sidecar.core.status import AdapterStatus, Happening, Transition
from sidecar.model import (
    Adapter,
    EngineView,
    Frozen,
    Listing,
    Member,
    Problem,
    Record,
    State,
    Steering,
)


class EdgeError(Exception):
    """Base of what an edge may raise. The text is meant for people."""


class EngineUnavailable(EdgeError):
    """The engine can't be reached, or answered 5xx to a plain look. Nothing is known about its adapters."""


class EngineDisconnected(EngineUnavailable):
    """The connection broke while a call was under way, or the answer was that the engine has died: it may have done
    what it was asked, or died of it."""


class EngineTimeout(EdgeError):
    """A load or unload got no answer in time. It may still take effect: look before the next step."""


class EngineRefused(EdgeError):
    """The engine answered and said no. `reason` is one of the `REASON_*` words below."""

    def __init__(self, message: str, reason: str = "EngineRefused") -> None:
        super().__init__(message)
        self.reason = reason


REASON_RUNTIME_DISABLED = "RuntimeLoRADisabled"
REASON_NOT_VISIBLE = "SharedVolumeNotVisible"
REASON_UNAUTHORIZED = "Unauthorized"
REASON_ALREADY_LOADED = "AlreadyLoaded"
REASON_OUT_OF_MEMORY = "OutOfMemory"
REASON_BASE_MODEL = "BaseModelConflict"
REASON_REFUSED = "EngineRefused"


class OriginError(EdgeError):
    """The origin can't give the files now (network, 5xx, throttled): tried again with backoff."""


class OriginDenied(OriginError):
    """The origin refuses us or has nothing there (403, 404, empty prefix). Tried again slowly."""


class OriginChanged(OriginError):
    """The origin no longer has the content of the pool's decision (If-Match failed, another size, another hash)."""


class AdapterRejected(EdgeError):
    """The files are not an adapter that this engine can serve. Permanent until the spec or the content changes."""


class DiskFull(EdgeError):
    """No room under the adapters directory, or the quota can't be met."""


class PeerUnreachable(EdgeError):
    """A peer did not answer, or answered for another pool or pod."""


class ListenFailed(EdgeError):
    """The agent's own TCP port can't be opened. The text names the flag and the address."""


class BackendView(Frozen, frozen=True, kw_only=True):
    """What a backend knows now. None is unknown, which is never the same as empty (contract §5).

    With `adapters_fresh` or `members_fresh` False the list is the last good one and must not take anything away.
    """

    adapters: tuple[Adapter, ...] | None = None
    adapters_fresh: bool = False
    members: tuple[Member, ...] | None = None
    members_fresh: bool = False
    steering: Steering = Steering()
    # What spec.workers selects this worker by, and host:port of its agent; None and "": as told at the start.
    labels: dict[str, str] | None = None
    address: str = ""
    problems: tuple[Problem, ...] = ()


class Report(Frozen, frozen=True, kw_only=True):
    """What the platform should show about this worker: labels and annotations of the own pod, complete."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Backend(Protocol):
    """Where adapters and members come from, and where reports go."""

    def view(self) -> BackendView:
        """The present view; cheap, no I/O."""

    async def run(self, changed: Callable[[], None]) -> None:
        """Watch for ever; call `changed` after each new view. Never raises but CancelledError."""

    async def publish(self, report: Report) -> bool:
        """Write the report where the platform shows it; False if it stood there already. Raises EdgeError; the caller
        retries."""


class StatusConflict(EdgeError):
    """Another field manager holds fields of this status. `managers` are its names."""

    def __init__(self, message: str, managers: tuple[str, ...]) -> None:
        super().__init__(message)
        self.managers = managers


class StatusSeen(Frozen, frozen=True, kw_only=True):
    """What the platform shows of one adapter's status: a digest of its content, by whom, and its conditions."""

    digest: str = ""
    managers: tuple[str, ...] = ()
    conditions: dict[str, Transition] = {}
    # The Placed condition says that the pool that wrote it has no worker for the adapter.
    unplaced: bool = False


class StatusBoard(Protocol):
    """Where adapters' statuses and events are shown."""

    def status_seen(self, key: str) -> StatusSeen | None:
        """What is shown now of adapter `key` (namespace/name); None if it is not there. Cheap, no I/O."""

    async def write_status(self, adapter: Adapter, status: AdapterStatus, *, force: bool = False) -> None:
        """Show `status` as this pool's. With `force` another manager's fields are taken over.

        Raises StatusConflict (another manager is in the way), EdgeError.
        """

    async def tell(self, adapter: Adapter, happening: Happening) -> None:
        """Show an Event about the adapter; a repetition counts up the earlier one. Raises EdgeError."""


class Observed(Frozen, frozen=True, kw_only=True):
    """A peer's record, when it was last heard, and whether the peer counts as alive."""

    record: Record
    heard: float
    alive: bool


class Peers(Protocol):
    """The other workers' records (by asking each over HTTP, or by gossip)."""

    def view(self) -> Mapping[str, Observed]:
        """Records by worker name, the own one not included; cheap, no I/O."""

    def unheard(self) -> frozenset[str]:
        """Listed addresses (or names) from which no record has come yet; the own one not included."""

    def namesake(self) -> Record | None:
        """The live agent that had this worker's name first, if there is one: this worker then holds no targets."""

    def announce(self, record: Record) -> None:
        """Make `record` what others read from now on."""

    async def ask(self, name: str) -> Record:
        """Read one peer's record afresh. Raises PeerUnreachable."""

    async def run(self, changed: Callable[[], None]) -> None:
        """Keep the view current for ever; call `changed` after each change of content or liveness."""


class Engine(Protocol):
    """The vLLM server on this worker."""

    async def look(self) -> EngineView:
        """One look at /v1/models. Raises EngineUnavailable, EngineRefused (wrong API key)."""

    async def load(self, name: str, path: str) -> None:
        """Load an adapter. Returning means the engine said yes, no more. Raises EngineRefused, EngineTimeout,
        EngineUnavailable."""

    async def unload(self, name: str) -> None:
        """Forget a name; a name that isn't there is success. Raises as `load`."""

    async def reset_prefix_cache(self) -> bool:
        """True if the engine dropped its prefix cache (only in vLLM's dev mode)."""

    async def limits(self) -> Limits | None:
        """max_loras, max_cpu_loras and max_lora_rank, if the engine tells them."""

    async def in_flight(self) -> frozenset[str] | None:
        """Names with requests that have produced a token, as far as the metrics tell; None when they don't."""

    async def traffic(self, name: str) -> Traffic:
        """Whether requests of `name`, which isn't loaded, are in flight: waiting ones too. Takes as long as a token."""


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from the event loop's thread."""


class Fetched(Frozen, frozen=True, kw_only=True):
    """A published revision: its directory, and what was read to make it."""

    revision: str
    path: str
    listing: Listing
    warnings: tuple[str, ...] = ()


class Fetcher(Protocol):
    """Brings adapters onto the disk: from what is there, from peers, from the origin."""

    async def listing(self, adapter: Adapter) -> Listing:
        """What the origin holds now. Raises OriginError and its subclasses, AdapterRejected (limits)."""

    async def fetch(self, adapter: Adapter, listing: Listing, revision: str | None, progress: Progress) -> Fetched:
        """Download exactly `listing`, verify, check, publish. With `revision` anything else is refused.

        One download per content at a time: a second caller waits for the first's result.
        Raises OriginError (and subclasses), AdapterRejected, DiskFull.
        """


class Store(Protocol):
    """The adapters directory (contract §8)."""

    @property
    def revisions_dir(self) -> str:
        """Absolute path under which every revision's directory lies."""

    def revisions(self) -> Mapping[str, str]:
        """Revision -> absolute path of its published directory."""

    def evict(self, keep: frozenset[str]) -> tuple[str, ...]:
        """Delete least recently used revisions outside `keep` until the quota is met; returns those deleted."""

    def touch(self, revision: str) -> None:
        """Note a use, for LRU."""

    def save(self, name: str, data: bytes) -> None:
        """Keep `data` as state/<name>, durably and atomically. Raises DiskFull."""

    def read(self, name: str) -> bytes | None:
        """state/<name> as saved last, None if there is none."""


class Clock(Protocol):
    """Seconds since the epoch that never jump while the process runs."""

    def __call__(self) -> float: ...


Row = Mapping[str, object]
"""One JSON object of an answer; keys are camelCase."""


class AgentView(Protocol):
    """What the agent's HTTP server shows. All but `drained` are cheap and do no I/O."""

    def healthy(self) -> tuple[bool, Row]:
        """Whether every loop makes progress, and details by loop (seconds since its last step, for example)."""

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        """Whether this worker may get traffic, and what it still waits for."""

    def adapters(self) -> Sequence[Row]:
        """Every known adapter, in the order of namespace/name.

        Keys: name, namespace, servedName, baseModel, wantedHere (bool), rank (int, 0 is the first; None without one),
        targets (worker names), state (of this worker; "" when it is none of its business), revision, message,
        bytesDone, bytesTotal, problems (texts). Others may follow.
        """

    def explain(self, name: str) -> Row | None:
        """Candidates of one adapter in rank order with score, zone, liveness and why passed over; None: unknown name.

        `name` is looked up as namespace/name, then as resource name, then as served name. When several fit, the first
        in the order in which adapters get room is explained, and `also` lists the others as namespace/name.
        Keys: adapter (namespace/name), servedName, baseModel, members, wanted (ints), targets, waiting, rejected (why,
        or ""), isolated, also, and workers: each as core.explain's Explained, the targets in rank first, then the
        others in the order in which they would be taken. Others may follow.
        """

    def record(self) -> Record:
        """This worker's own record; the same object as long as nothing in it changed."""

    def peers(self) -> Sequence[Row]:
        """Every worker of the pool, this one included (`self` true), in the order of names.

        Keys: name, address, uid, zone, self (bool), state (`alive`, `dead`, by gossip also `suspect` and `clock`, or
        `unknown` for a listed worker that was never heard), heard and, by gossip, since
        (seconds since the epoch), engine (version), engineUp, capacity, cordoned, resting, baseModels, adapters
        (namespace/name -> {state, revision, message}). Others may follow. Of one never heard only name, address, self,
        state and adapters are known.
        """

    async def drained(self) -> Row:
        """Answer when this worker's traffic has moved away, at once when its pod isn't going away, or after 60 s.

        Starts nothing. Keys: drained (bool), waiting (namespace/name of the adapters not yet handed over).
        """

    def problems(self) -> Sequence[Problem]:
        """What a person should see now."""


Result = Literal["ok", "refused", "rejected", "unavailable", "timeout", "denied", "changed", "disk_full", "failed"]
"""How an attempt ended, for the metrics."""

SourceKind = Literal["origin", "peer", "local"]


class Meter(Protocol):
    """Where the loops report what they did. Never raises, never blocks."""

    def loaded(self, result: Result, seconds: float) -> None:
        """One load request to the engine has ended."""

    def unloaded(self, result: Result) -> None:
        """One unload request to the engine has ended."""

    def fetched(self, result: Result, seconds: float) -> None:
        """One adapter's fetch has ended."""

    def received(self, kind: SourceKind, size: int) -> None:
        """`size` bytes of adapter files came from there."""

    def reconciled(self, seconds: float) -> None:
        """One pass of the reconcile loop took so long."""

    def engine(self, up: bool) -> None:
        """Whether the engine answers now."""

    def engine_restarted(self) -> None:
        """Another engine process answers than before."""

    def adapters(self, counts: Mapping[State, int]) -> None:
        """Adapters of this worker by state; states left out count as none."""

    def maybe_resident(self, count: int) -> None:
        """Adapters unloaded so recently that the engine may still read their files."""

    def peers(self, alive: int, known: int) -> None:
        """Other workers of the pool that are alive, and that are known at all."""

    def other_lists(self, count: int) -> None:
        """Other workers that have wanted other adapters than this one for long."""

    def problems(self, count: int) -> None:
        """Problems shown to people now."""


class Exposition(Protocol):
    """The metrics as text."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """Body and Content-Type for a scraper's Accept header."""
