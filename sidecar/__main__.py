"""`lora-sidecar`, and `python -m sidecar`: finds the command and runs it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="lora-sidecar",
        description="Keeps the right LoRA adapters loaded on the right vLLM workers, with no central controller.",
    )
    parser.add_argument("--version", action="version", version=f"lora-sidecar {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = arguments[0] if arguments and arguments[0] in COMMANDS else None
    for name, text in COMMANDS.items():
        if name == wanted:
            importlib.import_module(f"sidecar.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=text, add_help=False)
    options = parser.parse_args(arguments)
    module = importlib.import_module(f"sidecar.cli.{options.command}")
    return int(module.run(options))


if __name__ == "__main__":
    sys.exit(main())
