"""Who gives the next piece: one source, and another beside it if that keeps one waiting; the first good one counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import structlog

from sidecar.edges.peer_http import PeerFault
from sidecar.edges.peer_sources import AWAY_SECONDS, Content, Peer, Piece, Reader, SourceBusy, SourceEnds

log = structlog.get_logger()

# Signs of life alone, without a piece, are believed for so long.
STALL = 15.0
BUSY_SECONDS = 1.0
# Second sources at a time, of all downloads: a pool that is slow as a whole isn't asked for everything twice.
MAX_HEDGES = 2


class Hedges:
    """The bound on second sources."""

    def __init__(self, most: int = MAX_HEDGES) -> None:
        self.free = most


class Race:
    """The sources of one range of one file. After half the patience without a sign of life a second peer is asked
    beside the first, after all of it the origin beside both; what is asked for is always one piece."""

    def __init__(
        self, content: Content, peers: Iterable[Reader], origin: Reader | None, hedges: Hedges, patience: float
    ) -> None:
        """`peers` in the order in which they are asked; they are taken one by one, when they are needed."""
        self._content, self._peers, self._origin = content, iter(peers), origin
        self._hedges, self._patience = hedges, patience
        self._loop = asyncio.get_running_loop()
        self._best: Reader | None = None
        self._running: dict[asyncio.Task[Piece], Reader] = {}
        self._extra = 0

    @property
    def winner(self) -> Peer:
        """Who gave the last piece; an empty uid means the origin."""
        assert self._best is not None
        return self._best.peer

    async def next(self, position: int, stop: int) -> Piece | None:
        """The next piece, None if the rest is for the origin alone."""
        begun = self._loop.time()
        if self._best is None or not self._usable(self._best):
            self._best = self._another()
        if self._best is None or self._content.alone_until > begun:
            return None
        try:
            self._ask(self._best, position, stop)
            for step, due in enumerate(self._deadlines(begun)):
                piece = await self._until(due, begun, position, stop)
                if piece is not None or not self._running:
                    return piece
                if not self._beside(step, position, stop):
                    break
            self._leave()
            return None
        finally:
            await self._end()

    def _deadlines(self, begun: float) -> Iterator[tuple[float, float]]:
        """How long without a sign of life, and at the longest until when, before each further step."""
        yield self._patience / 2, begun + STALL
        yield self._patience, begun + STALL
        if self._origin is not None:
            yield STALL, begun + self._patience + STALL

    async def _until(self, due: tuple[float, float], begun: float, position: int, stop: int) -> Piece | None:
        """A piece; None when it is time for another step, or when nobody is left."""
        while self._running:
            heard = max(begun, *(reader.heard for reader in self._running.values()))
            left = min(heard + due[0], due[1]) - self._loop.time()
            if left <= 0:
                return None
            done, _ = await asyncio.wait(self._running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                piece = self._outcome(task, position, stop)
                if piece is not None:
                    return piece
        return None

    def _outcome(self, task: asyncio.Task[Piece], position: int, stop: int) -> Piece | None:
        reader = self._running.pop(task)
        try:
            piece = task.result()
        except (SourceEnds, PeerFault) as error:
            self._pass_over(reader, str(error), BUSY_SECONDS if isinstance(error, SourceBusy) else AWAY_SECONDS)
            following = self._another() if reader is not self._origin else None
            if following is not None:
                self._ask(following, position, stop)
            return None
        if reader is self._origin:
            self._leave()
        elif self._best is not None and reader is not self._best and self._best in self._running.values():
            self._pass_over(self._best, "another one was quicker", AWAY_SECONDS)
        self._best = reader
        return piece

    def _beside(self, step: int, position: int, stop: int) -> bool:
        """Ask one more than those who keep one waiting. False if they are waited for no longer."""
        if step == 0:
            following = self._another() if self._hedges.free else None
            if following is not None:
                self._ask_too(following, position, stop)
            return True
        if step == 1 and self._origin is not None and self._hedges.free:
            self._ask_too(self._origin, position, stop)
            return True
        return False

    def _ask_too(self, reader: Reader, position: int, stop: int) -> None:
        self._hedges.free -= 1
        self._extra += 1
        self._ask(reader, position, stop)

    def _ask(self, reader: Reader, position: int, stop: int) -> None:
        self._running[asyncio.create_task(reader.piece(position, stop))] = reader

    def _another(self) -> Reader | None:
        return next(filter(self._usable, self._peers), None)

    def _usable(self, reader: Reader) -> bool:
        return self._content.usable(reader.peer.uid, self._loop.time())

    def _leave(self) -> None:
        """Whoever is waited for has had its time."""
        self._content.alone_until = self._loop.time() + AWAY_SECONDS
        for reader in self._running.values():
            if reader is not self._origin:
                self._pass_over(reader, "nothing new in good time", AWAY_SECONDS)

    def _pass_over(self, reader: Reader, reason: str, seconds: float) -> None:
        if reader is not self._origin:
            self._content.away[reader.peer.uid] = self._loop.time() + seconds
        log.debug("source_gives_nothing", source=reader.peer.name, content=self._content.name, reason=reason)

    async def _end(self) -> None:
        self._hedges.free += self._extra
        self._extra = 0
        tasks = list(self._running)
        self._running.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
