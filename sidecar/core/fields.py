"""Typed reading of one decoded document: every fault is noted with its field path, and reading goes on.

A `Fields` is one mapping of the document. Each getter returns the value or, after noting a fault, the default, so one
pass finds everything that is wrong. Null counts as absent, as the Kubernetes API prunes it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

T = TypeVar("T", bound=str)

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_DURATION_PART = re.compile(r"(\d+\.?\d*|\.\d+)(h|ms|m|s|us|µs|μs|ns)", re.ASCII)
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN = 80


def show(value: object) -> str:
    """A value of a document as a person wrote it, cut to a bounded length; containers only by their kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "…")
    if isinstance(value, int | float):
        text = str(value) if not isinstance(value, int) or value.bit_length() < 512 else "a huge number"
        return text[:_SHOWN]
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)}"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"


def kind_of(value: object) -> str:
    """What a value is, in the words of YAML."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a mapping" if isinstance(value, Mapping) else "a list" if isinstance(value, Sequence) else "null"


def join(path: str, key: str) -> str:
    """`path.key`; a key that isn't plain stands in brackets: `matchLabels["a.b/c"]`."""
    part = key if _PLAIN_KEY.fullmatch(key) else f"[{show(key)}]"
    return f"{path}.{part}".replace(".[", "[") if path else part


def seconds_of(text: str) -> float | None:
    """Seconds of a Go-style duration (`90s`, `10m`, `1h30m`, `1.5h`), None if it is none."""
    matches = list(_DURATION_PART.finditer(text))
    if not matches or "".join(m[0] for m in matches) != text:
        return None
    return sum(float(m[1]) * _UNITS[m[2]] for m in matches)


