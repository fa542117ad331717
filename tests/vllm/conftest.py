"""Every test in this folder needs the real vLLM; its engines are in fixtures.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3server import S3Server
from tests.vllm.agent import Agent, MakeAgent
from tests.vllm.client import Client
from tests.vllm.server import VllmServer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder, so that no file can forget it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def make_agent(tmp_path: Path, s3: S3Server) -> Iterator[MakeAgent]:
    """Makes agents, started; what they loaded is unloaded in the end."""
    agents: list[Agent] = []

    def make(server: VllmServer, *flags: str, name: str = "w1", start: bool = True, **more: Any) -> Agent:
        agent = Agent(tmp_path / name, server.url, "--capacity", "20", *flags, name=name, env=s3.env, **more)
        agents.append(agent)
        if start:
            agent.start()
        return agent

    yield make
    for agent in agents:
        agent.stop()
    for agent in agents:
        client = Client(agent.engine_url)
        if client.post("/health")[0]:
            for name, root in client.models().items():
                if root.startswith(str(agent.adapters_dir)):
                    client.post("/v1/unload_lora_adapter", lora_name=name)
