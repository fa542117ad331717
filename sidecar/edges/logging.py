"""Logs: one line an event on stderr, as JSON or for people, without secrets.

Libraries that log by the standard library (aiohttp, asyncio, botocore) end in the same lines, from WARNING on.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

# The last word of the key decides: `token` and `api_key` hide their value, `token_file` and `secret_name` don't.
_SECRET_KEY = re.compile(
    r"(^|[_\-.])(token|secret|passw(or)?d|authorization|cookie|signature|credentials?|(api|access|private|gossip)[_-]?key)$",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(?<=://)[^/@\s]+@")

Event = MutableMapping[str, Any]


def hide_secrets(_logger: object, _method: str, event: Event) -> Event:
    """Replace the values of keys that name secrets, nested mappings included, and the user part of URLs."""
    for key, value in event.items():
        event[key] = _hidden(key, value)
    return event


def _hidden(key: str, value: Any) -> Any:
    if value and _SECRET_KEY.search(key):
        return "***"
    if isinstance(value, str):
        return _URL_USER.sub("***@", value) if "@" in value else value
    if isinstance(value, dict):
        return {inner: _hidden(str(inner), part) for inner, part in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden("", part) for part in value]
    return value


def one_line(_logger: object, _method: str, event: Event) -> Event:
    """Keep any text, an exception's traceback too, in the line of its event."""
    if "exception" in event:
        # Under its own name the renderer would print it below the line.
        event["traceback"] = event.pop("exception")
    for key, value in event.items():
        if isinstance(value, str) and ("\n" in value or "\r" in value):
            event[key] = " | ".join(line.strip() for line in value.splitlines() if line.strip())
    return event


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that a second `configure` replaces it and nothing else."""


def configure(log_format: Literal["json", "console"], level: str, stream: TextIO | None = None) -> None:
    """Set up logging for the whole process; may be called again. `level`: debug, info, warning or error."""
    target = stream or sys.stderr
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
        hide_secrets,
    ]
    last = _renderers(log_format)
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        # Loggers are made at import, before this: a cached one would keep what was in force at its first line.
        cache_logger_on_first_use=False,
    )
    handler = _Handler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [*(other for other in root.handlers if not isinstance(other, _Handler)), handler]
    root.setLevel(max(threshold, logging.WARNING))


def _renderers(log_format: Literal["json", "console"]) -> list[structlog.typing.Processor]:
    if log_format == "json":
        return [structlog.processors.JSONRenderer(default=str)]
    return [one_line, structlog.dev.ConsoleRenderer(colors=False, sort_keys=False, timestamp_key="time")]