def epoch_of(text: str) -> int | None:
    """Whole seconds since the epoch of an RFC 3339 time with its zone, None if it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if "T" not in text.upper() or moment.tzinfo is None:
        return None
    return int(moment.timestamp())


class Fields:
    """One mapping at `path` of a document. With `strict` unknown keys are faults; faults go to the shared list."""

    def __init__(self, value: Mapping[object, object], path: str, faults: list[str], strict: bool) -> None:
        self._value = value
        self._path = path
        self._faults = faults
        self._strict = strict

    def path(self, key: str) -> str:
        return join(self._path, key)

    def fault(self, key: str, message: str) -> None:
        """Note what is wrong with the field `key`."""
        self._faults.append(f"{self.path(key)}: {message}")

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def raw(self, key: str) -> object:
        return self._value.get(key)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all fields that are there."""
        return tuple(str(key) for key in self._value)

    def empty(self, key: str) -> Fields:
        """What stands in for a mapping under `key` that isn't there."""
        return Fields({}, self.path(key), self._faults, self._strict)

    def only(self, known: Sequence[str], elsewhere: Mapping[str, str] | None = None) -> None:
        """Note every key outside `known`. `elsewhere` maps a field's name to the path where it belongs."""
        if not self._strict:
            return
        for key in self._value:
            if key in known:
                continue
            self.fault(str(key), f"unknown field{_suggestion(str(key), known, elsewhere or {}, self.path)}")

    def mapping(self, key: str) -> Fields | None:
        """The mapping under `key`; None if it is absent or, after noting the fault, if it is something else."""
        value = self._value.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fault(key, f"{show(value)} is {kind_of(value)}; a mapping of fields is needed")
            return None
        return Fields(value, self.path(key), self._faults, self._strict)

    def items(self, key: str) -> list[Fields]:
        """The mappings in the list under `key`, empty if it is absent."""
        value = self._value.get(key)
        if value is None:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str):
            self.fault(key, f"{show(value)} is {kind_of(value)}; a list is needed")
            return []
        found = []
        for index, item in enumerate(value):
            place = f"{self.path(key)}[{index}]"
            if isinstance(item, Mapping):
                found.append(Fields(item, place, self._faults, self._strict))
            else:
                self._faults.append(f"{place}: {show(item)} is {kind_of(item)}; a mapping of fields is needed")
        return found

    def text(
        self, key: str, default: str = "", *, required: str = "", check: Callable[[str], str] | None = None
    ) -> str:
        """Text under `key`. `required` is the way out, named when it is missing; `check` returns a fault or ""."""
        value = self._value.get(key)
        if value is None:
            if required:
                self.fault(key, f"is required; {required}")
            return default
        if not isinstance(value, str):
            self.fault(key, f"{show(value)} is {kind_of(value)}; text is needed{_quote_hint(value)}")
            return default
        wrong = check(value) if check else ""
        if wrong:
            self.fault(key, wrong)
            return default
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of texts under `key`, empty if it is absent."""
        value = self._value.get(key)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str):
            self.fault(key, f"{show(value)} is {kind_of(value)}; a list of texts is needed")
            return ()
        for index, item in enumerate(value):
            if not isinstance(item, str):
                self._faults.append(
                    f"{self.path(key)}[{index}]: {show(item)} is {kind_of(item)}; text is needed{_quote_hint(item)}"
                )
        return tuple(item for item in value if isinstance(item, str))

    def pairs(self, key: str) -> dict[str, str]:
        """The mapping of text to text under `key`, empty if it is absent."""
        inner = self.mapping(key)
        if inner is None:
            return {}
        for name, value in inner._value.items():
            if not isinstance(value, str):
                inner.fault(str(name), f"{show(value)} is {kind_of(value)}; text is needed{_quote_hint(value)}")
        return {str(k): v for k, v in inner._value.items() if isinstance(v, str)}

    def whole(self, key: str, default: int, low: int, high: int) -> int:
        """A whole number from `low` to `high` under `key`."""
        value = self._value.get(key)
        if value is None:
            return default
        limits = f"a whole number from {low} to {high} is needed"
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fault(key, f"{show(value)} is {kind_of(value)}; {limits}")
        elif isinstance(value, float) or not low <= value <= high:
            self.fault(key, f"{show(value)} is not allowed; {limits}")
        else:
            return value
        return default

    def choice(self, key: str, options: tuple[T, ...], default: T) -> T:
        """One of `options` under `key`."""
        value = self._value.get(key)
        if value is None:
            return default
        for option in options:
            if value == option:
                return option
        near = difflib.get_close_matches(str(value).lower(), [o.lower() for o in options], 1) if options else []
        meant = next((f"; did you mean {o}?" for o in options if near and o.lower() == near[0]), "")
        self.fault(key, f"{show(value)} is not one of {', '.join(options)}{meant}")
        return default

    def seconds(self, key: str, low: float, high: float) -> float:
        """A Go-style duration in seconds under `key`; 0.0 if it is absent."""
        value = self._value.get(key)
        if value is None:
            return 0.0
        if not isinstance(value, str):
            self.fault(key, f"{show(value)} is {kind_of(value)}; write a duration with its unit, like 30s or 1h30m")
            return 0.0
        seconds = seconds_of(value)
        if seconds is None:
            self.fault(key, f"{show(value)} is no duration; write it like 30s, 10m, 1h30m or 24h")
            return 0.0
        if not low <= seconds <= high:
            self.fault(key, f"{show(value)} is out of bounds; {low:g}s to {high / 3600:g}h are allowed")
            return 0.0
        return seconds

    def moment(self, key: str) -> int:
        """Whole seconds since the epoch of the RFC 3339 time under `key`; 0 if it is absent."""
        text = self.text(key)
        if not text:
            return 0
        moment = epoch_of(text)
        if moment is None:
            self.fault(key, f"{show(text)} is no time; write it like 2026-01-31T12:00:00Z")
        return moment or 0


def _quote_hint(value: object) -> str:
    return f' (put it in quotes: "{show(value)}")' if isinstance(value, bool | int | float) else ""


def _suggestion(key: str, known: Sequence[str], elsewhere: Mapping[str, str], path: Callable[[str], str]) -> str:
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower().replace("_", ""), folded, 1, 0.65)
    if near:
        return f"; did you mean {path(folded[near[0]])}?"
    if key in elsewhere:
        return f"; did you mean {elsewhere[key]}?"
    return f"; known here are {', '.join(known)}" if known else ""
