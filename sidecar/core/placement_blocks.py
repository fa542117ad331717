"""Placement of large pools with numpy: the same answer as `place_plainly`, some twenty times as fast.

An adapter that wants three of a thousand workers needs the head of its ranking only. So scores are computed for blocks
of adapters, small enough for the CPU's cache, and of each row only the best few are kept, in order. Room is then given
out in plain Python, adapter by adapter, from these heads. Where a head doesn't tell (too many in it are full, a zone is
missing from it, some worker avoids the adapter) the whole ranking of those with room is made for this adapter alone.

Every call of numpy handles a block of a few MiB at most and lets go of the interpreter's lock meanwhile, so the event
loop of a process that runs this in a thread goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sidecar.core.hashing import GAMMA, MIX_1, MIX_2, adapter_hash
from sidecar.core.placement import Assignment, taking_order
from sidecar.core.pool import Group, Pool, wanted
from sidecar.model import Adapter

U64 = NDArray[np.uint64]
Index = NDArray[np.intp]

BLOCK_SCORES = 1 << 18  # 2 MiB of them
ADAPTERS_AT_ONCE = 2_048  # whose heads are in memory at the same time
# Heads serve up to this number wanted; beyond, heads are so long that they save nothing.
LARGEST_HEAD = 256


def place_in_blocks(ordered: Sequence[Adapter], pool: Pool) -> dict[str, Assignment]:
    """`place` for large pools. `ordered` as `in_order` gives them."""
    floor = _Floor(pool)
    result: dict[str, Assignment] = {}
    for start in range(0, len(ordered), ADAPTERS_AT_ONCE):
        turns = [floor.turn(adapter) for adapter in ordered[start : start + ADAPTERS_AT_ONCE]]
        _add_heads(turns, floor.hashes)
        for turn in turns:
            result[turn.key] = floor.assign(turn)
    return result


class _Seats:
    """A group's candidates, and how many of them have room left: in all, and (without those that rest) by zone."""

    def __init__(self, group: Group, pool: Pool) -> None:
        self.members = group.members
        self.columns: Index = np.array(group.candidates, dtype=np.intp)
        self.awake: Index = np.array([i for i in group.candidates if i not in pool.resting], dtype=np.intp)
        self.open = sum(pool.room[i] > 0 for i in group.candidates)
        self.zones: dict[int, int] = {}
        self.open_zones: dict[int, int] = {}
        for i in self.awake.tolist():
            zone = pool.zones[i]
            self.zones[zone] = self.zones.get(zone, 0) + 1
            self.open_zones[zone] = self.open_zones.get(zone, 0) + (pool.room[i] > 0)
        self.everyone = tuple([pool.names[i] for i in group.candidates])


class _Turn:
    """One adapter before it gets its room. `head`: the best candidates by score, or none if they would not tell."""

    __slots__ = ("adapter", "head", "keep", "key", "number", "own", "seats", "zones")

    def __init__(
        self, adapter: Adapter, seats: _Seats, number: int, avoided: bool, zones: Sequence[int] | None
    ) -> None:
        self.adapter = adapter
        self.key = adapter.key
        self.seats = seats
        self.number = number
        self.zones = zones
        self.own = adapter_hash(adapter.namespace, adapter.name)
        self.head: list[int] = []
        tells = not avoided and number <= LARGEST_HEAD and 0 < number < len(seats.columns)
        self.keep = min(len(seats.awake), max(16, min(8 * number, 2 * number + 64))) if tells else 0


