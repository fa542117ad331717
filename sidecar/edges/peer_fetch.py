"""Bytes from other workers: published files from any that holds the revision, else chunks of a download under way.

Never worse than the origin alone but for the patience: whoever is away, slow or wrong is passed over, and what nobody
gives in good time is left to the origin. Whose bytes fail their hash is struck out for that content.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from sidecar.core.flight import flight_id, upstream
from sidecar.core.wire import AUTH_HEADER, UNCOVERED, HttpAnswer, HttpRequest, Opened, body_hash
from sidecar.edges.download import ReadRange
from sidecar.edges.flights import Flight, Flights, Present
from sidecar.edges.origins import Sink
from sidecar.edges.peer_http import Body, Headers, Line, PeerConnections, PeerFault, Take
from sidecar.edges.peer_race import Hedges, Race
from sidecar.edges.peer_sources import (
    AWAY_SECONDS,
    BlobReader,
    Buffers,
    Content,
    Fields,
    FlightReader,
    OriginReader,
    Peer,
    SourceEnds,
    files_of,
)
from sidecar.edges.threads import in_thread
from sidecar.model import Adapter, Listing, RemoteFile, State
from sidecar.ports import Observed

log = structlog.get_logger()

# Without a sign of life for so long, nobody is waited for: what peers that are all broken may cost.
PATIENCE = 4.0
MAX_HOLDERS = 3
MAX_CONTENTS = 64
# In larger pools the first worker would be asked for hashes too often, and the parent's word counts alone.
FEW_TARGETS = 64

_HOLDING = frozenset({State.LOADING, State.LOADED, State.DRAINING})


class PeerSide(Protocol):
    """What gossip gives: who is there, and the right to speak."""

    def view(self) -> Mapping[str, Observed]:
        """Peers by name."""

    def sign_request(self, uid: str, request: HttpRequest) -> tuple[str, int]:
        """The authentication header of a request without a body to that agent, and its nonce."""

    def check_answer(self, uid: str, header: str, nonce: int, answer: HttpAnswer) -> Opened | None:
        """The answer if it is authentic and that agent's. May be called on any thread."""


