"""`lora-sidecar`, and `python -m sidecar`: finds the command and runs it."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from sidecar import __version__

# Each command lives in sidecar.cli.<module>; only the one that is asked for is imported.
COMMANDS = {
    "run": "run the agent beside one vLLM server",
    "demo": "a whole pool on this machine: apply, scale, kill, heal, and check the result",
    "check": "validate manifests and, with --fetch, the adapters behind them",
    "explain": "why an adapter is where it is",
    "status": "adapters and where they are loaded, from the cluster",
    "inject": "add the sidecar to Kubernetes manifests",
}


# What makes sense as `kubectl lora …`.
PLUGIN = ("status", "explain")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status."""
    # The first process of a container has no default action: a SIGTERM while the modules are imported would be lost.
    signal.signal(signal.SIGTERM, _terminated)
    return _run("lora-sidecar", COMMANDS, list(sys.argv[1:] if argv is None else argv))


def kubectl(argv: Sequence[str] | None = None) -> int:
    """`kubectl lora status` and `kubectl lora explain`: the same commands, always about a cluster."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["explain"]:
        arguments.insert(1, "--cluster")
    return _run("kubectl lora", {name: COMMANDS[name] for name in PLUGIN}, arguments)


def _terminated(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(program: str, known: Mapping[str, str], arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Keeps the right LoRA adapters loaded on the right vLLM workers, with no central controller.",
    )
    parser.add_argument("--version", action="version", version=f"lora-sidecar {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = arguments[0] if arguments and arguments[0] in known else None
    for name, text in known.items():
        if name == wanted:
            importlib.import_module(f"sidecar.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=text, add_help=False)
    options = parser.parse_args(arguments)
    module = importlib.import_module(f"sidecar.cli.{options.command}")
    return int(module.run(options))


if __name__ == "__main__":
    sys.exit(main())
