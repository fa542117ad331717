"""How an agent knows the others of its pool: by gossip with a key, else by asking each; and files from them with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiohttp import web

from sidecar.core.keyring import INSECURE, Keyring
from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import PeerBytes
from sidecar.edges.gossip_keys import AwaitedKeyFile, KeyFile
from sidecar.edges.metrics import Metrics
from sidecar.edges.peers_http import PolledPeers
from sidecar.edges.server import parse_listen
from sidecar.loops.identity import Identity, keep_identity
from sidecar.model import Head, Member, Problem
from sidecar.ports import Backend, Clock, EdgeError, Peers, Row
from sidecar.settings import Settings

log = structlog.get_logger()


@dataclass(frozen=True)
class Loop:
    """One task of the agent; `beat` tells when it came round last."""

    name: str
    run: Callable[[], Coroutine[Any, Any, None]]
    beat: Callable[[], float] | None = None


@dataclass(frozen=True)
class Neighbours:
    """What connects an agent with the others of its pool.

    `run` and `beat` are of the loop that keeps `peers` current; `listening` must be told the server's port before.
    """

    peers: Peers
    problems: Callable[[], Sequence[Problem]]
    gossip: bool = False
    beat: Callable[[], float] | None = None
    rows: Callable[[], Mapping[str, Row]] = dict
    files: PeerBytes | None = None
    routes: Sequence[web.RouteDef] = ()
    listening: Callable[[int], None] = lambda port: None
    loops: Sequence[Loop] = field(default=())


@dataclass(frozen=True)
class Agent:
    """What of an agent its connection with the others is made from. `targets` are an adapter's, in rank order."""

    settings: Settings
    head: Head
    backend: Backend
    store: AdapterStore
    metrics: Metrics
    targets: Callable[[str], Sequence[str]]
    clock: Clock
    stack: AsyncExitStack

    def members(self) -> tuple[Member, ...] | None:
        """The pool as the backend lists it."""
        return self.backend.view().members


async def neighbours(agent: Agent) -> Neighbours:
    """Gossip if there is a key, or if it is wanted without. Raises EdgeError for a key file that can't be used."""
    settings = agent.settings
    file = KeyFile(settings.gossip_key_file) if settings.gossip_key_file else None
    keys = await asyncio.to_thread(file.load_if_there) if file else None
    if keys is not None or settings.insecure_gossip:
        if keys is None:
            log.warning("gossip_insecure", reason="--insecure-gossip: whoever reaches the port can lie to this agent")
        return _by_gossip(agent, keys or INSECURE, file if keys else None)
    return _by_asking(agent)


def _by_asking(agent: Agent) -> Neighbours:
    settings, head = agent.settings, agent.head
    peers = PolledPeers(pool=head.pool, uid=head.uid, members=agent.members, clock=agent.clock)
    path = settings.gossip_key_file
    log.info(
        "gossip_off",
        reason=f"--gossip-key-file {path}: no such file" if path else "no --gossip-key-file",
        meanwhile="each peer is asked for its record; files come from their origins alone",
        switch_on="start the pool's agents with one --gossip-key-file (openssl rand -hex 32 makes a key)",
    )
    if not path:
        return Neighbours(peers=peers, problems=peers.problems)
    # In Kubernetes the Secret is optional, so that its absence is nobody's mistake.
    awaited = AwaitedKeyFile(path, missed=settings.backend != "kubernetes")
    return Neighbours(
        peers=peers,
        problems=lambda: (*peers.problems(), *awaited.problems()),
        loops=(Loop("gossip-key", awaited.run),),
    )


def _by_gossip(agent: Agent, keys: Keyring, file: KeyFile | None) -> Neighbours:
    # Here, because an agent without gossip has no use for them.
    from sidecar.edges import peer_files, peer_sync
    from sidecar.edges.flights import Flights
    from sidecar.edges.peer_fetch import PeerTransfer
    from sidecar.edges.udp import UdpEndpoint
    from sidecar.loops.gossip import GossipPeers
    from sidecar.loops.mixed_peers import MixedPeers, Unreached

    settings, head, clock, members = agent.settings, agent.head, agent.clock, agent.members
    udp = UdpEndpoint(*parse_listen(settings.listen))
    gossip = GossipPeers(
        uid=head.uid,
        generation=head.generation,
        pool=head.pool,
        keys=keys,
        datagrams=udp,
        client=peer_sync.HttpSync(),
        members=members,
        clock=clock,
        fresh=lambda: agent.backend.view().members_fresh,
        new_keys=file.changed if file else None,
        rise=_Rising(agent.store, head.uid),
        store=agent.store,
        wall=time.time,
    )
    asked = PolledPeers(pool=head.pool, uid=head.uid, members=Unreached(gossip, members, clock), clock=clock)
    peers = MixedPeers(gossip, asked, members, clock)
    flights = Flights()
    transfer = PeerTransfer(
        gossip,
        flights,
        me=head.name,
        targets=agent.targets,
        received=lambda size: agent.metrics.received("peer", size),
        follow_above=settings.small_content,
    )
    agent.stack.callback(flights.close)
    agent.stack.callback(transfer.close)
    agent.metrics.follow_gossip(gossip.dropped)
    log.info("gossip_on", keys=len(keys.keys), secure=keys is not INSECURE)

    def problems() -> Sequence[Problem]:
        reason = file.reason if file else ""
        stale = Problem(
            where=f"--gossip-key-file {settings.gossip_key_file}", message=f"{reason}; the keys read before are in use"
        )
        return (*peers.problems(), *((stale,) if reason else ()))

    return Neighbours(
        peers=peers,
        problems=problems,
        gossip=True,
        beat=lambda: gossip.beat,
        rows=peers.rows,
        files=transfer,
        routes=(*peer_sync.routes(gossip), *peer_files.routes(gossip, agent.store, flights)),
        listening=udp.move,
    )


class _Rising:
    """Keeps a generation that the pool has made this agent rise to. Off the event loop: it waits for the disk."""

    def __init__(self, store: AdapterStore, uid: str) -> None:
        self._store, self._uid = store, uid
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, generation: int) -> None:
        task = asyncio.get_running_loop().create_task(self._keep(generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, generation: int) -> None:
        try:
            await asyncio.to_thread(keep_identity, self._store, Identity(self._uid, generation))
        except EdgeError as error:
            log.warning("generation_not_saved", generation=generation, error=str(error))
