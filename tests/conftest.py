"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# Time per example says something about the machine, which others use too, and nothing about the code.
settings.register_profile("sidecar", deadline=None)
settings.load_profile("sidecar")

# Session fixtures that tests in several folders share: one real vLLM for all of them.
pytest_plugins = ("tests.vllm.fixtures",)
