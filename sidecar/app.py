"""The only place that builds and wires everything: one agent from its settings."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp
import structlog

from sidecar import __version__
from sidecar.core.memory import restore
from sidecar.core.preflight import Limits
from sidecar.core.world import Rules
from sidecar.edges.disk import AdapterStore
from sidecar.edges.engine import VllmEngine
from sidecar.edges.fetch import OriginFetcher
from sidecar.edges.metrics import Metrics
from sidecar.edges.peers_http import PolledPeers
from sidecar.edges.server import Server, parse_listen
from sidecar.edges.standalone import StandaloneBackend
from sidecar.loops.agent_view import LiveView
from sidecar.loops.engine_watch import EngineWatch
from sidecar.loops.identity import take_identity
from sidecar.loops.reconcile import Reconciler
from sidecar.model import Head, Problem
from sidecar.settings import Settings

log = structlog.get_logger()

DEFAULT_CAPACITY = 1


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


class Capacity:
    """How many adapters this worker can hold: --capacity, else the engine's own limits, else vLLM's default."""

    def __init__(self, settings: Settings, watch: EngineWatch) -> None:
        self._settings, self._watch = settings, watch

    def __call__(self) -> int:
        if self._settings.capacity:
            return self._settings.capacity
        limits = self._watch.limits
        return limits.max_cpu_loras if limits else DEFAULT_CAPACITY

    def rank(self) -> int:
        """--max-lora-rank, else the engine's; 0 is unknown."""
        if self._settings.max_lora_rank:
            return self._settings.max_lora_rank
        return self._watch.limits.max_lora_rank if self._watch.limits else 0

    def problems(self) -> Sequence[Problem]:
        """A guessed capacity, said once the engine could have told."""
        if self._settings.capacity or self._watch.limits or not self._watch.seen:
            return ()
        return (
            Problem(
                where="capacity",
                message=f"the engine does not tell its --max-cpu-loras; taken as vLLM's default, {DEFAULT_CAPACITY}. "
                "Set --capacity (LORA_SIDECAR_CAPACITY) to its --max-cpu-loras, or --max-loras where that is unset.",
            ),
        )


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
    address = advertised(settings)
    store = await asyncio.to_thread(
        lambda: AdapterStore.open(settings.adapters_dir, quota=settings.disk_quota, holder=settings.name or address)
    )
    stack.callback(store.close)
    identity = take_identity(store, steady_clock())
    session = await stack.enter_async_context(aiohttp.ClientSession())
    metrics = Metrics()
    engine = VllmEngine(session, settings, steady_clock)
    watch = EngineWatch(engine, steady_clock, interval=settings.engine_interval, up_window=settings.engine_up_window)
    capacity = Capacity(settings, watch)
    backend = StandaloneBackend(
        manifests=settings.manifests,
        seeds=settings.seeds,
        name=settings.name or address,
        address=address,
        zone=settings.zone,
        state=store,
        clock=steady_clock,
    )
    peers = PolledPeers(
        pool=settings.pool, uid=identity.uid, members=lambda: backend.view().members, clock=steady_clock
    )
    fetcher = OriginFetcher(
        settings,
        store,
        limits=lambda: Limits(
            max_lora_rank=capacity.rank(), allow_pickle=settings.allow_pickle, max_bytes=settings.max_adapter_bytes
        ),
    )
    stack.push_async_callback(fetcher.close)
    agent = Reconciler(
        head=Head(
            uid=identity.uid,
            generation=identity.generation,
            name=settings.name or address,
            pool=settings.pool,
            address=address,
            zone=settings.zone,
            labels=dict(settings.labels),
            sidecar=__version__,
        ),
        backend=backend,
        peers=peers,
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
        ),
        base_model=settings.base_model,
        capacity=capacity,
        settle_seconds=settings.settle_seconds,
        keep_files_seconds=settings.keep_files_seconds,
        fetch_concurrency=settings.fetch_concurrency,
    )
    peers.announce(agent.record)

    def problems() -> Sequence[Problem]:
        contradiction = engine.contradiction
        found = [*capacity.problems(), *peers.problems()]
        if contradiction:
            found.append(Problem(where=settings.engine_url, message=contradiction))
        return found

    view = LiveView(
        agent,
        backend,
        steady_clock,
        ready_timeout=settings.ready_timeout,
        beats=lambda: {"reconcile": agent.beat, "engine": watch.beat},
        more_problems=problems,
    )
    server = Server(view, metrics, settings.listen)
    await server.start()
    stack.push_async_callback(server.stop)
    create = asyncio.get_running_loop().create_task
    return [
        create(agent.run(), name="reconcile"),
        create(watch.run(agent.wake), name="engine"),
        create(backend.run(agent.wake), name="backend"),
        create(peers.run(agent.wake), name="peers"),
    ]
