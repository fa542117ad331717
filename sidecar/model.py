"""The words of the domain: what every other module passes around.

All types are frozen `msgspec.Struct`s: cheap, comparable by value, and decoded from JSON with their types checked.
Times are seconds since the epoch on the agent's steady clock (the wall clock at its start plus monotonic time since);
sizes are bytes.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Literal

import msgspec

PLACEMENT_VERSION = 1

LABEL_PREFIX = "lora-sidecar.io"
ADAPTER_PREFIX = "adapter.lora-sidecar.io"

# Bounds of every decoded record: a peer can be wrong, or not a peer at all.
MAX_FILES = 256
MAX_ENTRIES = 20_000

Name = Annotated[str, msgspec.Meta(max_length=253)]
Short = Annotated[str, msgspec.Meta(max_length=512)]
Sha = Annotated[str, msgspec.Meta(max_length=71)]


class State(StrEnum):
    """Where an adapter stands on one worker (contract §3)."""

    PENDING = "Pending"
    DOWNLOADING = "Downloading"
    LOADING = "Loading"
    LOADED = "Loaded"
    DRAINING = "Draining"
    FAILED = "Failed"
    REJECTED = "Rejected"
    WAITING = "Waiting"


class Frozen(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the domain's values."""


class Source(Frozen, frozen=True, kw_only=True):
    """Where an adapter's files come from. `refresh_seconds` 0 means: never look again."""

    uri: str
    digest: str | None = None
    secret: str | None = None
    refresh_seconds: float = 0.0


class Requirement(Frozen, frozen=True, kw_only=True):
    """One entry of a LabelSelector's matchExpressions."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class Selector(Frozen, frozen=True, kw_only=True):
    """A Kubernetes LabelSelector. Empty matches everything."""

    labels: dict[str, str] = {}
    expressions: tuple[Requirement, ...] = ()


class Distribution(Frozen, frozen=True, kw_only=True):
    """How many workers hold an adapter. `replicas` only with fixed, `percentage` only with percentage."""

    strategy: Literal["all", "fixed", "percentage"] = "all"
    replicas: int = 0
    percentage: int = 0
    spread: Literal["zone", "none"] = "zone"


class Adapter(Frozen, frozen=True, kw_only=True):
    """One LoRA adapter resource, with every default filled in."""

    namespace: str
    name: str
    base_model: str
    served_name: str
    source: Source
    uid: str = ""
    generation: int = 0
    created: int = 0
    selector: Selector = Selector()
    distribution: Distribution = Distribution()
    priority: int = 0
    drain_seconds: int = 5
    on_stale_prefix_cache: Literal["Hold", "Replace"] = "Hold"
    status_revision: str | None = None

    @property
    def key(self) -> str:
        """`namespace/name`, unique among the adapters of one backend."""
        return f"{self.namespace}/{self.name}"

    @property
    def source_id(self) -> str:
        """16 hex digits that name (resource UID, spec.source): content decided for one is not for another."""
        framed = "\0".join((self.uid or self.key, self.source.uri, self.source.digest or "", self.source.secret or ""))
        return hashlib.sha256(framed.encode()).hexdigest()[:16]

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key in which adapters get room (contract §4.3)."""
        return (-self.priority, self.created, self.key)


class RemoteFile(Frozen, frozen=True, kw_only=True):
    """One file behind a source: path relative to the adapter's root, size, the origin's ETag ("" if it has none)."""

    path: Short
    size: Annotated[int, msgspec.Meta(ge=0)]
    etag: Short = ""


class Listing(Frozen, frozen=True, kw_only=True):
    """What an origin holds behind a URI. With `archive` the only file is an archive, unpacked after the download."""

    files: tuple[RemoteFile, ...]
    archive: bool = False

    @property
    def size(self) -> int:
        """Bytes to read from the origin."""
        return sum(f.size for f in self.files)


class StoredFile(Frozen, frozen=True, kw_only=True):
    """One file of a revision: relative path, size, sha256 as 64 hex digits."""

    path: str
    size: int
    sha256: str


def revision_of(files: tuple[StoredFile, ...] | list[StoredFile]) -> str:
    """Content identity of an adapter: `sha256:<hex>` over its files sorted by path.

    Each file contributes `<path>\\0<size>\\0<sha256 hex>\\n`, in the order of the UTF-8 bytes of the path.
    """
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.path.encode()):
        digest.update(f"{file.path}\0{file.size}\0{file.sha256}\n".encode())
    return f"sha256:{digest.hexdigest()}"


