"""Fixtures that several edges' tests share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory in memory where there is such a place: for tests that sync to the disk thousands of times."""
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="lora-sidecar-test-", dir=shared if shared.is_dir() else None))
    yield path
    shutil.rmtree(path)
