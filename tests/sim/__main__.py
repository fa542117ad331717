"""`python -m tests.sim --seeds N [--from S] [--jobs J]`: run many seeds, and report those that broke a law.

A seed that is named can be run again alone, `--seeds 1 --from SEED`: it is then the same story, and its log is shown.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

import structlog

from .story import Story, tell

CHUNK = 20
PROGRESS_SECONDS = 30.0


@dataclass
class Tally:
    """What came of some seeds."""

    seeds: int = 0
    cpu: float = 0.0
    virtual: float = 0.0
    broken: dict[int, str] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Take the other's in."""
        self.seeds += other.seeds
        self.cpu += other.cpu
        self.virtual += other.virtual
        self.broken |= other.broken
        for title, counts in other.counts.items():
            self.count(title, counts)

    def count(self, title: str, counts: Counter[str]) -> None:
        """Add to one table of the summary."""
        self.counts.setdefault(title, Counter()).update(counts)

    def note(self, story: Story) -> None:
        """A story was told to its end."""
        pool = story.pool
        self.virtual += story.lasted
        self.count("pools", Counter({f"{pool.kind}, {'Kubernetes' if pool.by_uid else 'standalone'}": 1}))
        self.count("disturbances", story.happened)
        self.count("laws checked", story.watch.checked)
        network = {"datagrams": pool.air.datagrams, "requests": pool.air.requests}
        self.count("network", Counter({**network, "accusations of live agents": story.views.accusations}))


def run_seeds(first: int, count: int) -> Tally:
    """Run them one after the other."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    tally = Tally(seeds=count)
    began = time.process_time()
    for seed in range(first, first + count):
        try:
            tally.note(tell(seed))
        except Exception as error:  # noqa: BLE001  # every kind of failure is a finding
            tally.broken[seed] = f"seed {seed}: {type(error).__name__}: {error}"
            if count == 1:
                tally.broken[seed] += "\n" + "\n".join(getattr(error, "__notes__", ()))
    tally.cpu = time.process_time() - began
    return tally


def parallel(first: int, count: int, jobs: int) -> Iterator[Tally]:
    """The tallies of parts, as they come, from `jobs` processes."""
    parts = iter(range(first, first + count, CHUNK))
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[Tally]] = set()
        while True:
            for part in parts:
                running.add(pool.submit(run_seeds, part, min(CHUNK, first + count - part)))
                if len(running) >= 2 * jobs:
                    break
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of texts is part of a story.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])
    whole = Tally()
    began = told = time.monotonic()
    for part in parallel(options.first, options.seeds, min(options.jobs, options.seeds)):
        whole.add(part)
        for text in part.broken.values():
            print(text, flush=True)
        if time.monotonic() - told >= PROGRESS_SECONDS:
            told = time.monotonic()
            print(
                f"{whole.seeds} of {options.seeds} seeds, {len(whole.broken)} broken, {told - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    for title, counts in whole.counts.items():
        print(f"{title}: " + ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in counts.most_common()))
    print(
        f"{whole.seeds} seeds ({options.first} to {options.first + whole.seeds - 1}), {len(whole.broken)} broken"
        f"{' ' + str(sorted(whole.broken)[:20]) if whole.broken else ''}; {whole.virtual / 3600:.1f} h of virtual time "
        f"in {time.monotonic() - began:.0f} s, {whole.cpu / max(1, whole.seeds):.2f} s of CPU a seed"
    )
    return 1 if whole.broken else 0


if __name__ == "__main__":
    sys.exit(main())
