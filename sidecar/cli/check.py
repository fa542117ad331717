"""`lora-sidecar check`: validate manifests and, with --fetch, the adapters behind them, before a pool does."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.core.catalog import base_model_conflict, name_conflict, select
from sidecar.core.documents import MAX_BYTES, Document, Unreadable, decode
from sidecar.core.manifest import InvalidManifest, key_of, parse_adapter
from sidecar.dialects import is_foreign
from sidecar.edges.manifests import list_manifests, looks_like_json, read_manifest, reason
from sidecar.model import Adapter, Source
from sidecar.settings import Settings

OK, FAULTS, UNUSABLE = 0, 1, 2
OWN_CREDENTIALS = "read with this machine's credentials, not with those of spec.source.secretRef"


@dataclass
class Finding:
    """One document, or one file that holds none: where it stands, and what is to be said about it."""

    where: str
    key: str = ""
    adapter: Adapter | None = None
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fetched: str = ""

    def lines(self) -> list[str]:
        """What is printed: one line a fault or warning, or one that says ok."""
        name = f"{self.where} {self.key}".rstrip()
        said = [f"{name}: {fault}" for fault in self.faults] or [f"{name}: ok{self.fetched}"]
        return said + [f"{name}: warning: {warning}" for warning in self.warnings]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's parser."""
    parser = subparsers.add_parser(
        "check",
        help="validate manifests and, with --fetch, the adapters behind them",
        description="Checks Adapter manifests: every field, names that two of them want, duplicates. Says for each"
        " document `FILE:DOCUMENT NAME: ok`, or a line for every fault. Exit status 0 if all is well, 1 if there are"
        " faults, 2 if something can't be read.",
    )
    parser.add_argument("manifests", nargs="+", metavar="MANIFEST", help="files, directories, or - for stdin")
    parser.add_argument(
        "--fetch",
        action="store_true",
        help="download each adapter into a temporary directory (TMPDIR) and check its files as an agent would, with"
        " this machine's credentials",
    )
    parser.add_argument(
        "--max-lora-rank", type=int, default=0, metavar="N", help="the engines' --max-lora-rank; 0 checks none"
    )
    parser.add_argument(
        "--convert",
        action="store_true",
        help="print Adapter manifests made of other systems' resources (Dynamo's DynamoModel, AIBrix's ModelAdapter,"
        " the production stack's LoraAdapter), with comments on what is different",
    )
    parser.add_argument("--allow-pickle", action="store_true", help="accept .bin and .pt weights, as agents may")
    parser.add_argument("--allow-http", action="store_true", help="accept http:// sources, as agents may")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: all is well. 1: faults. 2: something can't be read."""
    inputs, unusable = _read(args.manifests)
    if args.convert:
        return _convert(inputs, unusable)
    findings = [found for name, data in inputs for found in _examine(name, data, allow_http=args.allow_http)]
    compare(findings)
    if args.fetch:
        asyncio.run(_fetch_all(findings, args))
    for line in (line for finding in findings for line in finding.lines()):
        print(line)
    return _status(unusable, faults=any(finding.faults for finding in findings))


def _convert(inputs: list[tuple[str, bytes]], unusable: list[str]) -> int:
    from sidecar.cli.conversion import convert_all

    text, faults = convert_all(inputs)
    print(text, end="")
    return _status(unusable, faults=faults)


def _status(unusable: list[str], *, faults: bool) -> int:
    for text in unusable:
        print(f"lora-sidecar check: {text}", file=sys.stderr)
    return UNUSABLE if unusable else FAULTS if faults else OK


def _read(paths: Iterable[str]) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Name and content of every manifest, and what can't be read."""
    inputs: list[tuple[str, bytes]] = []
    unusable: list[str] = []
    for path in paths:
        try:
            if os.path.isdir(path):
                _read_directory(path, inputs, unusable)
            else:
                inputs.append((path, _read_file(path)))
        except OSError as error:
            unusable.append(f"{path}: {reason(error)}")
    if not inputs and not unusable:
        unusable.append("no manifests found; they end in .yaml, .yml or .json")
    return inputs, unusable


def _read_directory(path: str, inputs: list[tuple[str, bytes]], unusable: list[str]) -> None:
    """As an agent reads it: what is no file (a named pipe, a loop of links) is named, and costs none of the others.

    Raises OSError if the directory can't be listed.
    """
    for name in sorted(list_manifests(path)):
        manifest = os.path.join(path, name)
        stamp, data = read_manifest(manifest)
        if stamp.error:
            unusable.append(f"{manifest}: {stamp.error}")
        else:
            inputs.append((manifest, data))


def _read_file(path: str) -> bytes:
    """What an argument names, which may well be a pipe: `check <(helm template .)`. Raises OSError."""
    if path == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    with open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)


