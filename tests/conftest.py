"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Time per example says something about the machine, which others use too, and nothing about the code.
settings.register_profile("sidecar", deadline=None)
# How fast and how large examples are drawn says nothing about the code either.
DRAWING = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
# The same examples for the same code: CI judges a change, and finding new examples is for everybody's own runs.
settings.register_profile("ci", deadline=None, derandomize=True, database=None, suppress_health_check=DRAWING)
settings.load_profile("ci" if os.environ.get("CI") else "sidecar")

# Session fixtures that tests in several folders share: one real vLLM for all of them.
pytest_plugins = ("tests.vllm.fixtures",)
