"""What an agent remembers between looks, and across restarts (the fields that `dump` keeps).

Everything here can be lost without breaking a law of safety, except the history of loads: with it forgotten, a vLLM
that keys its prefix cache by name alone could mix cached blocks of old weights into an update.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec

from sidecar.model import Adapter, Decision, Frozen, Listing, Suspicion

FOREVER = 4e9
"""A time that is never reached (year 2096), and that JSON can hold."""

PROVEN_SECONDS = 600.0
"""Who has had a revision loaded for so long may load it again though it is in quarantine."""

MESSAGE_LIMIT = 256
"""Characters of a message that others are told."""

_WHEN = re.compile(r"; tried again at \d\d:\d\d:\d\d UTC$")


class LoadedOnce(Frozen, frozen=True):
    """A load that was at least tried: this engine process may hold cached blocks of `revision` under `name`."""

    process: str
    name: str
    revision: str


class Avoid(Frozen, frozen=True):
    """This worker asks to be passed over for an adapter until `until` (FOREVER: until source or content changes)."""

    source_id: str
    revision: str
    until: float
    step: int = 0


class Retry(Frozen, frozen=True):
    """Failures in a row of one step for one input, and when it may be tried again (FOREVER: when the input changes)."""

    input: str
    failures: int
    not_before: float
    message: str
    rejected: bool = False


class Refused(Frozen, frozen=True):
    """Content that the engine refused while an older revision could serve on; not tried again from this source."""

    source_id: str
    revision: str


def spoken(message: str, again: float, now: float) -> str:
    """What went wrong and when it is tried again, for people; an absolute time, so that it isn't news every second."""
    if not now < again < FOREVER:
        return message
    when = f"; tried again at {datetime.fromtimestamp(again, tz=UTC):%H:%M:%S} UTC"
    return message[: MESSAGE_LIMIT - len(when)] + when


def unspoken(message: str) -> str:
    """A message without when it is tried again: the same as long as the same goes wrong."""
    return _WHEN.sub("", message)


class Trial(Frozen, frozen=True):
    """A look for new content that failed; what is decided on goes on serving.

    `failures` in a row, `not_before` when to look again. `listing`: what was found to be no adapter, and isn't read
    again as long as it is still the same.
    """

    source_id: str
    message: str
    failures: int
    not_before: float
    listing: Listing | None = None


class Quarantine(Frozen, frozen=True):
    """A revision that killed engines isn't newly loaded until `until`. `since`: the last death that led to this."""

    until: float
    step: int
    since: float = 0.0


class Held(Frozen, frozen=True):
    """What this worker serves of an adapter since `since`; an engine's restart counts only if it was there for less
    than `PROVEN_SECONDS` before."""

    revision: str
    since: float


class Attempt(Frozen, frozen=True):
    """A load that is in flight or was done lately, for blaming an engine's death on it."""

    key: str
    revision: str
    started: float
    ended: float | None = None


class Rest(Frozen, frozen=True):
    """The engine died twice within ten minutes: this worker is sorted behind the others until `until`."""

    until: float
    step: int


class Memory(msgspec.Struct):
    """The agent's memory. Mutable; changed only by `core.outcome` and the reconcile loop.

    `volatile` names are forgotten at a restart on purpose: they describe waits that begin anew.
    """

    history: list[LoadedOnce] = []
    avoid: dict[str, Avoid] = {}
    retries: dict[str, Retry] = {}
    decisions: dict[str, Decision] = {}
    previous: dict[str, str] = {}
    refused: dict[str, Refused] = {}
    gone: dict[str, int] = {}
    trials: dict[str, Trial] = {}
    suspicions: list[Suspicion] = []
    quarantine: dict[str, Quarantine] = {}
    # Revisions that this worker's own engine died with twice.
    banned: dict[str, Quarantine] = {}
    held: dict[str, Held] = {}
    attempts: list[Attempt] = []
    deaths: list[float] = []
    rest: Rest | None = None
    refreshed: dict[str, float] = {}
    unloaded: dict[str, float] = {}
    drain_seconds: dict[str, int] = {}
    process: str | None = None
    base_models: tuple[str, ...] = ()
    ready_process: str | None = None
    # By which limits adapters were rejected.
    limits: str = ""
    # By revision: what the check found strange in content that it let pass.
    doubts: dict[str, str] = {}
    # Volatile from here on.
    drains: dict[str, float] = {}
    leaving: dict[str, float] = {}
    large: dict[str, int] = {}
    no_reset: set[str] = set()


def trial(memory: Memory, adapter: Adapter) -> Trial | None:
    """The last look for new content behind the adapter's present source, if it failed."""
    found = memory.trials.get(adapter.key)
    return found if found is not None and found.source_id == adapter.source_id else None


def refused_revision(memory: Memory, adapter: Adapter) -> str:
    """The revision of the adapter's present source that this engine refused; "" if none."""
    refused = memory.refused.get(adapter.key)
    return refused.revision if refused is not None and refused.source_id == adapter.source_id else ""


VOLATILE = ("drains", "leaving", "large", "no_reset")
MAX_HISTORY = 20_000
MAX_DOUBTS = 1_000


def dump(memory: Memory) -> bytes:
    """JSON of what survives a restart."""
    kept = {f: getattr(memory, f) for f in memory.__struct_fields__ if f not in VOLATILE}
    return msgspec.json.encode(kept)


def restore(data: bytes | None, now: float) -> Memory:
    """What `dump` wrote; a fresh memory if there is none or it can't be read. Times in the future are cut."""
    if not data:
        return Memory()
    try:
        memory = msgspec.json.decode(data, type=Memory)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return Memory()
    memory.deaths = [min(t, now) for t in memory.deaths]
    memory.attempts = [a for a in memory.attempts if a.started <= now]
    return memory
