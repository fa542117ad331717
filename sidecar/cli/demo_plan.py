"""What the demo is asked to do: its options, and the adapters that it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from sidecar.core.manifest import API_VERSION, KIND, InvalidManifest, parse_adapter
from sidecar.edges.sample_adapter import write_adapter
from sidecar.model import Adapter

# The signs of a URI that must not be taken for a path.
_URI = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_UNFIT = re.compile(r"[^a-z0-9]+")

BASE = "demo-base-model"
DRAIN_SECONDS = 1
MAX_WORKERS = 16


class Unusable(Exception):
    """The demo can't begin with what it was given; the text names the flag and the way out."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. `capacity` 0 leaves room for everything; `patience` is for each step, in seconds."""

    workers: int = 3
    capacity: int = 0
    keep: bool = False
    plain: bool = False
    engine_urls: tuple[str, ...] = ()
    engine_api_key_file: str = ""
    adapters: tuple[str, ...] = ()
    work_dir: str = ""
    patience: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Item:
    """One adapter of the demo. `distribution` is that of its manifest."""

    name: str
    served_name: str
    uri: str
    distribution: dict[str, Any]
    priority: int = 0

    @property
    def key(self) -> str:
        """namespace/name, as agents call it."""
        return f"default/{self.name}"

    @property
    def wish(self) -> str:
        """On how many workers, in a word."""
        strategy = str(self.distribution["strategy"])
        return {"fixed": str(self.distribution.get("replicas")), "percentage": "34 %"}.get(strategy, "all")

    def number(self, workers: int) -> int:
        """On how many of `workers` it belongs, counted here from the rule and not by the agents' own code."""
        strategy = self.distribution["strategy"]
        if strategy == "fixed":
            return min(int(self.distribution["replicas"]), workers)
        if strategy == "percentage":
            return max(1, workers * int(self.distribution["percentage"]) // 100)
        return workers


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Every adapter in the order of the table, and the new content that one of them gets: `new_uri` for `updated`."""

    items: tuple[Item, ...]
    updated: Item
    new_uri: str


# Where room is scarce, the two that the story is about get it.
_PRIORITIES = {0: 10, 1: 20}
_ALL: dict[str, Any] = {"strategy": "all"}
_TWO: dict[str, Any] = {"strategy": "fixed", "replicas": 2}
_THIRD: dict[str, Any] = {"strategy": "percentage", "percentage": 34}
# Names under which, with three workers, the fourth has something to take over and the second something to lose.
_GENERATED = (
    ("house-style", "house-style", _ALL),
    ("sql-writer", "acme/SQL-writer", _TWO),
    ("json-output", "json-output", _TWO),
    ("email-reply", "email-reply", _TWO),
    ("math-tutor", "math-tutor", _THIRD),
    ("translate-fr", "translate-fr", _THIRD),
)


def generated(origin: Path) -> Cast:
    """Six small adapters and a second version of one, written under `origin`: for the stub engines."""
    items = []
    for number, (name, served, distribution) in enumerate(_GENERATED):
        uri = write_adapter(origin / name / "v1", name, base=BASE).as_uri()
        priority = _PRIORITIES.get(number, 0)
        items.append(Item(name=name, served_name=served, uri=uri, distribution=distribution, priority=priority))
    new = write_adapter(origin / "sql-writer" / "v2", "sql-writer, improved", base=BASE)
    return Cast(items=tuple(items), updated=items[1], new_uri=new.as_uri())


def given(places: Sequence[str]) -> Cast:
    """The user's own adapters: with four or more the last one is the new content of the second.

    Raises Unusable for fewer than three, and for a path that is no directory.
    """
    uris = [_uri(place) for place in places]
    if len(set(uris)) < 3:
        raise Unusable(
            f"--adapters: {len(set(uris))} different adapters are given; the story needs at least 3 for the engines'"
            " base model, as directories or URIs: --adapters /data/a,/data/b,s3://bucket/c"
        )
    shown = uris[:-1] if len(uris) > 3 else uris
    wishes = (_ALL, _TWO, _THIRD)
    items = []
    for number, uri in enumerate(shown):
        slug = _UNFIT.sub("-", uri.rstrip("/").rpartition("/")[2].lower()).strip("-")
        name = f"demo-{number + 1}-{slug}"[:63].rstrip("-")
        wish, priority = wishes[number % 3], _PRIORITIES.get(number, 0)
        items.append(Item(name=name, served_name=name, uri=uri, distribution=wish, priority=priority))
    return Cast(items=tuple(items), updated=items[1], new_uri=uris[-1])


def _uri(place: str) -> str:
    if _URI.match(place):
        return place
    path = Path(place).expanduser().resolve()
    if not path.exists():
        raise Unusable(f"--adapters: {place} does not exist; name directories or archives, or URIs")
    return path.as_uri()


def with_uri(item: Item, uri: str) -> Item:
    """The same adapter from another place."""
    return replace(item, uri=uri)


def manifest(item: Item, base_model: str) -> dict[str, Any]:
    """The document that a user would write."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": item.name},
        "spec": {
            "baseModel": base_model,
            "servedName": item.served_name,
            "source": {"uri": item.uri},
            "distribution": item.distribution,
            "priority": item.priority,
            # Short, so that the demo is; with clients that stream long answers it should outlast those.
            "drainSeconds": DRAIN_SECONDS,
            # On a vLLM that would keep cached prefixes of the old weights the update would else be held back.
            "onStalePrefixCache": "Replace",
        },
    }


def write_manifest(directory: Path, item: Item, base_model: str) -> None:
    """Write or replace the item's manifest at once, as an editor does."""
    path = directory / f"{item.name}.yaml"
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(yaml.safe_dump(manifest(item, base_model), sort_keys=False))
    fresh.rename(path)


def as_adapter(item: Item, base_model: str) -> Adapter:
    """The item as agents read it. Raises Unusable with what is wrong (a scheme that isn't known, for example)."""
    try:
        return parse_adapter(json.loads(json.dumps(manifest(item, base_model))), allow_http=False)
    except InvalidManifest as error:
        raise Unusable(f"--adapters: {item.uri}: {error}") from error
