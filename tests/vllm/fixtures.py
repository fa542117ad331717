"""The real vLLM for whoever asks: installed once on the machine, started once in a run. A plugin of all tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sidecar.edges.sample_adapter import write_adapter
from tests.vllm.model import write_broken, write_model
from tests.vllm.server import VllmServer

INSTALL = Path(__file__).parent / "install"
VERSION = "0.32.0"
# The last vLLM whose prefix cache takes a new adapter for the old one of the same name, whatever its path.
STALE_VERSION = "0.30.0"
KEY = "the-key-of-these-tests"
# More tests than that are worth all servers.
MANY = 40
FIXED = ["--lora-modules", "fixed={tiny}/adapters/a6"]
# Name -> arguments, version, options of VllmServer: in the order in which the tests need them.
SERVERS: dict[str, tuple[list[str], str, dict[str, Any]]] = {
    "vllm": ([], VERSION, {}),
    "guarded": (["--api-key", KEY, *FIXED], VERSION, {"dev_mode": True}),
    "static": (FIXED, VERSION, {"runtime_updating": False}),
    "stale": ([], STALE_VERSION, {"dev_mode": True}),
    "stubborn": ([], STALE_VERSION, {}),
    "second": ([], VERSION, {}),
}


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


class Fleet:
    """The servers that tests share, each started when it is first asked for, or before by `start_all`."""

    def __init__(self, tiny: Path, logs: Path) -> None:
        self._tiny, self._logs = tiny, logs
        self._servers: dict[str, VllmServer] = {}
        self._locks = {name: threading.Lock() for name in SERVERS}

    def get(self, name: str) -> VllmServer:
        """That server, healthy as of its start. Raises RuntimeError if it doesn't start; skips as `python_of`."""
        with self._locks[name]:
            if name not in self._servers:
                arguments, version, options = SERVERS[name]
                arguments = [argument.format(tiny=self._tiny) for argument in arguments]
                python, log = python_of(version), self._logs / f"{name}.log"
                server = VllmServer(python, self._tiny / "model", log, *arguments, **options)
                server.start()
                self._servers[name] = server
            return self._servers[name]

    def start_all(self) -> None:
        """Start all, two at a time: one that started beside the tests would take their core for half a minute, and a
        request that is to be seen running would be over before the metrics are."""

        def start(name: str) -> None:
            # Whoever asks for a server that doesn't start hears why.
            with contextlib.suppress(RuntimeError, pytest.skip.Exception, pytest.fail.Exception):
                self.get(name)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(start, SERVERS))

    def stop(self) -> None:
        """End them all."""
        for name, lock in self._locks.items():
            with lock:
                if name in self._servers:
                    self._servers[name].stop()


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All servers; they start before the first test when many will ask for them."""
    fleet = Fleet(tiny, tmp_path_factory.mktemp("vllm"))
    many = sum(item.get_closest_marker("vllm") is not None for item in request.session.items) > MANY
    try:
        if many:
            fleet.start_all()
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture(scope="session")
def vllm(fleet: Fleet) -> VllmServer:
    """The server that most tests share: no key, runtime updating, two at once, three in memory, rank 16."""
    return fleet.get("vllm")


@pytest.fixture(scope="session")
def second(fleet: Fleet) -> VllmServer:
    """Another like it, for pools of two."""
    return fleet.get("second")


@pytest.fixture
def guarded(fleet: Fleet) -> VllmServer:
    """A server with an API key, an adapter from its command line, and dev mode. Tests may end it."""
    server = fleet.get("guarded")
    if server.exited() is not None:
        server.stop()
        server.start()
    return server


@pytest.fixture(scope="session")
def static(fleet: Fleet) -> VllmServer:
    """A server that takes no adapters at run time."""
    return fleet.get("static")


@pytest.fixture(scope="session")
def stale(fleet: Fleet) -> VllmServer:
    """An old vLLM that mixes cached blocks of old weights with new ones, and can reset its prefix cache."""
    return fleet.get("stale")


@pytest.fixture(scope="session")
def stubborn(fleet: Fleet) -> VllmServer:
    """An old vLLM as people run it: its prefix cache can't be reset."""
    return fleet.get("stubborn")
