"""The demo's whole story on two real engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.vllm.client import Client
from tests.vllm.server import VllmServer

LIMIT = 600


def test_the_story_on_two_real_engines(vllm: VllmServer, second: VllmServer, tiny: Path, tmp_path: Path) -> None:
    adapters = ",".join(str(tiny / "adapters" / f"a{number}") for number in range(1, 5))
    # Busy cores make a real engine slow; how long a step takes is not what this is about.
    flags = ("--plain", "--patience", "120", "--engine-url", f"{vllm.url},{second.url}", "--adapters", adapters)
    run = subprocess.run(
        [sys.executable, "-m", "sidecar", "demo", *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("  ok: ") == 8, run.stdout
    assert [Client(server.url).models() for server in (vllm, second)] == [{}, {}]
    assert list(tmp_path.iterdir()) == []