class PeerTransfer:
    """Implements fetch.PeerBytes. Only for the event loop's thread."""

    def __init__(
        self,
        side: PeerSide,
        flights: Flights,
        *,
        me: str,
        targets: Callable[[str], Sequence[str]],
        received: Callable[[int], None] = lambda size: None,
        patience: float = PATIENCE,
        follow_above: int = 0,
    ) -> None:
        """`me` is this worker's name; `targets` gives an adapter's targets (by namespace/name) in rank order.

        Downloads under way are followed only for contents of more than `follow_above` bytes: what everybody reads from
        the origin at once is here sooner than the others' first chunks of it.
        """
        self._side, self._flights = side, flights
        self._me, self._targets = me, targets
        self._received, self._patience = received, patience
        self._follow_above = follow_above
        self._hedges = Hedges()
        self.buffers = Buffers()
        self._connections = PeerConnections()
        self._contents: dict[str, Content] = {}

    def share(
        self, adapter: Adapter, listing: Listing, root: Path, present: Present
    ) -> contextlib.AbstractContextManager[Flight]:
        """Let other workers read what comes of a download below `root`."""
        return self._flights.share(adapter, listing, root, present)

    def refuted(self, adapter: Adapter, listing: Listing) -> None:
        """See fetch.PeerBytes. Of several who gave some of it nobody can say which was wrong."""
        content = self._content(adapter, listing)
        for uid in content.served:
            if len(content.served) == 1:
                self.strike(content, uid, "the whole content is not what it should be")
            content.away[uid] = self._now() + AWAY_SECONDS
        content.served.clear()
        content.published = None

    def close(self) -> None:
        """Let go of connections."""
        self._connections.close()

    async def published(self, adapter: Adapter, listing: Listing) -> Listing | None:
        """See fetch.PeerBytes."""
        view = self._side.view()
        revision = _revision(adapter, listing, view.values())
        known = self._content(adapter, listing)
        for peer in self._holders(adapter, revision, known):
            try:
                async with asyncio.timeout(self._patience / MAX_HOLDERS):
                    stored = await files_of(self, known, peer, revision)
            except (SourceEnds, PeerFault, TimeoutError) as error:
                known.away[peer.uid] = self._now() + AWAY_SECONDS
                log.debug("no_list_of_files", peer=peer.name, revision=revision, reason=str(error))
                continue
            remote = [
                RemoteFile(path=file.path, size=file.size, etag=f"sha256:{file.sha256}") for file in stored.values()
            ]
            found = Listing(files=tuple(remote))
            content = self._content(adapter, found)
            content.revision, content.published = revision, stored
            return found
        return None

    async def read(
        self,
        adapter: Adapter,
        listing: Listing,
        file: RemoteFile,
        start: int,
        stop: int,
        sink: Sink,
        origin: ReadRange | None,
    ) -> int:
        """See fetch.PeerBytes."""
        content = self._content(adapter, listing)
        last = OriginReader(origin, self.buffers, file) if origin is not None else None
        race = Race(content, self._readers(adapter, listing, file, content), last, self._hedges, self._patience)
        position = start
        while position < stop:
            piece = await race.next(position, stop)
            if piece is None:
                break
            reached = await in_thread(partial(piece.pass_on, position, stop, sink))
            self.buffers.give(piece.data)
            if race.winner.uid:
                content.served.add(race.winner.uid)
                self._received(reached - position)
            position = reached
        return position

    async def get(self, peer: Peer, path: str, fields: Fields, take: Take, span: str = "") -> tuple[int, Headers]:
        """One authentic answer; its body has gone to `take`. Raises SourceEnds, PeerFault, and what `take` raises.

        A cancellation ends the exchange, so that a peer that drags it out holds no thread.
        """
        header, nonce = self._side.sign_request(peer.uid, HttpRequest(method="GET", path=path, range=span))
        found: list[Opened] = []

        def accept(status: int, headers: Headers) -> bool:
            answer = HttpAnswer(status=status, fields=fields(status, headers))
            opened = self._side.check_answer(peer.uid, headers.get(AUTH_HEADER, ""), nonce, answer)
            found.extend([opened] if opened else [])
            return opened is not None

        sent = {AUTH_HEADER: header, "Accept-Encoding": "identity"} | ({"Range": span} if span else {})
        line = Line()
        try:
            status, headers = await in_thread(
                lambda: self._connections.get(peer.address, path, sent, accept, take, line)
            )
        except asyncio.CancelledError:
            line.cut()
            raise
        if not found:
            raise SourceEnds(f"no authentic answer (HTTP {status})")
        if isinstance(take, Body) and found[0].body != UNCOVERED and found[0].body != body_hash(bytes(take.data)):
            raise SourceEnds("another body than was signed")
        return status, headers

    def strike(self, content: Content, uid: str, reason: str) -> None:
        """Ask that agent for nothing of this content any more."""
        if uid not in content.struck:
            content.struck.add(uid)
            log.warning("peer_struck_out", peer=uid, content=content.name, reason=reason)

    def _readers(
        self, adapter: Adapter, listing: Listing, file: RemoteFile, content: Content
    ) -> Iterable[BlobReader | FlightReader]:
        """Whom to ask, in this order. Looked up one by one: the world may change meanwhile."""
        revision = content.revision or _revision(adapter, listing, self._side.view().values())
        if content.revision or not listing.archive:
            for peer in self._holders(adapter, revision, content):
                yield BlobReader(self, content, peer, file, revision)
        if content.revision or listing.size <= self._follow_above:
            return
        targets = self._targets(adapter.key)
        view = self._side.view()
        first = view.get(targets[0]) if targets and len(targets) <= FEW_TARGETS else None
        root = _peer(first) if first is not None and first.alive else None
        for name in upstream(targets, self._me):
            seen = view.get(name)
            if seen is not None and seen.alive:
                yield FlightReader(self, content, _peer(seen), listing, file, root)

    def _holders(self, adapter: Adapter, revision: str, content: Content) -> list[Peer]:
        """Who has published the revision and is worth asking; every worker in another order, so that many readers
        don't meet at one holder."""
        now = self._now()
        holders = [
            _peer(seen)
            for seen in self._side.view().values()
            if revision and seen.alive and _holds(seen, adapter, revision)
        ]
        usable = [peer for peer in holders if content.usable(peer.uid, now)]
        usable.sort(key=lambda peer: hashlib.sha256(f"{self._me}\0{peer.name}".encode()).digest())
        return usable[:MAX_HOLDERS]

    def _content(self, adapter: Adapter, listing: Listing) -> Content:
        name = flight_id(adapter.source_id, listing)
        content = self._contents.pop(name, None) or Content(name)
        self._contents[name] = content
        if len(self._contents) > MAX_CONTENTS:
            del self._contents[next(iter(self._contents))]
        return content

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _peer(seen: Observed) -> Peer:
    head = seen.record.head
    return Peer(head.uid, head.name, head.address)


def _holds(seen: Observed, adapter: Adapter, revision: str) -> bool:
    return any(
        entry.adapter == adapter.key and entry.revision == revision and entry.state in _HOLDING
        for entry in seen.record.entries
    )


def _revision(adapter: Adapter, listing: Listing, view: Iterable[Observed]) -> str:
    """The revision that this listing becomes, as far as somebody knows; "" if nobody does."""
    if adapter.source.digest:
        return adapter.source.digest
    for seen in view:
        for entry in seen.record.entries:
            decision = entry.decision
            known = decision is not None and decision.source_id == adapter.source_id
            if entry.adapter == adapter.key and decision is not None and known and decision.listing == listing.files:
                return decision.revision
    return ""
