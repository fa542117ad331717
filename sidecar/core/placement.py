"""Which worker should hold which adapter: the same answer on every agent that has the same inputs.

The rules (placement version 1):

1. Members of an adapter are the workers that are neither terminating nor cordoned, serve its base model and match its
   selector; candidates are the members that are up.
2. The number wanted is counted over the members: a percentage must not shrink because an engine restarts.
3. Candidates are taken in the order of their scores (`hashing`), then those that rest, then those that avoid the
   adapter. With the spread `zone`, one in each zone is taken before a second in any, each of the three by itself.
4. Adapters are given room by priority (highest first), creation time, then namespace/name, and by nothing else. A full
   worker is passed over for the next.

It follows that when one worker joins or leaves while there is room, only assignments to or from that worker change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from sidecar.core.hashing import adapter_hash, score, worker_hash
from sidecar.core.pool import Pool, Worker, distinct, wanted
from sidecar.model import Adapter, Frozen

__all__ = ["Assignment", "Worker", "isolated", "place", "place_isolated", "rank"]

# Up to here plain Python is quick enough (under 20 ms) to save the 16 MiB that importing numpy costs.
PLAIN_PAIRS = 20_000


class Assignment(Frozen, frozen=True, kw_only=True):
    """Who should hold one adapter.

    `targets` are in rank: the order in which they were taken, so that an adapter that wants one worker less loses the
    last. `waiting` names, in the order of names, the candidates without room that would be targets if all had room; it
    is empty unless the adapter is short of its number. `short` is the number wanted less the number of targets.
    """

    adapter: str
    members: int
    wanted: int
    targets: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    short: int = 0


def place(adapters: Iterable[Adapter], workers: Iterable[Worker]) -> dict[str, Assignment]:
    """The assignment of every adapter, by its key and in the order in which they were given room.

    Neither the order of the arguments nor any earlier result has an influence. Of several adapters with one key the
    first in order counts. Safe to run in a thread beside an event loop: no step holds the interpreter's lock for more
    than a few milliseconds.
    """
    ordered = in_order(adapters)
    pool = Pool(workers)
    if len(ordered) * len(pool.workers) <= PLAIN_PAIRS:
        return place_plainly(ordered, pool)
    # Only now, because its import costs a small pool more memory than everything else here.
    from sidecar.core.placement_blocks import place_in_blocks

    return place_in_blocks(ordered, pool)


def in_order(adapters: Iterable[Adapter]) -> list[Adapter]:
    """The adapters in the order in which they are given room, each key once."""
    found: dict[str, Adapter] = {}
    for adapter in sorted(adapters, key=lambda a: (a.order, a.uid, a.generation)):
        found.setdefault(adapter.key, adapter)
    return list(found.values())


def place_plainly(ordered: Sequence[Adapter], pool: Pool) -> dict[str, Assignment]:
    """`place` for small pools, in plain Python: about a microsecond for each pair of adapter and worker."""
    result: dict[str, Assignment] = {}
    room = list(pool.room)
    for adapter in ordered:
        key = adapter.key
        group = pool.group(adapter)
        number = wanted(adapter.distribution, group.members)
        if not number:
            result[key] = Assignment(adapter=key, members=group.members, wanted=0)
            continue
        own = adapter_hash(adapter.namespace, adapter.name)
        ranked = [(score(own, pool.hashes[i]), i) for i in group.candidates]
        ranked.sort(key=itemgetter(0), reverse=True)  # stable, also in reverse: equal scores stay in order of name
        order = [i for _, i in ranked]
        zones = pool.zones if adapter.distribution.spread == "zone" else None
        result[key] = assign(key, number, group.members, order, pool.behind(key), zones, room, pool.names)
    return result


def assign(
    key: str,
    number: int,
    members: int,
    ranked: Sequence[int],
    behind: Mapping[int, int],
    zones: Sequence[int] | None,
    room: list[int],
    names: Sequence[str],
) -> Assignment:
    """Give `number` workers of the candidates `ranked` (by score) to an adapter and take their room."""
    order = taking_order(ranked, behind, zones)
    targets = [i for i in order if room[i] > 0]
    if len(targets) < len(order):  # who is full is not the one that stands for its zone
        targets = taking_order([i for i in ranked if room[i] > 0], behind, zones)
    del targets[number:]
    for i in targets:
        room[i] -= 1
    short = number - len(targets)
    waiting = sorted(set(order[:number]).difference(targets)) if short else ()
    return Assignment(
        adapter=key,
        members=members,
        wanted=number,
        targets=tuple([names[i] for i in targets]),
        waiting=tuple([names[i] for i in waiting]),
        short=short,
    )


def taking_order(ranked: Sequence[int], behind: Mapping[int, int], zones: Sequence[int] | None) -> list[int]:
    """The order in which to take candidates that are `ranked` by score; `zones` None: don't spread."""
    order = list(ranked)
    if behind:
        order.sort(key=lambda i: behind.get(i, 0))
    if zones is None:
        return order
    taken: dict[int, int] = {}
    rounds = {}
    for i in order:
        rounds[i] = taken[zones[i]] = taken.get(zones[i], -1) + 1
    if len(taken) > 1:
        order.sort(key=rounds.__getitem__)
        if behind:
            order.sort(key=lambda i: behind.get(i, 0))
    return order


def rank(adapter: Adapter, workers: Iterable[Worker]) -> list[tuple[str, int]]:
    """(name, score) of all these workers, members or not, the highest score first: what only the hash says."""
    own = adapter_hash(adapter.namespace, adapter.name)
    scored = [(w.name, score(own, worker_hash(w.name))) for w in distinct(workers)]
    return sorted(scored, key=itemgetter(1), reverse=True)


def isolated(reached: int, listed: int) -> bool:
    """Whether a worker that reaches `reached` of the `listed` workers, itself counted in both, should doubt itself."""
    return 2 * reached < listed


def place_isolated(
    adapters: Sequence[Adapter], everyone: Iterable[Worker], reachable: Iterable[Worker], me: str, held: frozenset[str]
) -> frozenset[str]:
    """Keys of the adapters that the isolated worker `me` should hold.

    It keeps what it holds and takes what `everyone` (all listed workers, those out of reach taken as up) gives it; what
    the `reachable` alone would give it only while it has free room, in the order in which adapters get room. If each of
    ten workers believed that it is alone, all would hold the same adapters, and most would be held by nobody.
    """
    everyone = distinct(everyone)
    hold = set(held)
    hold.update(key for key, a in place(adapters, everyone).items() if me in a.targets)
    room = next((w.room for w in everyone if w.name == me), 0)
    for key, assignment in place(adapters, reachable).items():
        if len(hold) >= room:
            break
        if me in assignment.targets:
            hold.add(key)
    return frozenset(hold)
