"""A real agent process beside a real engine, fed from a folder of manifests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.s3server import S3Server

REPOSITORY = Path(__file__).parents[2]
Row = dict[str, Any]


class Agent:
    """`lora-sidecar run --backend standalone`. `folder` holds its manifests, its adapters directory and its log.
    `hasty`: times that its flags don't give (see tests.vllm.hasty).

    A manifest of another base model is always there: a folder that is suddenly empty is taken for a mistake.
    """

    def __init__(
        self,
        folder: Path,
        engine_url: str,
        *flags: str,
        name: str = "w1",
        port: int = 0,
        env: dict[str, str] | None = None,
        hasty: dict[str, float] | None = None,
    ) -> None:
        self.folder, self.name, self.engine_url = folder, name, engine_url
        self.manifests, self.adapters_dir, self.log = folder / "manifests", folder / "adapters", folder / "log"
        self.manifests.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        module = "tests.vllm.hasty" if hasty else "sidecar"
        self.command = [sys.executable, "-m", module, "run", "--backend", "standalone", "--name", name]
        self.command += ["--manifests", str(self.manifests), "--adapters-dir", str(self.adapters_dir)]
        self.command += ["--listen", f"127.0.0.1:{self.port}", "--engine-url", engine_url, *flags]
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("LORA_SIDECAR_")} | (
            env or {}
        )
        self.env |= {"HASTY": json.dumps(hasty)} if hasty else {}
        self._process: subprocess.Popen[bytes] | None = None
        self.apply("elsewhere", "file:///nowhere", baseModel="another-model")

    def __enter__(self) -> Agent:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, and wait until its server answers. Raises RuntimeError with its log."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self.command, cwd=REPOSITORY, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.until(lambda: self.get("/healthz")[0] == 200, "it answers /healthz", 30)

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def apply(self, name: str, uri: str, **spec: object) -> None:
        """Write (or replace) the manifest of adapter `name`; `source` takes more fields of spec.source."""
        source = {"uri": uri, **spec.pop("source", {})}  # type: ignore[dict-item] # a mapping by our own use
        document = {
            "apiVersion": "lora-sidecar.io/v1alpha1",
            "kind": "Adapter",
            "metadata": {"name": name},
            "spec": {"baseModel": "tiny", "source": source, **spec},
        }
        written = self.manifests / f".{name}.tmp"
        written.write_text(json.dumps(document))
        written.replace(self.manifests / f"{name}.json")

    def delete(self, name: str) -> None:
        """Remove the manifest of adapter `name`."""
        (self.manifests / f"{name}.json").unlink()

    def get(self, path: str) -> tuple[int, Any]:
        """(status, document); status 0 if nothing answers."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, None

    def rows(self) -> dict[str, Row]:
        """/v1/adapters by name; empty while nothing answers."""
        status, document = self.get("/v1/adapters")
        return {row["name"]: row for row in document["adapters"]} if status == 200 else {}

    def state(self, name: str) -> str:
        """What the agent says about adapter `name`, "" if it doesn't know it."""
        return self.rows().get(name, {}).get("state") or ""

    def wait(self, name: str, state: str, seconds: float = 60) -> Row:
        """Until adapter `name` is in `state`; its row."""
        self.until(lambda: self.state(name) == state, f"{name} is {state}", seconds)
        return self.rows()[name]

    def until(self, condition: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Wait for `condition`. Raises AssertionError with the agent's view and the end of its log."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._process is not None
            if time.monotonic() > deadline or self._process.poll() is not None:
                rows = json.dumps(self.rows(), indent=1)
                raise AssertionError(f"not within {seconds} s: {what}\n{rows}\n{self.log.read_text()[-5000:]}")
            time.sleep(0.05)


MakeAgent = Callable[..., Agent]


def upload(s3: S3Server, prefix: str, folder: Path) -> str:
    """Put an adapter's files behind a URI."""
    for file in sorted(folder.iterdir()):
        s3.put("adapters", f"{prefix}/{file.name}", file.read_bytes())
    return f"s3://adapters/{prefix}"
