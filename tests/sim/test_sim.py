"""Whole agents on virtual time. `python -m tests.sim --seeds N` runs many more, and names those that break a law."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from .story import tell

QUICK = 20
SLOW = 320
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A story logs thousands of expected warnings; a failure brings its own log."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("seed", range(QUICK))
def test_laws_hold_and_the_pool_converges(seed: int) -> None:
    tell(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, SLOW, 25))
def test_laws_hold_for_many_seeds(first: int) -> None:
    for seed in range(first, first + 25):
        tell(seed)


def test_one_seed_is_one_story() -> None:
    assert tell(3).watch.log == tell(3).watch.log


def test_the_command_tells_what_it_ran() -> None:
    command = [sys.executable, "-m", "tests.sim", "--from", "8", "--seeds", "2", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 seeds (8 to 9), 0 broken" in done.stdout
    assert "disturbances: " in done.stdout
