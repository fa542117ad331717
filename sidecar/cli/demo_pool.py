"""The demo's workers: an engine and an agent each, all on this machine and all real processes."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import sidecar
from sidecar.cli.demo_plan import BASE, Item, Options, write_manifest
from sidecar.cli.demo_process import Child, end_all, free_ports

HOST = "127.0.0.1"
PYTHON = (sys.executable, "-P")


class Worker:
    """One engine and the agent beside it. `engine` is None where the engine isn't the demo's own."""

    def __init__(self, name: str, place: Path, address: str, engine_url: str) -> None:
        self.name = name
        self.place = place
        self.address = address
        self.engine_url = engine_url
        self.agent: Child
        self.engine: Child | None = None
        # Whether it belongs to the pool now, as the story has it.
        self.present = False

    @property
    def adapters_dir(self) -> Path:
        """Where its agent keeps files; the engine reads them at the same path."""
        return self.place / "adapters"

    def children(self) -> Iterator[Child]:
        """Its processes, the engine first."""
        if self.engine is not None:
            yield self.engine
        yield self.agent

    def start(self) -> None:
        """Start its processes that don't run."""
        for child in self.children():
            if not child.pid:
                child.start()
        self.present = True

    def kill(self) -> None:
        """kill -9: the agent, and the engine if it is the demo's."""
        self.present = False
        for child in self.children():
            child.kill()


class Pool:
    """All workers, also the one that joins later, and the directories that they share under `root`."""

    def __init__(self, root: Path, options: Options, base_model: str, capacity: int) -> None:
        self.root = root
        self.base_model = base_model
        self.capacity = capacity
        self._api_key_file = options.engine_api_key_file
        self.manifests = root / "manifests"
        self.manifests.mkdir()
        self._key = root / "gossip-key"
        self._key.write_text(secrets.token_hex(32) + "\n")
        self._key.chmod(0o600)
        # An installed program finds its bytecode; one that may not write any would compile all of it at each start.
        hidden = {"PYTHONDONTWRITEBYTECODE"} | {name for name in os.environ if name.startswith("LORA_SIDECAR_")}
        self._environment = {k: v for k, v in os.environ.items() if k not in hidden}
        # This very code, from wherever it was started, and never something called sidecar in the current directory.
        places = [str(Path(sidecar.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        count = len(options.engine_urls) or options.workers + 1
        ports = free_ports(count if options.engine_urls else 2 * count)
        urls = options.engine_urls or tuple(f"http://{HOST}:{port}" for port in ports[count:])
        self.workers = [self._worker(i, f"{HOST}:{ports[i]}", urls[i]) for i in range(count)]
        for worker in self.workers:
            if not options.engine_urls:
                worker.engine = self._engine(worker)
            worker.agent = self._agent(worker)

    @property
    def own_engines(self) -> bool:
        """Whether the engines are the demo's stand-ins, which it may kill."""
        return self.workers[0].engine is not None

    @property
    def first(self) -> list[Worker]:
        """The workers of the story's beginning."""
        return self.workers[:-1]

    @property
    def newcomer(self) -> Worker:
        """The worker that joins."""
        return self.workers[-1]

    @property
    def present(self) -> list[Worker]:
        """The workers that should be there now."""
        return [worker for worker in self.workers if worker.present]

    def children(self) -> list[Child]:
        """Every process, running or not; agents come first, so that they are asked first to end."""
        return sorted((c for w in self.workers for c in w.children()), key=lambda c: not c.what.endswith("agent"))

    def fates(self) -> list[str]:
        """Processes that have ended and should not have."""
        return [child.fate for child in self.children() if child.fate]

    def apply(self, item: Item) -> None:
        """Write the item's manifest, or replace it."""
        write_manifest(self.manifests, item, self.base_model)

    def delete(self, item: Item) -> None:
        """Delete the item's manifest."""
        (self.manifests / f"{item.name}.yaml").unlink()

    def end(self) -> None:
        """End every process; blocks for up to 3 s."""
        end_all(self.children())

    def _worker(self, number: int, address: str, engine_url: str) -> Worker:
        place = self.root / f"worker-{number + 1}"
        place.mkdir()
        return Worker(place.name, place, address, engine_url)

    def _engine(self, worker: Worker) -> Child:
        port = worker.engine_url.rpartition(":")[2]
        command = [*PYTHON, "-m", "sidecar.edges.stub_engine", "--host", HOST, "--port", port]
        command += ["--model", BASE, "--max-loras", str(self.capacity), "--max-cpu-loras", str(self.capacity)]
        return self._child(worker, "engine", command)

    def _agent(self, worker: Worker) -> Child:
        flags = {
            "backend": "standalone",
            "manifests": str(self.manifests),
            "seeds": ",".join(other.address for other in self.workers if other is not worker),
            "name": worker.name,
            "pool": "demo",
            "listen": worker.address,
            "engine-url": worker.engine_url,
            "adapters-dir": str(worker.adapters_dir),
            "capacity": str(self.capacity),
            "gossip-key-file": str(self._key),
            "log-format": "console",
        }
        if self._api_key_file:
            flags["engine-api-key-file"] = self._api_key_file
        command = [*PYTHON, "-m", "sidecar", "run"]
        return self._child(worker, "agent", command + [part for k, v in flags.items() for part in (f"--{k}", v)])

    def _child(self, worker: Worker, what: str, command: list[str]) -> Child:
        return Child(f"{worker.name}'s {what}", command, worker.place / f"{what}.log", self._environment)
