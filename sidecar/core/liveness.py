"""How long to doubt: suspicion that shortens with independent accusers, and doubt of oneself (Lifeguard).

An agent that was asleep, or whose own network is bad, must not accuse its peers. Its health score stretches every wait
of its own probes, and time in which it didn't run counts for nobody's silence.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from typing import Protocol, TypeVar

from sidecar.model import Frozen

T = TypeVar("T")


class Rng(Protocol):
    """The randomness that the caller brings (`random.Random` has it)."""

    def random(self) -> float:
        """A number in [0, 1)."""

    def randrange(self, start: int, stop: int) -> int:
        """A number in [start, stop)."""

    def shuffle(self, x: MutableSequence[str]) -> None:
        """Put a list into a random order."""

    def sample(self, population: Sequence[str], k: int) -> list[str]:
        """Pick k different ones."""


class Timing(Frozen, frozen=True, kw_only=True):
    """The waits of the protocol, in seconds, and its fan-outs."""

    # One probe a period, and one at a time: a worker's cost doesn't depend on the size of the pool.
    period: float = 0.5
    # Without an ack for so long, others are asked to probe, and the peer itself is asked over HTTP.
    direct: float = 0.4
    # Without any answer for so long, the probe has failed.
    patience: float = 0.9
    helpers: int = 3
    # Bounds of a suspicion for a small pool; they grow with its size, since news need longer.
    suspicion_short: float = 2.0
    suspicion_long: float = 4.0
    # Accusers besides the first that shorten a suspicion to its least.
    confirmations: int = 2
    # News go to so many peers at this interval, and nothing is sent when there are none.
    news_interval: float = 0.2
    news_fanout: int = 3
    # A copy that is known to be old is fetched over HTTP if datagrams haven't made it new by then.
    catch_up: float = 0.25
    sync_interval: float = 30.0
    sync_fast: float = 2.0
    rejoin_interval: float = 5.0
    rejoin_alone: float = 1.0
    # A dead member is shown, and known again by its incarnation, for so long.
    forget: float = 600.0
    # Running late by more than this is a sleep of one's own; by more than the second, a reason to ask what was missed.
    late: float = 0.15
    asleep: float = 2.0
    # How long an HTTP conversation may take for each step.
    talk: float = 5.0


class Health:
    """Doubt of oneself: 0 is none. Every wait of one's own probes is multiplied by `factor`."""

    MOST = 6

    def __init__(self) -> None:
        self.score = 0

    @property
    def factor(self) -> float:
        """1 for a healthy agent."""
        return 1.0 + self.score

    def worse(self, by: int = 1) -> None:
        """A sign that the fault may be one's own."""
        self.score = min(self.MOST, self.score + by)

    def better(self) -> None:
        """A probe went well."""
        self.score = max(0, self.score - 1)


def spread(size: int) -> float:
    """How much longer news take to reach a pool of `size` than a small one."""
    return max(1.0, math.log10(max(1, size)) / 2)


def retransmits(size: int) -> int:
    """How often one agent passes on one piece of news: enough that all of `size` hear it, with loss."""
    return 3 + math.ceil(4 * math.log10(size + 1))


class Suspicion:
    """A wait for a refutation that began at `start`. It shortens with every accuser besides the first."""

    def __init__(self, start: float, by: int, shortest: float, longest: float, needed: int) -> None:
        self.start = start
        self.accusers = {by}
        self._shortest = shortest
        self._longest = max(shortest, longest)
        self._needed = needed

    @property
    def deadline(self) -> float:
        """When the accused counts as dead."""
        more = len(self.accusers) - 1
        if more >= self._needed:
            return self.start + self._shortest
        share = math.log(more + 1) / math.log(self._needed + 1)
        return self.start + self._longest - (self._longest - self._shortest) * share

    def confirm(self, by: int) -> bool:
        """Note another accuser; True if it is news and still counts."""
        if by in self.accusers or len(self.accusers) > self._needed:
            return False
        self.accusers.add(by)
        return True


def suspicion(timing: Timing, health: Health, size: int, start: float, by: int) -> Suspicion:
    """A suspicion in a pool of `size`, by an agent of that health."""
    factor = spread(size)
    return Suspicion(
        start,
        by,
        timing.suspicion_short * factor,
        timing.suspicion_long * factor * health.factor,
        max(0, min(timing.confirmations, size - 2)),
    )
