"""`lora-sidecar status` and `kubectl lora status`: adapters by pods with their state, from the pods' annotations."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec

from sidecar.cli.cluster import add_cluster_flags, connect
from sidecar.core.annotations import CORDON, POOL
from sidecar.core.overview import PodLine, long_table, matrix, pod_line, pods_table
from sidecar.edges.kubernetes.api import ApiError
from sidecar.edges.kubernetes.objects import PodMeta
from sidecar.edges.kubernetes.watch import EventType, Watch
from sidecar.ports import EdgeError

_CLEAR = "\x1b[2J\x1b[H"
# With -w changes that come together are shown together.
_GATHER = 0.2

_pods = msgspec.json.Decoder(PodMeta)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's parser."""
    parser = subparsers.add_parser(
        "status",
        help="adapters and where they are loaded, from the cluster",
        description="Shows the adapters of a namespace by pods, as the pods' own annotations tell; needs no more than "
        "to list pods. Loaded* is a copy that gets no traffic yet, or no longer.",
    )
    add_cluster_flags(parser)
    parser.add_argument("--pool", default="", metavar="NAME", help="this pool only (default: all of the namespace)")
    parser.add_argument(
        "-o", "--output", choices=["table", "wide", "json", "yaml"], default="table", help="(default: table)"
    )
    parser.add_argument("-w", "--watch", action="store_true", help="show it again after each change, until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Print the state; 1 if the cluster can't be read."""
    try:
        return asyncio.run(_show(args))
    except EdgeError as error:
        print(f"lora-sidecar status: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


class _Pods:
    """A watch's sink: the pods as they are now."""

    def __init__(self) -> None:
        self.pods: dict[str, PodLine] = {}
        self.changed = asyncio.Event()
        self.error: ApiError | None = None

    async def listed(self, items: Sequence[msgspec.Raw]) -> None:
        """See watch.Sink."""
        self.pods = {}
        for item in items:
            self.event("ADDED", item)
        self.error = None
        self.changed.set()

    def event(self, kind: EventType, item: msgspec.Raw) -> None:
        """See watch.Sink."""
        line = _line(_pods.decode(item))
        if kind == "DELETED":
            self.pods.pop(line.name, None)
            self.changed.set()
        elif self.pods.get(line.name) != line:
            self.pods[line.name] = line
            self.changed.set()

    def current(self) -> None:
        """See watch.Sink."""

    def failed(self, error: ApiError) -> None:
        """See watch.Sink."""
        self.error = error
        self.changed.set()

    def doubtful(self) -> bool:
        """See watch.Sink."""
        return False


def _line(pod: PodMeta) -> PodLine:
    meta = pod.metadata
    labels, annotations = meta.labels or {}, meta.annotations or {}
    return pod_line(
        meta.name,
        meta.namespace,
        labels,
        annotations,
        pool=labels.get(POOL, ""),
        cordoned=annotations.get(CORDON, "").lower() == "true",
        terminating=meta.deletion_timestamp is not None,
    )


async def _show(args: argparse.Namespace) -> int:
    api, namespace = await connect(args)
    sink = _Pods()
    query = {"labelSelector": f"{POOL}={args.pool}" if args.pool else POOL}
    watching = asyncio.create_task(Watch(api, f"/api/v1/namespaces/{namespace}/pods", sink, query=query).run())
    try:
        while True:
            await sink.changed.wait()
            if args.watch:
                await asyncio.sleep(_GATHER)
            sink.changed.clear()
            if sink.error is not None and not args.watch:
                raise sink.error
            text = _text(list(sink.pods.values()), args.output, namespace)
            note = f"\nnot current: {sink.error}" if sink.error else ""
            print((_CLEAR if args.watch and sys.stdout.isatty() else "") + text + note, flush=True)
            if not args.watch:
                return 0
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await api.close()


def _text(pods: list[PodLine], output: str, namespace: str) -> str:
    pods.sort(key=lambda p: p.name)
    if output == "json":
        return msgspec.json.format(msgspec.json.encode({"namespace": namespace, "pods": pods}), indent=2).decode()
    if output == "yaml":
        import yaml

        document = msgspec.to_builtins({"namespace": namespace, "pods": pods})
        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True)).rstrip()
    if not pods:
        return f"no pod in namespace {namespace} has the label {POOL}; -n names another namespace"
    if output == "wide":
        return _table(pods_table(pods)) + "\n\n" + _table(long_table(pods))
    if not any(pod.adapters for pod in pods):
        return _table(pods_table(pods)) + "\n\nno adapters on these pods"
    return _table(matrix(pods))


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    plain = [tuple(_plain(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in plain) for column in range(len(plain[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in plain]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Without control characters: annotations come from others, and a terminal obeys what it is shown."""
    return "".join(char if char.isprintable() else "?" for char in text)
