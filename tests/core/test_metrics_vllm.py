"""The few lines of vLLM's /metrics that the agent reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.metrics_vllm import Metrics, Traffic, busy_names, parse_metrics, traffic

BEFORE_ANY_REQUEST = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79612867882e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 7.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 0.0
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
"""


def under_load(*series: tuple[str, str, float], running: float = 1, waiting: float = 1, engines: int = 1) -> str:
    lines = ["process_start_time_seconds 1.7e+09"]
    for engine in range(engines):
        lines.append(f'vllm:num_requests_running{{engine="{engine}",model_name="tiny"}} {running}')
        lines.append(f'vllm:num_requests_waiting{{engine="{engine}",model_name="tiny"}} {waiting}')
    for run, wait, at in series:
        labels = f'max_lora="2",running_lora_adapters="{run}",waiting_lora_adapters="{wait}"'
        lines.append(f"vllm:lora_requests_info{{{labels}}} {at!r}")
    return "\n".join(lines)


def test_an_idle_engine() -> None:
    metrics = parse_metrics(BEFORE_ANY_REQUEST)
    assert metrics == Metrics("1796128678.82", 0.0, 1, None, 0.0, 0.0)
    assert busy_names(metrics, frozenset({"a"})) == frozenset()


def test_the_newest_series_is_the_present_one() -> None:
    metrics = parse_metrics(under_load(("a,b", "a,b", 3.0), ("c", "d", 5.5), ("", "", 4.0)))
    assert busy_names(metrics, frozenset()) == {"c", "d"}


def test_two_series_of_one_instant_both_count() -> None:
    assert busy_names(parse_metrics(under_load(("a", "a", 3.0), ("b", "b", 3.0))), frozenset()) == {"a", "b"}


def test_no_request_at_all_outweighs_a_series_that_lags_behind() -> None:
    metrics = parse_metrics(under_load(("a", "a", 3.0), running=0, waiting=0))
    assert busy_names(metrics, frozenset()) == frozenset()


def test_names_with_commas_quotes_and_backslashes() -> None:
    metrics = parse_metrics(under_load(('x,y,q\\"\\\\\\n', "", 3.0)))
    assert busy_names(metrics, frozenset({"x,y", "z,w"})) == {"x", "y", "x,y", 'q"\\\n'}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html></html>",
        "process_start_time_seconds 1.7e9",
        under_load(),  # requests, but nothing about adapters
        under_load(("a", "a", 3.0), engines=2),  # the newest series is that of one engine only
        'vllm:lora_requests_info{running_lora_adapters="a"} 3.0',
        'vllm:num_requests_running{engine="0"} 1.0\nvllm:lora_requests_info{running_lora_adapters="a"} 3.0',
    ],
)
def test_what_the_metrics_do_not_tell_is_unknown(text: str) -> None:
    assert busy_names(parse_metrics(text), frozenset({"a"})) is None


def test_several_idle_engines_are_idle() -> None:
    metrics = parse_metrics(under_load(("a", "a", 3.0), running=0, waiting=0, engines=4))
    assert busy_names(metrics, frozenset({"a"})) == frozenset()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "0", "later", ""])
def test_an_odd_start_time_names_no_process(value: str) -> None:
    assert parse_metrics(f"process_start_time_seconds {value}").process is None


LINES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["process_start_time_seconds", "vllm:lora_requests_info", "vllm:num_requests_running", "vllm:"]),
    st.sampled_from(["", " ", "{", '{a="', '{running_lora_adapters="x', '"} 1', "} 2.5"]) | st.text(max_size=10),
    st.text(max_size=20),
)


@given(st.text(max_size=300) | st.lists(LINES, max_size=8).map("\n".join))
def test_no_text_raises(text: str) -> None:
    busy_names(parse_metrics(text), frozenset({"a,b"}))


@pytest.mark.parametrize(
    ("overtaken", "waiting", "deferred", "expected"),
    [
        # Until a request that came later has been answered, whatever waits may be one of the name's.
        (None, 0, 0, Traffic.NONE),
        (None, 1, 0, Traffic.PERHAPS),
        (False, 0, 0, Traffic.PERHAPS),
        # Then only what waits for a slot of adapters, as far as vLLM counts that.
        (True, 1, 0, Traffic.NONE),
        (True, 1, 1, Traffic.PERHAPS),
        (True, 1, None, Traffic.PERHAPS),
        (True, 0, None, Traffic.NONE),
    ],
)
def test_requests_that_no_label_names(
    overtaken: bool | None, waiting: int, deferred: int | None, expected: Traffic
) -> None:
    text = under_load(("b", "b", 3.0), waiting=waiting)
    if deferred is not None:
        for reason, count in (("capacity", 5), ("deferred", deferred)):
            text += f'\nvllm:num_requests_waiting_by_reason{{engine="0",model_name="tiny",reason="{reason}"}} {count}'
    metrics = parse_metrics(text)
    assert traffic(metrics, "a", overtaken) is expected
    assert traffic(metrics, "b", overtaken) is Traffic.SOME


def test_where_the_metrics_tell_nothing() -> None:
    assert traffic(None, "a", True) is Traffic.UNKNOWN
    assert traffic(parse_metrics(under_load(("a", "a", 3.0), engines=2)), "b", True) is Traffic.UNKNOWN
