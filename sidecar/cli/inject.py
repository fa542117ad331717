"""`lora-sidecar inject`: put the sidecar into Kubernetes manifests, and take it out again. YAML in, YAML out."""

from __future__ import annotations

import argparse
import copy
import io
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from sidecar import __version__
from sidecar.core.injection import InjectionRefused, Options, Outcome, inject, uninject
from sidecar.core.injection_parts import IMAGE

_SEPARATOR = re.compile(r"^---(?=\s|$)[^\n]*\n?", re.MULTILINE)
_NEXT_STEPS = """the Role that the RoleBindings name comes with `kubectl apply -n NAMESPACE -k deploy/base`
gossip is switched on by `kubectl create secret generic {secret} --from-literal=key="$(openssl rand -hex 32)"`"""


class _Unreadable(Exception):
    """The input is no YAML. The text says where."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's parser."""
    parser = subparsers.add_parser(
        "inject",
        help="add the sidecar to manifests (stdin to stdout)",
        description="Adds the sidecar to every Pod, Deployment, StatefulSet, ReplicaSet, DaemonSet or LeaderWorkerSet"
        " with a vLLM container. Writes the manifests to stdout with comments and order kept, and to stderr what was"
        " done.",
    )
    parser.add_argument("-f", "--filename", default="-", metavar="FILE", help="manifests to read (default: stdin)")
    parser.add_argument("--uninject", action="store_true", help="take the sidecar out again")
    parser.add_argument("--pool", default="", metavar="NAME", help="name of the pool and of its headless Service")
    parser.add_argument(
        "--container", default="", metavar="NAME", help="the vLLM server's container, if it can't be told"
    )
    parser.add_argument("--image", default=f"{IMAGE}:{__version__}", help="image of the sidecar (default: %(default)s)")
    parser.add_argument("--adapters-dir", default="/adapters", metavar="DIR", help="where both see the adapters' files")
    parser.add_argument(
        "--gossip-secret", default="lora-sidecar-gossip", metavar="NAME", help="Secret whose `key` switches gossip on"
    )
    for flag, what in (
        ("--max-loras", "adapters in one batch"),
        ("--max-cpu-loras", "adapters in memory, the worker's capacity"),
        ("--max-lora-rank", "largest rank"),
    ):
        parser.add_argument(flag, type=int, default=0, metavar="N", help=f"set vLLM's {flag}: {what}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: written. 1: refused, with every reason. 2: the input can't be read."""
    try:
        text = sys.stdin.read() if args.filename == "-" else Path(args.filename).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return _fail(2, f"{args.filename}: {error}")
    try:
        return _transform(text, args, sys.stdout, sys.stderr)
    except ImportError:
        return _fail(2, "inject needs ruamel.yaml, which keeps comments and order: pip install 'lora-sidecar[inject]'")
    except _Unreadable as error:
        return _fail(2, f"{args.filename}: {error}")
    except InjectionRefused as refusal:
        return _fail(1, *str(refusal).splitlines())


def _fail(code: int, *reasons: str) -> int:
    for reason in reasons:
        print(f"error: {reason}", file=sys.stderr)
    return code


def _transform(text: str, args: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    chunks = _chunks(text)
    loaded = [(head, body, _load(body)) for head, body in chunks]
    documents = [document for _, _, document in loaded if document is not None]
    before = copy.deepcopy(documents)
    outcome = _apply(documents, args)
    unchanged = {id(now) for now, then in zip(documents, before, strict=True) if now == then}
    out.write(_written(loaded, outcome, unchanged))
    for note in outcome.notes:
        print(note, file=err)
    if not outcome.notes:
        print("nothing to do: " + ("no sidecar in it" if args.uninject else "it is all there already"), file=err)
    elif not args.uninject:
        print(_NEXT_STEPS.format(secret=args.gossip_secret), file=err)
    return 0


def _apply(documents: list[Any], args: argparse.Namespace) -> Outcome:
    if args.uninject:
        return uninject(documents)
    options = Options(
        pool=args.pool,
        container=args.container,
        image=args.image,
        adapters_dir=args.adapters_dir.rstrip("/"),
        gossip_secret=args.gossip_secret,
        max_loras=args.max_loras,
        max_cpu_loras=args.max_cpu_loras,
        max_lora_rank=args.max_lora_rank,
    )
    return inject(documents, options)


def _chunks(text: str) -> list[tuple[str, str]]:
    """The documents as text: (separator line, body). `---` at the start of a line is a separator wherever it stands."""
    separators = list(_SEPARATOR.finditer(text))
    first = text[: separators[0].start()] if separators else text
    ends = [match.start() for match in separators[1:]] + [len(text)]
    rest = [(match[0], text[match.end() : end]) for match, end in zip(separators, ends, strict=False)]
    return ([("", first)] if first or not separators else []) + rest


def _written(loaded: list[tuple[str, str, Any]], outcome: Outcome, unchanged: set[int]) -> str:
    """What is unchanged goes out as it came in, to the byte."""
    kept = {id(document) for document in outcome.documents}
    known = {id(document) for _, _, document in loaded}
    text = "".join(
        head + (body if document is None or id(document) in unchanged else _dump(document, body))
        for head, body, document in loaded
        if document is None or id(document) in kept
    )
    for document in outcome.documents:
        if id(document) not in known:
            text += ("" if not text or text.endswith("\n") else "\n") + "---\n" + _dump(document, "")
    return text


def _yaml(body: str) -> Any:
    """A YAML that reads and writes with the indentation that `body` has."""
    from ruamel.yaml import YAML  # costs memory and time that only this command needs

    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 1 << 16
    mapping = re.search(r"^( *)[^\s#-][^\n]*:[ ]*\n\1( +)[^\s#-]", body, re.MULTILINE)
    sequence = re.search(r"^( *)[^\s#-][^\n]*:[ ]*\n( *)- ", body, re.MULTILINE)
    offset = max(0, len(sequence[2]) - len(sequence[1])) if sequence else 0
    yaml.indent(mapping=len(mapping[2]) if mapping else 2, sequence=offset + 2, offset=offset)
    return yaml


def _load(body: str) -> Any:
    from ruamel.yaml.error import YAMLError

    try:
        return _yaml(body).load(body)
    except YAMLError as error:
        hint = "; it looks like a template: render it first (helm template)" if "{{" in body else ""
        raise _Unreadable(f"no YAML{hint}: {' '.join(str(error).split())}") from None


def _dump(document: Any, body: str) -> str:
    stream = io.StringIO()
    _yaml(body).dump(document, stream)
    return stream.getvalue()
