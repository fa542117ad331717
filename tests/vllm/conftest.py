"""Every test in this folder needs the real vLLM; its fixtures are in fixtures.py."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder, so that no file can forget it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
