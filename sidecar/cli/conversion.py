"""`lora-sidecar check --convert`: other systems' resources as Adapter manifests, for review and `kubectl apply`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import yaml

from sidecar.core.documents import Document, Unreadable, decode, plain_scalar
from sidecar.core.manifest import API_VERSION
from sidecar.dialects import convert
from sidecar.edges.manifests import looks_like_json

_LINE_BREAKS = re.compile(r"\s+")


def convert_all(inputs: Iterable[tuple[str, bytes]]) -> tuple[str, bool]:
    """One YAML stream for all inputs (name, content), and whether something in it has to be repaired by hand."""
    parts: list[str] = []
    faulty = False
    for name, data in inputs:
        try:
            documents = decode(data, is_json=looks_like_json(name, data))
        except Unreadable as error:
            parts.append(_comment(f"{name}: {error}"))
            faulty = True
            continue
        for document in documents:
            text, is_faulty = _convert_one(name, document)
            parts.append(text)
            faulty = faulty or is_faulty
    return "---\n".join(parts), faulty


def _convert_one(name: str, document: Document) -> tuple[str, bool]:
    value = document.value
    place = f"{name}, {document.where}"
    if isinstance(value, Mapping) and value.get("apiVersion") == API_VERSION:
        return _dump(value), False
    made = convert(value)
    if made is None:
        kind = value.get("kind") if isinstance(value, Mapping) else None
        return _comment(f"{place}: a {kind or 'document without a kind'} is no adapter; left out"), False
    lines = [f"from {place}: {value['kind']}"]
    lines += (f"note: {note}" for note in made.notes)
    lines += (f"repair: {fault}" for fault in made.faults)
    text = "".join(map(_comment, lines))
    return text + (_dump(made.document) if made.document is not None else ""), bool(made.faults)


def _comment(text: str) -> str:
    return f"# {_LINE_BREAKS.sub(' ', text)}\n"


def _dump(document: object) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Dumper(yaml.SafeDumper):
    """Quotes what Kubernetes would take for a number, and PyYAML for text (`1e3`, `08`)."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if plain_scalar(text) == text else "'")


_Dumper.add_representer(str, _text)
