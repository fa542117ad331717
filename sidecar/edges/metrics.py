"""The agent's metrics: a registry of its own, names that begin with `lora_sidecar_`.

Every series exists from the start, so that `rate()` and alerts see the first event and not only the second. No label
holds the name of an adapter or of a worker: a thousand adapters would be thousands of series in every pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder

from sidecar import __version__
from sidecar.core.wire import Drop
from sidecar.model import PLACEMENT_VERSION, State
from sidecar.ports import Result, SourceKind

_LOAD_RESULTS: tuple[Result, ...] = ("ok", "refused", "timeout", "unavailable", "failed")
_FETCH_RESULTS: tuple[Result, ...] = ("ok", "rejected", "unavailable", "denied", "changed", "disk_full", "failed")

# Seconds. A small adapter loads in tens of milliseconds; a big one on a cold disk takes minutes.
_LOAD_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_FETCH_BUCKETS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_RECONCILE_BUCKETS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class _Drops:
    """Collects what gossip itself counts, when it is scraped."""

    def __init__(self, counts: Callable[[], Mapping[Drop, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[CounterMetricFamily]:
        """See prometheus_client.registry.Collector."""
        family = CounterMetricFamily(
            "lora_sidecar_gossip_dropped", "Gossip messages dropped, by reason.", labels=["reason"]
        )
        counts = self._counts()
        for reason in Drop:
            family.add_metric([reason.name.lower()], counts.get(reason, 0))
        yield family


class Metrics:
    """Implements the ports `Meter` and `Exposition`. Only for the event loop's thread, but for `received`."""

    def __init__(self, *, process: bool = True) -> None:
        """`process` adds this process's memory, CPU and open files (read from /proc when scraped)."""
        # A `_created` sample doubles the lines of every counter and histogram, and nobody here asks for it.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves it without types
        self.registry = CollectorRegistry()
        if process:
            ProcessCollector(namespace="lora_sidecar", registry=self.registry)
        self.build = Info("lora_sidecar_build", "Version of the agent.", registry=self.registry)
        self.build.info({"version": __version__, "placement_version": str(PLACEMENT_VERSION)})

        self.adapter_count = self._gauge("adapters", "Adapters on this worker by state.", "state")
        self.problem_count = self._gauge("problems", "Problems shown on /v1/adapters.")
        self.engine_up = self._gauge("engine_up", "1 while the engine answers.")
        self.peers_alive = self._gauge("peers_alive", "Other workers of the pool that are alive.")
        self.peers_known = self._gauge("peers_known", "Other workers of the pool whose record is known.")
        self.other_list = self._gauge(
            "peers_with_other_adapter_list", "Other workers that have wanted other adapters than this one for 30 s."
        )
        self.resident = self._gauge(
            "unloaded_maybe_resident", "Adapters unloaded so recently that the engine may still read their files."
        )

        self.loads = self._counter("loads", "Load requests to the engine by how they ended.", "result")
        self.unloads = self._counter("unloads", "Unload requests to the engine by how they ended.", "result")
        self.fetches = self._counter("fetches", "Fetches of adapters by how they ended.", "result")
        self.bytes_received = self._counter(
            "received_bytes", "Bytes of adapter files by where they came from.", "source"
        )
        self.engine_restarts = self._counter("engine_restarts", "Times that another engine process answered.")

        self.load_seconds = self._histogram(
            "load_duration_seconds", "Time that the engine took to load.", _LOAD_BUCKETS
        )
        self.fetch_seconds = self._histogram("fetch_duration_seconds", "Time of a whole fetch.", _FETCH_BUCKETS)
        self.reconcile_seconds = self._histogram(
            "reconcile_duration_seconds", "Time of one pass of the reconcile loop.", _RECONCILE_BUCKETS
        )
        self._begin()

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"lora_sidecar_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"lora_sidecar_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"lora_sidecar_{name}", text, buckets=buckets, registry=self.registry)

    def _begin(self) -> None:
        for result in _LOAD_RESULTS:
            self.loads.labels(result)
            self.unloads.labels(result)
        for result in _FETCH_RESULTS:
            self.fetches.labels(result)
        for kind in get_args(SourceKind):
            self.bytes_received.labels(kind)
        self.adapters({})

    def loaded(self, result: Result, seconds: float) -> None:
        """See Meter."""
        self.loads.labels(result).inc()
        self.load_seconds.observe(seconds)

    def unloaded(self, result: Result) -> None:
        """See Meter."""
        self.unloads.labels(result).inc()

    def fetched(self, result: Result, seconds: float) -> None:
        """See Meter."""
        self.fetches.labels(result).inc()
        self.fetch_seconds.observe(seconds)

    def received(self, kind: SourceKind, size: int) -> None:
        """See Meter."""
        self.bytes_received.labels(kind).inc(max(0, size))

    def follow_gossip(self, dropped: Callable[[], Mapping[Drop, int]]) -> None:
        """Show what gossip counts; called once at most, and not without gossip."""
        self.registry.register(_Drops(dropped))

    def reconciled(self, seconds: float) -> None:
        """See Meter."""
        self.reconcile_seconds.observe(seconds)

    def engine(self, up: bool) -> None:
        """See Meter."""
        self.engine_up.set(1 if up else 0)

    def engine_restarted(self) -> None:
        """See Meter."""
        self.engine_restarts.inc()

    def adapters(self, counts: Mapping[State, int]) -> None:
        """See Meter."""
        for state in State:
            self.adapter_count.labels(state.value).set(counts.get(state, 0))

    def maybe_resident(self, count: int) -> None:
        """See Meter."""
        self.resident.set(count)

    def peers(self, alive: int, known: int) -> None:
        """See Meter."""
        self.peers_alive.set(alive)
        self.peers_known.set(known)

    def other_lists(self, count: int) -> None:
        """See Meter."""
        self.other_list.set(count)

    def problems(self, count: int) -> None:
        """See Meter."""
        self.problem_count.set(count)

    def render(self, accept: str) -> tuple[bytes, str]:
        """See Exposition: OpenMetrics for who asks for it, else the text format."""
        try:
            encode, content_type = choose_encoder(accept)
        except (ValueError, TypeError):  # a version that is no number: any scraper reads the oldest format
            encode, content_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
        return encode(self.registry), content_type
