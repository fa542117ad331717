"""The only place that builds and wires everything: one agent from its settings."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import structlog
from msgspec import structs

from sidecar import __version__
from sidecar.core.annotations import POOL
from sidecar.core.memory import restore
from sidecar.core.preflight import Limits
from sidecar.core.retry import Backoff
from sidecar.core.vllm_args import VllmArgs
from sidecar.core.world import Rules
from sidecar.edges.disk import AdapterStore
from sidecar.edges.engine import VllmEngine
from sidecar.edges.fetch import OriginFetcher
from sidecar.edges.metrics import Metrics
from sidecar.edges.seeds import join_address
from sidecar.edges.server import Server, parse_listen
from sidecar.edges.standalone import StandaloneBackend
from sidecar.loops.agent_view import LiveView
from sidecar.loops.announce import Announcer
from sidecar.loops.capacity import Capacity
from sidecar.loops.engine_watch import EngineWatch
from sidecar.loops.identity import take_identity
from sidecar.loops.reconcile import Reconciler
from sidecar.loops.status_writer import StatusWriter
from sidecar.loops.waiting_view import WaitingView
from sidecar.model import Head, Problem
from sidecar.ports import Backend, EdgeError
from sidecar.settings import Settings
from sidecar.wiring_peers import Agent, Loop, neighbours

if TYPE_CHECKING:
    from sidecar.edges.credentials import Credentials
    from sidecar.edges.kubernetes.api import Api, PodIdentity
    from sidecar.edges.kubernetes.pod import OwnPod

log = structlog.get_logger()

DEFAULT_ENGINE = "http://127.0.0.1:8000"
# Between two attempts to read the own pod, without which an agent on Kubernetes doesn't know its pool.
POD_AGAIN = Backoff(first=1.0, cap=10.0)


@dataclass(frozen=True)
class Platform:
    """What depends on where the agent runs. `settings` are those in force: as given, and as the platform says."""

    settings: Settings
    head: Head
    backend: Backend
    engine_args: VllmArgs | None = None
    engine_key: str = ""
    credentials: Credentials | None = None
    loops: Callable[[Reconciler], Sequence[Loop]] = lambda _: ()
    # Reads anew whether this worker is ending.
    look_again: Callable[[], Awaitable[None]] | None = None


def steady_clock() -> float:
    """Seconds since the epoch as of this process's start, moved on by a clock that never jumps."""
    return _EPOCH + time.monotonic()


_EPOCH = time.time() - time.monotonic()


