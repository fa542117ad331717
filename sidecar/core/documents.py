"""Manifest text -> decoded documents, by YAML as Kubernetes reads it, or JSON.

Built straight from the parser's events: without recursion, and with bounds on depth and on the number of values after
aliases are expanded, so that no text (a "billion laughs", a thousand brackets) costs more than its own size suggests.
Repeated keys are refused: the parser would silently drop one of the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from sidecar.core.fields import show
from sidecar.model import Frozen

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 100_000
SUFFIXES = (".yaml", ".yml", ".json")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
# Kubernetes reads YAML 1.1's booleans and 1.2's numbers; times and base 60 stay text.
_BOOLEANS = {text: text in ("yes", "true", "on") for text in ("yes", "no", "true", "false", "on", "off")}
_NULLS = ("", "~", "null", "Null", "NULL")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)", re.ASCII)
_BASED = re.compile(r"0x[0-9a-fA-F]+|0o?[0-7]+|0b[01]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.?[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}


class Unreadable(ValueError):
    """The text is no YAML or JSON, or out of bounds. The text says where, what, and the limit."""


class Document(Frozen, frozen=True, kw_only=True):
    """One document of a file, counted from 1. `item` counts from 1 in a `List`, and is 0 elsewhere."""

    number: int
    item: int = 0
    value: Any

    @property
    def where(self) -> str:
        return f"document {self.number}" + (f", item {self.item}" if self.item else "")


def decode(data: bytes, *, is_json: bool = False) -> tuple[Document, ...]:
    """The documents of one file, without empty ones; the items of a Kubernetes `List` stand for themselves.

    Raises Unreadable.
    """
    if len(data) > MAX_BYTES:
        raise Unreadable(f"{len(data)} bytes or more; at most {MAX_BYTES} are read, so split it into several files")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start} is not UTF-8; save it as UTF-8") from None
    values = _json(text) if is_json else _yaml(text)
    return tuple(
        found for number, value in enumerate(values, 1) if value is not None for found in _unlisted(number, value)
    )


def _unlisted(number: int, value: object) -> Iterator[Document]:
    if isinstance(value, dict) and str(value.get("kind")).endswith("List") and isinstance(value.get("items"), list):
        for item, inner in enumerate(value["items"], 1):
            yield Document(number=number, item=item, value=inner)
    else:
        yield Document(number=number, value=value)


def _json(text: str) -> Iterator[object]:
    if not text.strip():
        return
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise Unreadable(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise Unreadable("nested too deeply to be a manifest") from None
    except Unreadable:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise Unreadable(str(error)) from None
    yield value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Unreadable(f"the key {show(twice)} stands twice in one mapping; take one out")
    return made


def _yaml(text: str) -> Iterator[object]:
    """One value a document. Raises Unreadable at the first fault, also after good documents."""
    loader = None
    try:
        loader = _Loader(text)
        builder = _Builder()
        while loader.check_event():
            event = loader.get_event()
            if builder.feed(event):
                yield builder.root
                builder = _Builder()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise Unreadable(f"{place}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise Unreadable(" ".join(str(error).split())) from None
    finally:
        if loader is not None:
            loader.dispose()


class _Node:
    """An open mapping or list: its value, how many values it holds in all, and what it waits for."""

    def __init__(self, value: dict[str, Any] | list[Any], anchor: str | None) -> None:
        self.value = value
        self.anchor = anchor
        self.size = 1
        self.key: str | None = None
        self.is_merge = False
        self.merged: list[dict[str, Any]] = []


class _Builder:
    """Builds one document's value from its events."""

    def __init__(self) -> None:
        self.root: object = None
        self._open: list[_Node] = []
        self._anchors: dict[str, tuple[object, int]] = {}
        self._values = 0

    def feed(self, event: Any) -> bool:
        """Take the next event; True at the document's end."""
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.MappingStartEvent):
            self._start(_Node({}, event.anchor), event)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._start(_Node([], event.anchor), event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._end(event)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        return isinstance(event, yaml.DocumentEndEvent)

    def _scalar(self, event: Any) -> None:
        plain = event.implicit[0] and event.tag is None
        node = self._open[-1] if self._open else None
        if node is not None and isinstance(node.value, dict) and node.key is None:
            if plain and event.value == "<<":
                node.key, node.is_merge = "<<", True
                return
            if event.value in node.value:
                raise _at(event, f"the key {show(event.value)} stands twice in one mapping; take one out")
            node.key, node.is_merge = event.value, False
            # Reserved at once, so that a key stands twice even where its first value is still open.
            node.value[event.value] = None
            return
        self._put(_resolve(event, plain), 1, event.anchor, event)

    def _start(self, node: _Node, event: Any) -> None:
        kind = "map" if isinstance(node.value, dict) else "seq"
        if event.tag not in (None, "!", _TAG + kind):
            raise _at(event, f"the tag {show(event.tag)} is not known; leave it out")
        if len(self._open) >= MAX_DEPTH:
            raise _at(event, f"nested deeper than {MAX_DEPTH} levels")
        self._key_is_plain(event)
        self._open.append(node)

    def _end(self, event: Any) -> None:
        node = self._open.pop()
        if isinstance(node.value, dict):
            for merged in node.merged:
                for key, value in merged.items():
                    node.value.setdefault(key, value)
        self._put(node.value, node.size, node.anchor, event)

    def _alias(self, event: Any) -> None:
        self._key_is_plain(event)
        if event.anchor not in self._anchors:
            raise _at(event, f"the alias *{event.anchor} has no complete anchor before it")
        value, size = self._anchors[event.anchor]
        self._put(value, size, None, event)

    def _key_is_plain(self, event: Any) -> None:
        node = self._open[-1] if self._open else None
        if node is not None and isinstance(node.value, dict) and node.key is None:
            raise _at(event, "a key must be plain text")

    def _put(self, value: object, size: int, anchor: str | None, event: Any) -> None:
        if anchor is not None:
            self._anchors[anchor] = (value, size)
        self._values += 1
        if max(size, self._values) > MAX_VALUES:
            raise _at(event, f"more than {MAX_VALUES} values (aliases count in full); split it into several files")
        if not self._open:
            self.root = value
            return
        node = self._open[-1]
        node.size += size
        if node.size > MAX_VALUES:
            raise _at(event, f"more than {MAX_VALUES} values (aliases count in full); split it into several files")
        if isinstance(node.value, list):
            node.value.append(value)
        elif node.is_merge:
            node.merged += _mappings(value, event)
            node.key = None
        elif node.key is not None:
            node.value[node.key] = value
            node.key = None


def _mappings(value: object, event: Any) -> list[dict[str, Any]]:
    found = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            raise _at(event, "'<<' merges mappings only; quote it if it is a key")
        found.append(item)
    return found


def _resolve(event: Any, plain: bool) -> object:
    text = event.value
    tag = (event.tag or "").removeprefix(_TAG)
    if tag not in ("", "!", "str", "int", "float", "bool", "null"):
        raise _at(event, f"the tag {show(event.tag)} is not known; leave it out")
    if tag in ("!", "str") or not (plain or tag):
        return text
    return plain_scalar(text)


def plain_scalar(text: str) -> object:
    """What an unquoted scalar means."""
    if text in _NULLS:
        return None
    if text in (lower := text.lower(), text.upper(), text.capitalize()) and lower in _BOOLEANS:
        return _BOOLEANS[lower]
    if _INTEGER.fullmatch(text):
        # Python refuses thousands of digits, and no field wants a tenth of that: it is out of bounds either way.
        return int(text) if len(text) < 4000 else float(text[:300])
    if _BASED.fullmatch(text):
        return int(text, 0) if text[1] in "xob" else int(text, 8)
    if _FLOAT.fullmatch(text):
        return float(text)
    special = _SPECIAL.get(text.lower())
    return text if special is None else float(special)


def _at(event: Any, message: str) -> Unreadable:
    mark = event.start_mark
    return Unreadable(f"line {mark.line + 1}, column {mark.column + 1}: {message}")
