"""A real vLLM API server on a free port, in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.ports import free_port
from tests.vllm.model import CONTEXT

# On busy cores: 25 s on quiet ones.
START_SECONDS = 420
STOP_SECONDS = 20


class VllmServer:
    """`python`: the environment's, from tests/vllm/install. `arguments` come after those that make it small.

    It runs as three processes, and killing the first with -9 leaves the others: stop and kill take the whole group.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        log: Path,
        *arguments: str,
        runtime_updating: bool = True,
        dev_mode: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [str(Path(python).parent / "vllm"), "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--served-model-name", "tiny", "alias"]
        # A small cache, no compilation: 25 s to start, 1.5 GB.
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", "8"]
        command += ["--max-num-batched-tokens", "512", "--kv-cache-memory-bytes", "67108864"]
        command += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16"]
        self.command = [*command, *arguments]
        self.env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self.env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        # One thread, on any core: several that wait for each other on busy cores are 25 times slower.
        self.env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        for name in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE"):
            self.env.pop(name, None)
        if runtime_updating:
            self.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if dev_mode:
            self.env["VLLM_SERVER_DEV_MODE"] = "1"
        self.env |= env or {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        """Start it; with `wait` until /health answers. Raises RuntimeError with the end of its log."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until /health answers 200."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.healthy():
                return
            if self.exited() is not None:
                break
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"vLLM doesn't start: {' '.join(self.command)}\n{self.tail()}")

    def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def exited(self) -> int | None:
        """The exit status of the first process (negative: a signal), None while it runs.

        It isn't reaped before its group is gone: a process id that is free again may lead somebody else's group.
        """
        if self._process is None or self._process.returncode is not None:
            return self._process.returncode if self._process else 0
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-8000:].decode("utf-8", "replace")

    def signal(self, number: int) -> None:
        """Send a signal to the whole group, which has a member at least until its leader is reaped."""
        assert self._process is not None
        assert self._process.returncode is None
        os.killpg(self._process.pid, number)

    def workers(self) -> list[int]:
        """Process ids of the engine and its worker: all of the group but the API server."""
        assert self._process is not None
        leader = self._process.pid
        return [pid for pid in _group(leader) if pid != leader]

    def kill(self) -> None:
        """kill -9 of every process."""
        self.signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for what is left. Does nothing if it never ran, or is over."""
        if self._process is None or self._process.returncode is not None:
            return
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.signal(number)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and _group(self._process.pid):
            time.sleep(0.05)
        self.signal(signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + STOP_SECONDS
        while _group(self._process.pid):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of {self.url} outlive SIGKILL: {_group(self._process.pid)}")
            time.sleep(0.05)
        self._process.wait(STOP_SECONDS)


def _group(leader: int) -> list[int]:
    """Living processes of the group that `leader` leads (or led)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found
