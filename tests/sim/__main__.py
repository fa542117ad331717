"""`python -m tests.sim --seeds N [--from S]`: run many seeds and report those that broke a law."""

from __future__ import annotations

import argparse
import logging
import sys
import time

import structlog

from .story import tell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed (default 0)")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    broken = []
    began = time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        try:
            tell(seed)
        except Exception as error:  # noqa: BLE001  # every kind of failure is a finding
            broken.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if options.seeds == 1:
                print("\n".join(getattr(error, "__notes__", ())))
    print(f"{options.seeds} seeds, {len(broken)} broken {broken[:20]}, {time.monotonic() - began:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
