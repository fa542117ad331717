"""The metrics as a scraper reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar import __version__
from sidecar.edges.metrics import Metrics
from sidecar.model import State
from sidecar.ports import Exposition, Meter


def samples(metrics: Metrics, accept: str = "") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body, _ = metrics.render(accept)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[(name, tuple(sorted(labels.items())))]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(process=False)


def test_it_is_what_the_loops_and_the_server_expect(metrics: Metrics) -> None:
    meter: Meter = metrics
    exposition: Exposition = metrics
    assert meter is exposition


def test_every_name_has_the_prefix() -> None:
    names = {name for name, _ in samples(Metrics())}
    assert names
    assert all(name.startswith("lora_sidecar_") for name in names)


def test_series_exist_before_the_first_event(metrics: Metrics) -> None:
    assert value(metrics, "lora_sidecar_loads_total", result="refused") == 0
    assert value(metrics, "lora_sidecar_fetches_total", result="denied") == 0
    assert value(metrics, "lora_sidecar_received_bytes_total", source="peer") == 0
    assert {
        state for (name, labels) in samples(metrics) if name == "lora_sidecar_adapters" for _, state in labels
    } == set(State)


def test_loads_and_fetches_count_by_result_with_their_time(metrics: Metrics) -> None:
    metrics.loaded("ok", 0.02)
    metrics.loaded("ok", 400.0)
    metrics.loaded("refused", 0.01)
    metrics.unloaded("timeout")
    metrics.fetched("disk_full", 2.0)
    assert value(metrics, "lora_sidecar_loads_total", result="ok") == 2
    assert value(metrics, "lora_sidecar_loads_total", result="refused") == 1
    assert value(metrics, "lora_sidecar_unloads_total", result="timeout") == 1
    assert value(metrics, "lora_sidecar_fetches_total", result="disk_full") == 1
    assert value(metrics, "lora_sidecar_load_duration_seconds_bucket", le="0.03") == 2
    assert value(metrics, "lora_sidecar_load_duration_seconds_bucket", le="300.0") == 2
    assert value(metrics, "lora_sidecar_load_duration_seconds_count") == 3
    assert value(metrics, "lora_sidecar_fetch_duration_seconds_sum") == 2.0


def test_bytes_count_by_source_and_never_fall(metrics: Metrics) -> None:
    metrics.received("origin", 100)
    metrics.received("origin", -1)
    metrics.received("local", 5)
    assert value(metrics, "lora_sidecar_received_bytes_total", source="origin") == 100
    assert value(metrics, "lora_sidecar_received_bytes_total", source="local") == 5


def test_a_state_that_nothing_is_in_any_more_falls_to_zero(metrics: Metrics) -> None:
    metrics.adapters({State.LOADING: 2, State.LOADED: 1})
    metrics.adapters({State.LOADED: 3})
    assert value(metrics, "lora_sidecar_adapters", state="Loading") == 0
    assert value(metrics, "lora_sidecar_adapters", state="Loaded") == 3


def test_gauges(metrics: Metrics) -> None:
    metrics.engine(True)
    metrics.engine_restarted()
    metrics.peers(2, 5)
    metrics.other_lists(3)
    metrics.problems(4)
    metrics.maybe_resident(6)
    metrics.reconciled(0.002)
    assert value(metrics, "lora_sidecar_engine_up") == 1
    assert value(metrics, "lora_sidecar_engine_restarts_total") == 1
    assert value(metrics, "lora_sidecar_peers_alive") == 2
    assert value(metrics, "lora_sidecar_peers_known") == 5
    assert value(metrics, "lora_sidecar_peers_with_other_adapter_list") == 3
    assert value(metrics, "lora_sidecar_problems") == 4
    assert value(metrics, "lora_sidecar_unloaded_maybe_resident") == 6
    assert value(metrics, "lora_sidecar_reconcile_duration_seconds_count") == 1
    metrics.engine(False)
    assert value(metrics, "lora_sidecar_engine_up") == 0


def test_build_info_names_the_version(metrics: Metrics) -> None:
    assert value(metrics, "lora_sidecar_build_info", version=__version__, placement_version="1") == 1


def test_two_agents_in_one_process_count_apart() -> None:
    one, other = Metrics(process=False), Metrics(process=False)
    one.engine_restarted()
    assert value(other, "lora_sidecar_engine_restarts_total") == 0


@pytest.mark.parametrize(
    "accept", ["", "text/plain;version=0.0.4", "text/plain;version=x.y", "*/*", ";;,,q=", "text/plain;version="]
)
def test_any_accept_header_gets_the_text_format(metrics: Metrics, accept: str) -> None:
    body, content_type = metrics.render(accept)
    assert content_type.startswith("text/plain")
    assert b"lora_sidecar_build_info" in body


def test_openmetrics_for_who_asks_for_it(metrics: Metrics) -> None:
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert b"_created" not in body


def test_process_metrics_come_when_wanted(metrics: Metrics) -> None:
    assert value(Metrics(), "lora_sidecar_process_resident_memory_bytes") > 1_000_000
    assert b"resident_memory" not in metrics.render("")[0]