def advertised(settings: Settings) -> str:
    """host:port under which peers reach this agent: --advertise, else --listen, with the host's name for a wildcard."""
    if settings.advertise:
        return settings.advertise
    host, port = parse_listen(settings.listen)
    if host in ("", "0.0.0.0", "::"):  # noqa: S104  # compared with, not bound to
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def run_agent(settings: Settings) -> None:
    """Run one agent until SIGTERM or SIGINT.

    Raises EdgeError (unusable adapters directory, port in use) and ValueError (settings that contradict each other).
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        tasks = await _start(settings, stack)
        log.info("agent_started", version=__version__, backend=settings.backend, adapters_dir=settings.adapters_dir)
        stopping = loop.create_task(_until(stop))
        done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1.0)
        for task in done - {stopping}:
            # A loop that ends is a fault of this program: end loudly, so that the platform starts it anew.
            task.result()
    log.info("agent_stopped")


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _start(settings: Settings, stack: AsyncExitStack) -> list[asyncio.Task[None]]:
    store = await asyncio.to_thread(
        lambda: AdapterStore.open(
            settings.adapters_dir, quota=settings.disk_quota, holder=settings.name or socket.gethostname()
        )
    )
    stack.callback(store.close)
    metrics = Metrics()
    if settings.backend == "kubernetes":
        platform = await _kubernetes_platform(settings, store, metrics, stack)
    else:
        platform = _standalone_platform(settings, store)
    return await _start_agent(platform, store, metrics, stack)


def _standalone_platform(settings: Settings, store: AdapterStore) -> Platform:
    address = advertised(settings)
    identity = take_identity(store, steady_clock())
    name = settings.name or address
    backend = StandaloneBackend(
        manifests=settings.manifests,
        seeds=settings.seeds,
        name=name,
        address=address,
        zone=settings.zone,
        state=store,
        clock=steady_clock,
    )
    head = Head(
        uid=identity.uid,
        generation=identity.generation,
        name=name,
        pool=settings.pool,
        address=address,
        zone=settings.zone,
        labels=dict(settings.labels),
        sidecar=__version__,
    )
    return Platform(settings=settings, head=head, backend=backend)


async def _kubernetes_platform(
    settings: Settings, store: AdapterStore, metrics: Metrics, stack: AsyncExitStack
) -> Platform:
    # Here, because a standalone agent has no use for them.
    from sidecar.edges.kubernetes.api import in_cluster
    from sidecar.edges.kubernetes.backend import KubernetesBackend, Place
    from sidecar.edges.kubernetes.board import manager
    from sidecar.edges.kubernetes.secrets import Secrets

    api, me = await in_cluster()
    stack.push_async_callback(api.close)
    pod, read_now = await _own_pod(settings, api, me, store, metrics)
    pool = settings.service or pod.pool
    if not pool:
        raise ValueError(
            f"pod {me.namespace}/{me.pod} belongs to no pool: label its template {POOL}: NAME, or give --service"
        )
    port = parse_listen(settings.listen)[1]
    backend = KubernetesBackend(
        api=api,
        me=me,
        place=Place(namespace=settings.namespace or me.namespace, service=pool, pool=pool, port=port),
        pod=pod,
        pod_read_now=read_now,
        state=store,
        clock=steady_clock,
        allow_http=settings.allow_http,
        crd_grace=settings.crd_grace,
    )
    identity = take_identity(store, steady_clock(), me.uid)
    head = Head(
        uid=me.uid,
        generation=identity.generation,
        name=me.pod,
        pool=pool,
        address=join_address(pod.ip, port) if pod.ip else "",
        labels=pod.own_labels,
        sidecar=__version__,
    )

    def loops(agent: Reconciler) -> Sequence[Loop]:
        announcer = Announcer(agent, backend, backend.labels, steady_clock)
        writer = StatusWriter(agent, backend, steady_clock, manager=manager(pool))

        def look_again() -> None:
            announcer.wake()
            writer.wake()

        agent.platform_routes, agent.on_step = announcer.routes, look_again
        return (
            Loop("announce", announcer.run, lambda: announcer.beat),
            Loop("status", writer.run, lambda: writer.beat),
        )

    told = pod.engine
    if told is not None and settings.engine_url == DEFAULT_ENGINE and not told.socket:
        settings = structs.replace(settings, engine_url=f"http://127.0.0.1:{told.port}")
    log.info("pod_identified", namespace=me.namespace, pod=me.pod, uid=me.uid, node=me.node, pool=pool)
    key = told.api_keys[0] if told is not None and told.api_keys else ""
    return Platform(
        settings=settings,
        head=head,
        backend=backend,
        engine_args=told,
        engine_key=key,
        credentials=Secrets(api, me, allow_http=settings.allow_http),
        loops=loops,
        look_again=backend.look_at_own_pod,
    )


async def _own_pod(
    settings: Settings, api: Api, me: PodIdentity, store: AdapterStore, metrics: Metrics
) -> tuple[OwnPod, bool]:
    """The own pod, and whether the API server says so; while it is away, the pod as it was last known.

    Shows why it waits as long as there is neither.
    """
    from sidecar.edges.kubernetes.backend import read_own_pod, saved_pod
    from sidecar.edges.kubernetes.trouble import problem

    view = WaitingView(me.pod, me.uid)
    server = Server(view, metrics, settings.listen)
    failures = 0
    try:
        while True:
            try:
                return await read_own_pod(api, me), True
            except EdgeError as error:
                saved = saved_pod(store, me.uid)
                if saved is not None:
                    log.warning("own_pod_from_state", error=str(error))
                    return saved, False
                trouble = problem(f"pod {me.pod}", error, me, me.namespace)
            if trouble != view.problem:
                log.warning("own_pod_unreadable", message=trouble.message)
            view.problem = trouble
            if not failures:
                await server.start()
            failures += 1
            await asyncio.sleep(POD_AGAIN.delay(failures, random.random()))
    finally:
        if failures:
            await server.stop()


async def _start_agent(
    platform: Platform, store: AdapterStore, metrics: Metrics, stack: AsyncExitStack
) -> list[asyncio.Task[None]]:
    """Everything that is the same on every platform."""
    settings, backend, head = platform.settings, platform.backend, platform.head
    session = await stack.enter_async_context(aiohttp.ClientSession())
    engine = VllmEngine(session, settings, steady_clock, platform.engine_key)
    watch = EngineWatch(engine, steady_clock, interval=settings.engine_interval, up_window=settings.engine_up_window)
    capacity = Capacity(settings, watch, platform.engine_args)
    agents: list[Reconciler] = []
    around = await neighbours(
        Agent(
            settings=settings,
            head=head,
            backend=backend,
            store=store,
            metrics=metrics,
            targets=lambda key: agents[0].targets(key),
            clock=steady_clock,
            stack=stack,
        )
    )

    def limits() -> Limits:
        return Limits(
            max_lora_rank=capacity.rank(), allow_pickle=settings.allow_pickle, max_bytes=settings.max_adapter_bytes
        )

    fetcher = OriginFetcher(
        settings,
        store,
        credentials=platform.credentials,
        peers=around.files,
        received=metrics.received,
        limits=limits,
    )
    stack.push_async_callback(fetcher.close)
    agent = Reconciler(
        head=structs.replace(head, gossip=around.gossip),
        backend=backend,
        peers=around.peers,
        engine=engine,
        watch=watch,
        fetcher=fetcher,
        store=store,
        memory=restore(store.read("memory.json"), steady_clock()),
        clock=steady_clock,
        meter=metrics,
        rules=Rules(
            look_again_seconds=settings.look_again_seconds,
            handover_patience=settings.handover_patience,
            small_content=settings.small_content,
            peer_bytes=around.gossip,
        ),
        base_model=settings.base_model,
        capacity=capacity,
        limits=lambda: f"{limits()} secrets={platform.credentials is not None}",
        settle_seconds=settings.settle_seconds,
        keep_files_seconds=settings.keep_files_seconds,
        fetch_concurrency=settings.fetch_concurrency,
    )
    agents.append(agent)
    around.peers.announce(agent.record)
    loops = [
        Loop("reconcile", agent.run, lambda: agent.beat),
        Loop("engine", lambda: watch.run(agent.wake), lambda: watch.beat),
        Loop("backend", lambda: backend.run(agent.wake)),
        Loop("peers", lambda: around.peers.run(agent.wake), around.beat),
        *around.loops,
        *platform.loops(agent),
    ]

    def problems() -> Sequence[Problem]:
        contradiction = engine.contradiction
        found = [*capacity.problems(), *around.problems(), *agent.lists.problems()]
        if watch.current() is None:
            silence = watch.message or "the engine does not answer"
            found.append(Problem(where=settings.engine_url, message=silence))
        if contradiction:
            found.append(Problem(where=settings.engine_url, message=contradiction))
        return found

    view = LiveView(
        agent,
        backend,
        steady_clock,
        ready_timeout=settings.ready_timeout,
        beats=lambda: {loop.name: loop.beat() for loop in loops if loop.beat},
        more_problems=problems,
        more_of_peers=around.rows,
        look_again=platform.look_again,
    )
    server = Server(view, metrics, settings.listen, peer_routes=around.routes)
    await server.start()
    around.listening(server.port)
    stack.push_async_callback(server.stop)
    create = asyncio.get_running_loop().create_task
    return [create(loop.run(), name=loop.name) for loop in loops]