class Decision(Frozen, frozen=True, kw_only=True):
    """What the pool settled on for one source: the listing that was read at refresh `refresh`, and its revision."""

    source_id: Annotated[str, msgspec.Meta(max_length=16)]
    refresh: Annotated[int, msgspec.Meta(ge=0)]
    revision: Sha
    listing: Annotated[tuple[RemoteFile, ...], msgspec.Meta(max_length=MAX_FILES)] = ()
    archive: bool = False


class Suspicion(Frozen, frozen=True, kw_only=True):
    """An engine of this worker died (or refused to live) with this revision: evidence for a quarantine (§5, poison)."""

    revision: Sha
    kind: Literal["death", "rejection"]
    at: float


class Entry(Frozen, frozen=True, kw_only=True):
    """One adapter on one worker, as told to the others."""

    adapter: Name
    state: State
    revision: Sha = ""
    served_name: Short = ""
    since: float = 0.0
    message: Annotated[str, msgspec.Meta(max_length=512)] = ""
    # Set: this worker asks to be passed over for the adapter (§4.4). Others look only whether it is there.
    avoid: bool = False
    # The engine refused this revision while an older one goes on serving: nobody else starts with it (§5).
    refused: Sha = ""
    # The origin no longer has the bytes of the pool's decision: the first in rank decides anew.
    gone: bool = False
    # Loaded, but the platform doesn't send its traffic here yet: nobody else may go on account of it.
    hidden: bool = False
    decision: Decision | None = None
    # What this worker downloads to decide on it for the pool; nobody knows its revision yet.
    coming: Decision | None = None
    bytes_done: int = 0
    bytes_total: int = 0


class Head(Frozen, frozen=True, kw_only=True):
    """What one worker says about itself (§7)."""

    uid: Name
    name: Name
    pool: Name = ""
    generation: int = 0
    address: Name = ""
    zone: Name = ""
    labels: dict[str, str] = {}
    base_models: Annotated[tuple[Short, ...], msgspec.Meta(max_length=64)] = ()
    capacity: Annotated[int, msgspec.Meta(ge=0)] = 1
    # Names served from outside our directory: they take room that no adapter of ours can have.
    foreign: int = 0
    engine: Short = ""
    engine_version: Short = ""
    engine_up: bool = False
    # The engine has given a first answer to this agent: before that its emptiness means nothing.
    engine_seen: bool = False
    cordoned: bool = False
    resting: bool = False
    terminating: bool = False
    sidecar: Short = ""
    placement_version: int = PLACEMENT_VERSION
    # Digest of the adapters that it wants; "" while it knows none.
    adapter_list: Short = ""
    # Speaks gossip: whoever doesn't hear it that way has another key, and doesn't take it for a peer.
    gossip: bool = False


class Record(Frozen, frozen=True, kw_only=True):
    """One worker's versioned record, written only by that worker."""

    head: Head
    version: int = 0
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()
    suspicions: Annotated[tuple[Suspicion, ...], msgspec.Meta(max_length=256)] = ()


class Member(Frozen, frozen=True, kw_only=True):
    """A worker as the backend lists it. `uid` is the pod's (empty in standalone mode)."""

    name: str
    address: str
    uid: str = ""
    zone: str = ""
    terminating: bool = False
    serving: bool = True


class BaseModel(Frozen, frozen=True, kw_only=True):
    """A base model entry of the engine's /v1/models."""

    id: str
    root: str = ""


class EngineView(Frozen, frozen=True, kw_only=True):
    """One good look at the engine.

    `process` names the engine process (start time), None when it can't be told; `adapters` is name -> root.
    """

    process: str | None
    version: str = ""
    base_models: tuple[BaseModel, ...] = ()
    adapters: dict[str, str] = {}
    at: float = 0.0


class Problem(Frozen, frozen=True, kw_only=True):
    """Something a person should see on /v1/adapters and in the log: where it is, what is wrong, and the way out."""

    where: str
    message: str


class Steering(Frozen, frozen=True, kw_only=True):
    """What a person or the platform asks of this worker (own pod's annotations, §3)."""

    cordoned: bool = False
    capacity: int | None = None
    terminating: bool = False