class _Floor:
    """The pool while room is given out."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.room = list(pool.room)
        self.open = np.array([r > 0 for r in pool.room], dtype=np.bool_)
        self.hashes: U64 = np.array(pool.hashes, dtype=np.uint64)
        self._seats: dict[int, _Seats] = {}
        self._seats_of: list[list[_Seats]] = [[] for _ in pool.names]

    def turn(self, adapter: Adapter) -> _Turn:
        """Look up everything about the adapter that doesn't depend on who has room."""
        group = self.pool.group(adapter)
        seats = self._seats.get(group.number)
        if seats is None:
            seats = self._seats[group.number] = _Seats(group, self.pool)
            for i in group.candidates:
                self._seats_of[i].append(seats)
        zones = self.pool.zones if adapter.distribution.spread == "zone" else None
        number = wanted(adapter.distribution, group.members)
        return _Turn(adapter, seats, number, self.pool.avoided(adapter.key), zones)

    def assign(self, turn: _Turn) -> Assignment:
        """Give the adapter its workers and take their room."""
        targets = self._targets(turn) if turn.number and turn.seats.open else []
        short = turn.number - len(targets)
        names = self.pool.names
        assignment = Assignment(
            adapter=turn.key,
            members=turn.seats.members,
            wanted=turn.number,
            targets=tuple([names[i] for i in targets]),
            waiting=self._waiting(turn, targets) if short else (),
            short=short,
        )
        for i in targets:
            self.room[i] -= 1
            if not self.room[i]:
                self._fill(i)
        return assignment

    def _targets(self, turn: _Turn) -> list[int]:
        seats = turn.seats
        if turn.head:
            room = self.room
            picked = _from_head([i for i in turn.head if room[i] > 0], turn.number, turn.zones, seats.open_zones)
            if picked is not None:
                return picked
        return self._order(turn, seats.columns[self.open[seats.columns]])[: turn.number]

    def _waiting(self, turn: _Turn, targets: list[int]) -> tuple[str, ...]:
        seats = turn.seats
        if turn.number >= len(seats.columns):
            if not targets:
                return seats.everyone  # one tuple for all adapters that find no room: they can be thousands
            first = seats.columns.tolist()
        else:
            told = _from_head(turn.head, turn.number, turn.zones, seats.zones) if turn.head else None
            first = told if told is not None else self._order(turn, seats.columns)[: turn.number]
        return tuple([self.pool.names[i] for i in sorted(set(first).difference(targets))])

    def _order(self, turn: _Turn, columns: Index) -> list[int]:
        """These candidates in the order in which the adapter takes them."""
        worst_first = np.argsort(
            ~_scores(np.array([turn.own], dtype=np.uint64), self.hashes[columns])[0], kind="stable"
        )
        return taking_order(columns[worst_first].tolist(), self.pool.behind(turn.key), turn.zones)

    def _fill(self, worker: int) -> None:
        """Note that this worker has no room any more."""
        self.open[worker] = False
        zone = self.pool.zones[worker]
        for seats in self._seats_of[worker]:
            seats.open -= 1
            if worker not in self.pool.resting:
                seats.open_zones[zone] -= 1


def _from_head(
    head: Sequence[int], number: int, zones: Sequence[int] | None, zone_sizes: dict[int, int]
) -> list[int] | None:
    """The first `number` in taking order, from the best of them by score; None if the rest could matter.

    `zone_sizes` counts those that may be taken in each zone, in the head or not.
    """
    if len(head) < number:
        return None
    if zones is None or len(zone_sizes) < 2:
        return list(head[:number])
    seen: dict[int, int] = {}
    rounds: list[list[int]] = []
    for i in head:
        before = seen.get(zones[i], 0)
        seen[zones[i]] = before + 1
        if before == len(rounds):
            rounds.append([])
        rounds[before].append(i)
        if before == 0 and len(rounds[0]) == number:
            return rounds[0]
    picked: list[int] = []
    complete = 0
    while len(picked) < number:
        picked += rounds[complete]
        complete += 1
    # Somebody behind the head has a lower score, and so comes before these only as one of an earlier round.
    if all(seen.get(zone, 0) >= min(size, complete - 1) for zone, size in zone_sizes.items()):
        return picked[:number]
    return None


def _add_heads(turns: Sequence[_Turn], hashes: U64) -> None:
    """Rank the best candidates for all turns, those with the same candidates together."""
    alike: dict[tuple[int, int], list[_Turn]] = {}
    for turn in turns:
        if turn.keep:
            alike.setdefault((id(turn.seats), turn.keep), []).append(turn)
    for (_, keep), some in alike.items():
        columns = some[0].seats.awake
        for turn, head in zip(some, _best([t.own for t in some], hashes[columns], keep), strict=True):
            turn.head = columns[head].tolist()


def _best(adapters: Sequence[int], workers: U64, keep: int) -> Iterator[Index]:
    """For each adapter the positions of the `keep` workers with the highest scores, the highest first.

    Equal scores are not put in order of name here: of a million pairs of workers two have them once in 10^13 pools.
    """
    rows = max(1, BLOCK_SCORES // len(workers))
    for start in range(0, len(adapters), rows):
        # Inverted, since numpy sorts upwards.
        worst = ~_scores(np.array(adapters[start : start + rows], dtype=np.uint64), workers)
        if keep < len(workers):
            some = np.argpartition(worst, keep - 1, axis=1)[:, :keep]
            worst = np.take_along_axis(worst, some, axis=1)
            yield from np.take_along_axis(some, np.argsort(worst, axis=1, kind="stable"), axis=1)
        else:
            yield from np.argsort(worst, axis=1, kind="stable")


def _scores(adapters: U64, workers: U64) -> U64:
    """`hashing.score` of every adapter (rows) with every worker (columns)."""
    mixed = adapters[:, None] ^ workers[None, :]
    shifted = np.empty_like(mixed)
    mixed += np.uint64(GAMMA)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        np.right_shift(mixed, np.uint64(shift), out=shifted)
        mixed ^= shifted
        mixed *= np.uint64(factor)
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed
