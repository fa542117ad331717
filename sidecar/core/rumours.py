"""News that are passed on, each a bounded number of times, in turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from sidecar.core.messages import Claim, encode
from sidecar.core.replica import Replica


class _Record:
    """News of one record: newer than `base`; `reached` is the least version to which a piece sent has led."""

    __slots__ = ("base", "reached", "sent")

    def __init__(self, base: int) -> None:
        self.base = base
        self.reached = base
        self.sent = 0


class Rumours:
    """What this agent still has to tell. The newest goes first, then all take turns."""

    def __init__(self) -> None:
        self._claims: OrderedDict[tuple[str, int], tuple[Claim, int]] = OrderedDict()
        self._accusers: dict[str, set[int]] = {}
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._claims) + len(self._records)

    def claim(self, claim: Claim) -> None:
        """Tell this, and no longer what was believed before of the same agent; another accuser replaces nothing."""
        for by in list(self._accusers.get(claim.uid, ())):
            if self._claims[claim.uid, by][0].rank != claim.rank:
                self._drop(claim.uid, by)
        self._claims[claim.uid, claim.by] = (claim, 0)
        self._claims.move_to_end((claim.uid, claim.by), last=False)
        self._accusers.setdefault(claim.uid, set()).add(claim.by)

    def record(self, uid: str, base: int) -> None:
        """Tell what is newer than `base` in the record of `uid`."""
        known = self._records.get(uid)
        self._records[uid] = _Record(base if known is None else min(base, known.base))
        self._records.move_to_end(uid, last=False)

    def forget(self, uid: str) -> None:
        """Tell nothing of that agent any more."""
        self._records.pop(uid, None)
        for by in list(self._accusers.get(uid, ())):
            self._drop(uid, by)

    def take_claims(self, room: int, limit: int) -> list[Claim]:
        """Claims that fit `room` bytes, each counted as sent once; after `limit` times they are told no more."""
        taken: list[Claim] = []
        for _ in range(len(self._claims)):
            key, (claim, sent) = next(iter(self._claims.items()))
            room -= len(encode(claim))
            if room < 0:
                break
            taken.append(claim)
            if sent + 1 >= limit:
                self._drop(*key)
            else:
                self._claims[key] = (claim, sent + 1)
                self._claims.move_to_end(key)
        return taken

    def take_deltas(self, room: int, limit: int, replica: Callable[[str], Replica | None]) -> list[msgspec.Raw]:
        """Deltas that fit `room` bytes, counted like claims. A long one is told piece after piece."""
        taken: list[msgspec.Raw] = []
        for _ in range(len(self._records)):
            uid, news = next(iter(self._records.items()))
            copy = replica(uid)
            if copy is None or news.base >= copy.version:
                del self._records[uid]
                continue
            packed = copy.pack(news.base, room)
            if packed is None:
                break
            taken.append(packed[1])
            room -= memoryview(packed[1]).nbytes
            self._told(uid, news, packed[0], limit)
        return taken

    def _told(self, uid: str, news: _Record, reached: int, limit: int) -> None:
        """What every piece sent so far had in it is told; whoever missed a piece sees the gap and asks."""
        news.reached = reached if not news.sent else min(news.reached, reached)
        news.sent += 1
        if news.sent < limit:
            self._records.move_to_end(uid)
            return
        del self._records[uid]
        if news.reached > news.base:
            self._records[uid] = _Record(news.reached)

    def _drop(self, uid: str, by: int) -> None:
        del self._claims[uid, by]
        accusers = self._accusers[uid]
        accusers.discard(by)
        if not accusers:
            del self._accusers[uid]
