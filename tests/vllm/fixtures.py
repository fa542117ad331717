"""The real vLLM for whoever asks: installed once on the machine, started once in a run. A plugin of all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.edges.sample_adapter import write_adapter
from tests.vllm.model import write_broken, write_model
from tests.vllm.server import VllmServer

INSTALL = Path(__file__).parent / "install"
VERSION = "0.32.0"
# The last vLLM whose prefix cache takes a new adapter for the old one of the same name, whatever its path.
STALE_VERSION = "0.30.0"
KEY = "the-key-of-these-tests"


def python_of(version: str) -> str:
    """The python of that vLLM. Skips if the machine can't have it; fails instead if LORA_SIDECAR_REQUIRE says so."""
    run = subprocess.run([str(INSTALL), version], capture_output=True, text=True)
    if run.returncode == 0:
        return run.stdout.strip()
    reason = f"tests/vllm/install {version} failed: {run.stderr.strip()[-1500:]}"
    if "vllm" in os.environ.get("LORA_SIDECAR_REQUIRE", "").split(","):
        pytest.fail(f"LORA_SIDECAR_REQUIRE asks for the real vLLM, and {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, adapters/a1 to a6, broken/<kind>."""
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder / "model")
    for number in range(1, 7):
        write_adapter(folder / "adapters" / f"a{number}", number)
    write_broken(folder / "broken")
    return folder


@pytest.fixture(scope="session")
def make_vllm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VllmServer]]:
    """Makes servers, not yet started: arguments as for VllmServer's, and `version`. Stops them all in the end."""
    servers: list[VllmServer] = []
    logs = tmp_path_factory.mktemp("vllm")

    def make(*arguments: str, version: str = VERSION, **options: bool | dict[str, str]) -> VllmServer:
        log = logs / f"{len(servers)}.log"
        server = VllmServer(python_of(version), tiny / "model", log, *arguments, **options)  # type: ignore[arg-type] # passed through
        servers.append(server)
        return server

    try:
        yield make
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="session")
def vllm(make_vllm: Callable[..., VllmServer]) -> VllmServer:
    """The server that most tests share: no key, runtime updating, two at once, three in memory, rank 16."""
    server = make_vllm()
    server.start()
    return server


@pytest.fixture(scope="session")
def guarded(make_vllm: Callable[..., VllmServer], tiny: Path) -> VllmServer:
    """A server with an API key, an adapter from its command line, and dev mode. Tests that end it start it again."""
    server = make_vllm("--api-key", KEY, "--lora-modules", f"fixed={tiny / 'adapters' / 'a6'}", dev_mode=True)
    server.start()
    return server


@pytest.fixture(scope="session")
def static(make_vllm: Callable[..., VllmServer], tiny: Path) -> VllmServer:
    """A server that takes no adapters at run time."""
    server = make_vllm("--lora-modules", f"fixed={tiny / 'adapters' / 'a6'}", runtime_updating=False)
    server.start()
    return server


@pytest.fixture(scope="session")
def stale(make_vllm: Callable[..., VllmServer]) -> VllmServer:
    """An old vLLM that mixes cached blocks of old weights with new ones, and can reset its prefix cache."""
    server = make_vllm(version=STALE_VERSION, dev_mode=True)
    server.start()
    return server
