"""`lora-sidecar explain ADAPTER`: why an adapter is where it is, asked from one agent. A table, or JSON."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote, urlsplit

from sidecar.cli.cluster import add_cluster_flags

DEFAULT_PORT = 8790
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
# The largest pool's answer is far below this.
_MAX_ANSWER = 16 * 1024 * 1024


class _Failed(Exception):
    """Nothing to show; the text says why."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's parser."""
    parser = subparsers.add_parser(
        "explain",
        help="say why an adapter is where it is",
        description="Asks an agent for the workers of its pool in rank order for one adapter: who is a target, who is"
        " passed over, and why. Every agent of a pool answers the same.",
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="namespace/name, resource name, or served name")
    parser.add_argument(
        "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=f"the agent to ask (default: {DEFAULT_ADDRESS})"
    )
    parser.add_argument(
        "--cluster", action="store_true", help="ask an agent of the namespace, through the Kubernetes API server"
    )
    add_cluster_flags(parser)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table", help="(default: table)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="(default: 5)")


def run(args: argparse.Namespace) -> int:
    """Print the answer; 1 if there is none."""
    try:
        if args.cluster or args.namespace or args.context or args.kubeconfig:
            answer = _ask_in_cluster(args)
        else:
            answer = _ask(args.address, args.adapter, args.timeout)
    except _Failed as error:
        print(f"lora-sidecar explain: {_plain(str(error))}", file=sys.stderr)
        return 1
    if args.output == "json":
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        print("\n".join(_lines(answer)))
    return 0


def _ask(address: str, name: str, timeout: float) -> Mapping[str, Any]:
    host, port = _parsed(address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request(
            "GET", f"/v1/adapters/{quote(name, safe='')}/explain", headers={"Accept": "application/json"}
        )
        response = connection.getresponse()
        status, body = response.status, response.read(_MAX_ANSWER)
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise _Failed(
            f"no answer from {address}: {error or type(error).__name__}. Is an agent there? --address names another"
        ) from error
    finally:
        connection.close()
    return _understood(address, name, status, body)


def _ask_in_cluster(args: argparse.Namespace) -> Mapping[str, Any]:
    # Here, because asking an agent directly needs nothing of Kubernetes.
    import asyncio

    from sidecar.cli.cluster import ask_an_agent
    from sidecar.ports import EdgeError

    try:
        status, body = asyncio.run(ask_an_agent(args, f"/v1/adapters/{quote(args.adapter, safe='')}/explain"))
    except EdgeError as error:
        raise _Failed(str(error)) from error
    return _understood("the agent", args.adapter, status, body)


def _understood(address: str, name: str, status: int, body: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _Failed(f"{address} answers HTTP {status}, but not as an agent of lora-sidecar does")
    if status == 404 and "known" in answer:
        raise _Failed(_unknown(name, answer))
    if status != 200:
        raise _Failed(f"{address} answers HTTP {status}: {answer.get('error', 'no reason given')}")
    return answer


def _parsed(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _Failed(f"--address {address!r} is not HOST:PORT: {error}") from error
    if not host or parts.scheme != "http":
        raise _Failed(f"--address {address!r} is not HOST:PORT; for example {DEFAULT_ADDRESS}")
    return host, port or DEFAULT_PORT


def _unknown(name: str, answer: Mapping[str, Any]) -> str:
    known = [str(key) for key in answer["known"]]
    total = answer.get("knownTotal", len(known))
    if not known:
        return f"no adapter is known as {name!r}; the agent knows none at all"
    shown = get_close_matches(name, known, n=5, cutoff=0.5) or known[:10]
    return f"no adapter is known as {name!r}; among the {total} known: {', '.join(shown)}"


def _lines(answer: Mapping[str, Any]) -> list[str]:
    title = [_plain(answer.get("adapter", ""))]
    if answer.get("servedName"):
        title.append(f"served as {_plain(answer['servedName'])}")
    if answer.get("wanted") is not None:
        title.append(f"wanted on {_plain(answer['wanted'])}")
    lines = [", ".join(title)]
    if answer.get("rejected"):
        lines.append(f"not placed: {_plain(answer['rejected'])}")
    if answer.get("isolated"):
        lines.append("the agent reaches less than half of the pool, and drops nothing until it does again")
    rows = [_row(worker) for worker in answer.get("workers", ())]
    lines += ["", *_table([("RANK", "WORKER", "SCORE", "ZONE", "UP", "WHY"), *rows])] if rows else ["no workers known"]
    if answer.get("also"):
        lines += ["", f"the same name also fits: {', '.join(_plain(key) for key in answer['also'])}"]
    return lines


def _row(worker: Mapping[str, Any]) -> tuple[str, ...]:
    rank = worker.get("rank")
    return (
        "-" if rank is None else _plain(rank),
        _plain(worker.get("worker", "")),
        _plain(worker.get("score", "")),
        _plain(worker.get("zone", "") or "-"),
        "yes" if worker.get("up") else "no",
        _plain(worker.get("why", "")),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _plain(value: object) -> str:
    """Text without control characters: names come from others, and a terminal obeys what it is shown."""
    return "".join(char if char.isprintable() else "?" for char in str(value))
