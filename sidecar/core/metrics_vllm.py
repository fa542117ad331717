"""What vLLM's /metrics tell about its process and the requests in flight: a tolerant reading of a few lines."""

from __future__ import annotations

import math
import re
from enum import StrEnum

from sidecar.model import Frozen

LORA_INFO = "vllm:lora_requests_info"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
START_TIME = "process_start_time_seconds"
_WANTED = (LORA_INFO, RUNNING, WAITING, PROMPT_TOKENS, START_TIME)


class Metrics(Frozen, frozen=True):
    """A reading of /metrics.

    `process`: start time of the API server's process as text, None where it isn't exposed (several API servers).
    `requests`: running and waiting requests of all engines together, None if unknown. `engines`: how many report them.
    `busy`: the label values that list adapters with a request running or waiting, as vLLM wrote them (names joined by
    commas), from the newest series; None before the first request. `prompt_tokens`: prefilled since the start.
    `waiting`: requests that don't run yet. `deferred`: those among them that others may overtake, since their adapter
    has no slot; None where vLLM doesn't tell.
    """

    process: str | None = None
    requests: float | None = None
    engines: int = 0
    busy: tuple[str, ...] | None = None
    prompt_tokens: float | None = None
    waiting: float | None = None
    deferred: float | None = None


class Traffic(StrEnum):
    """Whether requests of a name are in flight: for certain none, some, perhaps some, or the metrics don't tell."""

    NONE = "none"
    SOME = "some"
    PERHAPS = "perhaps"
    UNKNOWN = "unknown"


def parse_metrics(text: str) -> Metrics:
    """Read the text format of /metrics. Lines that can't be understood are passed over; never raises."""
    process: str | None = None
    counts: dict[str, dict[str, float]] = {RUNNING: {}, WAITING: {}, PROMPT_TOKENS: {}, WAITING_BY_REASON: {}}
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
        elif name in counts and labels.get("reason", "deferred") == "deferred":
            engine = labels.get("engine", "")
            counts[name][engine] = counts[name].get(engine, 0.0) + value
        elif name == LORA_INFO and value >= newest:
            names = tuple(v for k, v in sorted(labels.items()) if k.endswith("_lora_adapters") and v)
            # Two series of one instant: both may be the present one.
            busy = names if value > newest or busy is None else busy + names
            newest = value
    running, waiting, tokens, deferred = (_total(values) for values in counts.values())
    requests = running + waiting if running is not None and waiting is not None else None
    return Metrics(process, requests, len(counts[RUNNING]), busy, tokens, waiting, deferred)


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


def traffic(metrics: Metrics | None, name: str, overtaken: bool | None) -> Traffic:
    """What `metrics` tell about requests of `name`, to which none is added any more.

    `overtaken`: a request that came after all of them has been answered since. Then only those can still wait that
    vLLM lets others overtake. False: it has not been; None: there is no such request.
    """
    busy = busy_names(metrics, frozenset({name})) if metrics is not None else None
    if metrics is None or busy is None:
        return Traffic.UNKNOWN
    if name in busy:
        return Traffic.SOME
    waiting = metrics.deferred if overtaken and metrics.deferred is not None else metrics.waiting
    return Traffic.PERHAPS if waiting or overtaken is False else Traffic.NONE


def idle_between(before: Metrics | None, after: Metrics | None) -> bool:
    """Whether the engine held no request from one reading to the next."""
    if before is None or after is None or before.prompt_tokens is None:
        return False
    return before.requests == after.requests == 0 and before.prompt_tokens == after.prompt_tokens


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
