"""What vLLM's /metrics tell about its process and the requests in flight: a tolerant reading of a few lines."""

from __future__ import annotations

import math
import re

from sidecar.model import Frozen

LORA_INFO = "vllm:lora_requests_info"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
START_TIME = "process_start_time_seconds"
_WANTED = (LORA_INFO, RUNNING, WAITING, PROMPT_TOKENS, START_TIME)


class Metrics(Frozen, frozen=True):
    """A reading of /metrics.

    `process`: start time of the API server's process as text, None where it isn't exposed (several API servers).
    `requests`: running and waiting requests of all engines together, None if unknown. `engines`: how many report them.
    `busy`: the label values that list adapters with a request running or waiting, as vLLM wrote them (names joined by
    commas), from the newest series; None before the first request. `prompt_tokens`: prefilled since the start.
    """

    process: str | None = None
    requests: float | None = None
    engines: int = 0
    busy: tuple[str, ...] | None = None
    prompt_tokens: float | None = None


def parse_metrics(text: str) -> Metrics:
    """Read the text format of /metrics. Lines that can't be understood are passed over; never raises."""
    process: str | None = None
    counts: dict[str, dict[str, float]] = {RUNNING: {}, WAITING: {}, PROMPT_TOKENS: {}}
    newest = -math.inf
    busy: tuple[str, ...] | None = None
    for line in text.splitlines():
        if not line.startswith(_WANTED):
            continue
        sample = _sample(line)
        if sample is None:
            continue
        name, labels, value = sample
        if name == START_TIME and process is None and value > 0:
            process = repr(value)
        elif name in counts:
            engine = labels.get("engine", "")
            counts[name][engine] = counts[name].get(engine, 0.0) + value
        elif name == LORA_INFO and value >= newest:
            names = tuple(v for k, v in sorted(labels.items()) if k.endswith("_lora_adapters") and v)
            # Two series of one instant: both may be the present one.
            busy = names if value > newest or busy is None else busy + names
            newest = value
    running, waiting, tokens = (_total(counts[key]) for key in (RUNNING, WAITING, PROMPT_TOKENS))
    requests = running + waiting if running is not None and waiting is not None else None
    return Metrics(process, requests, len(counts[RUNNING]), busy, tokens)


def _total(values: dict[str, float]) -> float | None:
    return sum(values.values()) if values else None


def busy_names(metrics: Metrics, served: frozenset[str]) -> frozenset[str] | None:
    """Names with a request running or waiting, as far as `metrics` tell; None when they don't.

    vLLM writes one series per combination of adapters ever seen, stamped with the time of its last use, and updates it
    at engine steps: with several engines behind one server the newest is that of only one of them. A name that holds a
    comma can't be told from two, so each such name among `served` counts as busy where its text occurs.
    """
    if metrics.requests is None:
        return None
    if metrics.requests <= 0:
        return frozenset()
    if metrics.busy is None or metrics.engines > 1:
        return None
    names = {part for value in metrics.busy for part in value.split(",") if part}
    names |= {name for name in served if "," in name and any(name in value for value in metrics.busy)}
    return frozenset(names)


_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*", re.ASCII
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"', re.ASCII)
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def _sample(line: str) -> tuple[str, dict[str, str], float] | None:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    labels = {key: _unescape(raw) for key, raw in _LABEL.findall(match["labels"] or "")}
    return match["name"], labels, value


def _unescape(raw: str) -> str:
    return re.sub(r"\\[\\n\"]", lambda m: _ESCAPES[m[0]], raw)
