"""Jittered exponential backoff as plain arithmetic: the caller brings the count of failures and the random number."""

from __future__ import annotations

import math

from sidecar.model import Frozen


class Backoff(Frozen, frozen=True, kw_only=True):
    """How long to wait after the n-th failure in a row.

    Args:
        first: seconds (before jitter) to wait after the first failure, > 0.
        factor: growth from one failure to the next, >= 1.
        cap: the longest wait in seconds, >= first.

    Raises:
        ValueError: for values outside these limits.
    """

    first: float
    factor: float = 2.0
    cap: float

    def __post_init__(self) -> None:
        if not (0 < self.first <= self.cap < math.inf and 1 <= self.factor < math.inf):
            raise ValueError(
                f"backoff needs 0 < first <= cap and factor >= 1, all finite: "
                f"first={self.first}, factor={self.factor}, cap={self.cap}"
            )

    def delay(self, failures: int, unit_random: float) -> float:
        """Seconds to wait after `failures` failures in a row; 0 after none.

        `unit_random` in [0, 1] spreads the wait over the upper half of the unjittered one: whole pools fail at the
        same moment (an origin goes away), and must not come back at the same moment, but nobody comes back at once.

        Raises:
            ValueError: `unit_random` outside [0, 1].
        """
        if not 0 <= unit_random <= 1:
            raise ValueError(f"unit_random must lie in [0, 1], got {unit_random}")
        if failures <= 0:
            return 0.0
        return self._whole(failures) * (0.5 + 0.5 * unit_random)

    def _whole(self, failures: int) -> float:
        """The wait before jitter. The power is compared by logarithm: 2.0 ** 1100 raises OverflowError."""
        steps = failures - 1
        if steps * math.log(self.factor) >= math.log(self.cap / self.first):
            return self.cap
        return min(self.cap, self.first * self.factor**steps)
