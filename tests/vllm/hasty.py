"""The agent as `lora-sidecar run` starts it, but with times that its flags don't give: `python -m tests.vllm.hasty`.

HASTY holds a JSON object of fields of Settings; the arguments are those of `run`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from msgspec import structs

from sidecar.app import run_agent
from sidecar.cli.run import add_parser, settings_from
from sidecar.edges.logging import configure


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command", required=True))
    given = vars(parser.parse_args(sys.argv[1:]))
    settings = structs.replace(settings_from(given, os.environ), **json.loads(os.environ["HASTY"]))
    configure(settings.log_format, settings.log_level)
    asyncio.run(run_agent(settings))


if __name__ == "__main__":
    main()