def _examine(name: str, data: bytes, *, allow_http: bool) -> list[Finding]:
    try:
        documents = decode(data, is_json=looks_like_json(name, data))
    except Unreadable as error:
        return [Finding(where=name, faults=[str(error)])]
    if not documents:
        return [Finding(where=name, faults=["the file holds no document"])]
    return [_judge(name, document, allow_http=allow_http) for document in documents]


def _judge(name: str, document: Document, *, allow_http: bool) -> Finding:
    place = f"{name}:{document.number}" + (f".{document.item}" if document.item else "")
    if is_foreign(document.value):
        hint = (
            f"a {document.value['kind']} is another system's; this makes an Adapter of it: lora-sidecar check --convert"
        )
        return Finding(where=place, key=key_of(document.value), faults=[hint])
    try:
        adapter = parse_adapter(document.value, allow_http=allow_http)
    except InvalidManifest as error:
        return Finding(where=place, key=key_of(document.value), faults=list(error.faults))
    return Finding(where=place, key=adapter.key, adapter=adapter)


def compare(findings: Iterable[Finding]) -> None:
    """Add what can't be seen in one document alone: duplicates, and names that two adapters want.

    Two namespaces may belong to two pools, so one name in both is only a warning.
    """
    first: dict[str, Finding] = {}
    for finding in findings:
        if finding.adapter is None:
            continue
        owner = first.setdefault(finding.key, finding)
        if owner is not finding:
            finding.faults.append(f"stands in {owner.where} already, which would be in force; delete one of the two")
    adapters = [finding.adapter for finding in first.values() if finding.adapter is not None]
    for adapter, owner_of_name in _conflicts(adapters, within_namespace=True):
        conflict = name_conflict(adapter, owner_of_name) if owner_of_name else base_model_conflict(adapter)
        first[adapter.key].faults.append(conflict)
    for adapter, owner_of_name in _conflicts(adapters, within_namespace=False):
        if owner_of_name and not first[adapter.key].faults:
            first[adapter.key].warnings.append(f"in one pool, {name_conflict(adapter, owner_of_name)}")


def _conflicts(adapters: Iterable[Adapter], *, within_namespace: bool) -> list[tuple[Adapter, Adapter | None]]:
    """Adapters that lose their name, each with who keeps it; None if that is the base model."""
    groups: dict[tuple[str, str], list[Adapter]] = defaultdict(list)
    for adapter in adapters:
        groups[adapter.base_model, adapter.namespace if within_namespace else ""].append(adapter)
    found: list[tuple[Adapter, Adapter | None]] = []
    for (base, _), group in groups.items():
        catalog = select(group, frozenset({base}))
        owners = {adapter.served_name: adapter for adapter in catalog.active}
        found += ((a, owners.get(a.served_name)) for a in group if a.key in catalog.rejected)
    return found


async def _fetch_all(findings: list[Finding], args: argparse.Namespace) -> None:
    """Fetch and check what is behind every adapter without faults, each source once."""
    from sidecar.edges.logging import configure

    configure("console", "error")
    settings = Settings(max_lora_rank=args.max_lora_rank, allow_pickle=args.allow_pickle, allow_http=args.allow_http)
    known: dict[Source, Finding] = {}
    for finding in findings:
        if finding.adapter is None or finding.faults:
            continue
        before = known.setdefault(finding.adapter.source, finding)
        if before is finding:
            if sys.stderr.isatty():
                print(f"fetching {finding.adapter.source.uri} …", file=sys.stderr)
            await _fetch(finding, finding.adapter, settings)
        else:
            finding.fetched, finding.faults = before.fetched, list(before.faults)
            finding.warnings += before.warnings


async def _fetch(finding: Finding, adapter: Adapter, settings: Settings) -> None:
    """Download one adapter into a directory that is gone afterwards, and note what is wrong with it."""
    from sidecar.edges.disk import AdapterStore
    from sidecar.edges.fetch import OriginFetcher
    from sidecar.edges.filesystem import FileSystem, remove_tree
    from sidecar.ports import EdgeError

    async def own_credentials(_: Adapter, refused: Mapping[str, str] | None = None) -> Mapping[str, str]:
        if OWN_CREDENTIALS not in finding.warnings:
            finding.warnings.append(OWN_CREDENTIALS)
        return {}

    root = Path(tempfile.mkdtemp(prefix="lora-sidecar-check-"))
    try:
        store = AdapterStore.open(str(root), holder="lora-sidecar check")
        fetcher = OriginFetcher(settings, store, credentials=own_credentials)
        try:
            listing = await fetcher.listing(adapter)
            got = await fetcher.fetch(adapter, listing, None, lambda done, total: None)
            files = store.files(got.revision)
            finding.fetched = f", {got.revision}, {len(files)} files, {sum(f.size for f in files)} bytes"
            finding.warnings += got.warnings
        finally:
            await fetcher.close()
            store.close()
    except EdgeError as error:
        finding.faults.append(str(error))
    finally:
        remove_tree(FileSystem(), root)
