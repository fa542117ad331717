"""Who gives the next piece, on virtual time: how long a silent source may cost, and what is never asked for twice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sidecar.core.flight import CHUNK
from sidecar.edges.peer_race import MAX_HEDGES, STALL, Hedges, Race
from sidecar.edges.peer_sources import AWAY_SECONDS, Content, Peer, Piece, SourceBusy, SourceEnds
from tests.sim.loop import run

PATIENCE = 4.0


@dataclass
class Source:
    """Gives a piece after `after` seconds, or never; or fails then; shows a sign of life every `signs` seconds."""

    name: str
    after: float = float("inf")
    failure: Exception | None = None
    signs: float = 0.0
    heard: float = 0.0
    asked: list[tuple[float, int]] = field(default_factory=list)
    cancelled: int = 0

    @property
    def peer(self) -> Peer:
        return Peer("" if self.name == "origin" else f"uid-{self.name}", self.name, "")

    async def piece(self, position: int, stop: int) -> Piece:
        clock = asyncio.get_running_loop().time
        self.asked.append((clock(), position))
        until = clock() + self.after
        try:
            while clock() < until:
                await asyncio.sleep(min(until - clock(), self.signs or 3600.0))
                self.heard = clock() if self.signs else self.heard
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return Piece(bytearray(1), position, min(stop, position + CHUNK))


@dataclass
class Ran:
    """What came of it: who gave each piece, and when it was there."""

    content: Content
    gave: list[tuple[str, float]]
    left_to_origin: bool
    free: int


def race(
    *peers: Source, origin: Source | None = None, pieces: int = 1, free: int = MAX_HEDGES, known: Content | None = None
) -> Ran:
    """Ask for so many pieces, one after the other."""

    async def main() -> Ran:
        content, hedges = known or Content("content"), Hedges(free)
        asking = Race(content, peers, origin, hedges, PATIENCE)
        gave: list[tuple[str, float]] = []
        for number in range(pieces):
            piece = await asking.next(number * CHUNK, pieces * CHUNK)
            if piece is None:
                break
            gave.append((asking.winner.name, asyncio.get_running_loop().time()))
        return Ran(content, gave, len(gave) < pieces, hedges.free)

    return run(main())


def test_one_who_gives_is_asked_for_everything_and_nobody_else() -> None:
    one, two, origin = Source("one", 1.0), Source("two", 0.1), Source("origin", 0.1)
    ran = race(one, two, origin=origin, pieces=3)
    assert ran.gave == [("one", 1.0), ("one", 2.0), ("one", 3.0)]
    assert not two.asked
    assert not origin.asked


def test_after_half_the_patience_the_next_is_asked_beside_a_silent_one_and_stays() -> None:
    silent, two, three = Source("silent"), Source("two", 1.0), Source("three", 0.1)
    ran = race(silent, two, three, origin=Source("origin", 0.1), pieces=2)
    assert ran.gave == [("two", PATIENCE / 2 + 1.0), ("two", PATIENCE / 2 + 2.0)]
    assert (silent.asked, silent.cancelled) == ([(0.0, 0)], 1)
    assert not three.asked
    assert ran.content.away == {"uid-silent": PATIENCE / 2 + 1.0 + AWAY_SECONDS}
    assert not ran.content.struck, "slow is not wrong"


def test_the_first_may_still_win_and_then_the_second_is_dropped() -> None:
    slow, two = Source("slow", PATIENCE / 2 + 0.5), Source("two")
    ran = race(slow, two, origin=Source("origin"))
    assert ran.gave == [("slow", PATIENCE / 2 + 0.5)]
    assert (two.cancelled, ran.content.away, ran.free) == (1, {}, MAX_HEDGES)


def test_silent_peers_cost_the_patience_however_many_there_are_and_the_rest_is_the_origins() -> None:
    peers = [Source(f"{number}") for number in range(15)]
    origin = Source("origin", 0.5)
    ran = race(*peers, origin=origin, pieces=9)
    assert ran.gave == [("origin", PATIENCE + 0.5)]
    assert ran.left_to_origin
    assert origin.asked == [(PATIENCE, 0)], "one piece to see, the rest by a read of its own"
    assert [len(peer.asked) for peer in peers] == [1, 1] + 13 * [0]
    assert ran.free == MAX_HEDGES
    again = race(*peers, origin=origin, known=ran.content)
    assert again.left_to_origin, "the other parts don't wait once more"
    assert not again.gave


def test_peers_go_on_while_the_origin_is_asked_and_may_give_what_it_does_not() -> None:
    slow, two = Source("slow", PATIENCE + 2.0), Source("two")
    ran = race(slow, two, origin=Source("origin", 0.5, SourceEnds("it is down")))
    assert ran.gave == [("slow", PATIENCE + 2.0)]


def test_without_the_right_to_ask_one_more_the_origin_is_asked_instead_of_the_peers() -> None:
    silent, two, origin = Source("silent"), Source("two", 0.1), Source("origin", 0.1)
    ran = race(silent, two, origin=origin, free=0)
    assert ran.left_to_origin
    assert not ran.gave
    assert silent.cancelled == 1
    assert not two.asked
    assert not origin.asked


def test_those_who_fail_are_followed_at_once_and_cost_no_patience() -> None:
    gone, busy, last = (
        Source("gone", 0.1, SourceEnds("404")),
        Source("busy", 0.1, SourceBusy("503")),
        Source("last", 0.1, SourceEnds("500")),
    )
    ran = race(gone, busy, last, origin=Source("origin"))
    assert ran.left_to_origin
    assert [each.asked[0][0] for each in (gone, busy, last)] == [0.0, 0.1, 0.2]
    assert ran.content.away["uid-busy"] < ran.content.away["uid-gone"]
    assert ran.content.alone_until == 0.0, "others may be asked for the next part"


def test_who_shows_that_it_goes_on_is_waited_for_but_not_for_ever() -> None:
    origin = Source("origin", 0.1)
    assert race(Source("working", 10.0, signs=1.0), Source("two"), origin=origin).gave == [("working", 10.0)]
    assert not origin.asked
    ran = race(Source("pretending", signs=1.0), origin=origin)
    assert ran.gave == [("origin", STALL + 0.1)]


def test_without_an_origin_peers_have_the_patience_and_no_more() -> None:
    silent = Source("silent")
    ran = race(silent, Source("two"))
    assert ran.left_to_origin
    assert not ran.gave
    assert silent.cancelled == 1


def test_who_is_struck_out_or_away_is_not_asked() -> None:
    content = Content("content")
    content.struck.add("uid-liar")
    content.away["uid-away"] = 5.0
    liar, away, good = Source("liar", 0.1), Source("away", 0.1), Source("good", 0.1)
    assert race(liar, away, good, known=content).gave == [("good", 0.1)]
    assert not liar.asked
    assert not away.asked


def test_a_race_that_is_called_off_leaves_nobody_running() -> None:
    silent, two = Source("silent"), Source("two")

    async def main() -> int:
        hedges = Hedges()
        asking = Race(Content("content"), [silent, two], None, hedges, PATIENCE)
        task = asyncio.create_task(asking.next(0, CHUNK))
        await asyncio.sleep(PATIENCE / 2 + 0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return hedges.free

    assert run(main()) == MAX_HEDGES
    assert (silent.cancelled, two.cancelled) == (1, 1)
