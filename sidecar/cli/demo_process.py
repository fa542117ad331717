"""The demo's child processes: started in groups of their own, ended by their ids, and never left behind."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1
_TERM_SECONDS = 3.0
_KILL_SECONDS = 10.0


class Child:
    """One program with its log. `what` names it for people."""

    def __init__(self, what: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.what = what
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        # Whether it should run: who is not supposed to end and has ended is a fault.
        self.wanted = False

    def start(self) -> None:
        """Start it (again); its output is added to its log. Raises OSError."""
        # Only this process's main thread forks: the signal of the parent's death means that thread's.
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # there are no other threads here
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                process_group=0,  # Ctrl-C is for the demo alone, which then ends the others in order
                preexec_fn=_end_with_parent(),
            )
        self.wanted = True

    @property
    def pid(self) -> int:
        """Its process id; 0 while it doesn't run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @property
    def fate(self) -> str:
        """How it ended, for people; "" while all is as it should be."""
        status = self._process.poll() if self._process is not None else None
        if not self.wanted or status is None:
            return ""
        ended = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.what} {ended}"

    def kill(self) -> None:
        """kill -9, and wait until it is gone (milliseconds)."""
        self.wanted = False
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(_KILL_SECONDS)

    def terminate(self) -> None:
        """Ask it to end."""
        self.wanted = False
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines of its log."""
        try:
            return self.log.read_text(errors="replace").splitlines()[-lines:]
        except FileNotFoundError:
            return []


def end_all(children: Sequence[Child]) -> None:
    """SIGTERM to all, SIGKILL to who is still there after 3 s. Blocks; returns when none is left."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + _TERM_SECONDS
    while time.monotonic() < deadline and any(child.pid for child in children):
        time.sleep(0.02)
    for child in children:
        child.kill()


def _end_with_parent() -> Callable[[], None] | None:
    """What a child does before it becomes the program: ask Linux to end it when this process dies, however it dies."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def before() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return before


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has, TCP and UDP, and that no outgoing connection is given meanwhile."""
    first = _first_ephemeral()
    found: list[int] = []
    for _ in range(1000):
        port = random.randrange(10_000, first) if first > 11_000 else 0
        if (taken := _try_port(port)) and taken not in found:
            found.append(taken)
        if len(found) == count:
            return found
    raise OSError(f"{count} free ports of 127.0.0.1 are needed, and only {len(found)} were found")


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 0


def _try_port(port: int) -> int:
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        try:
            tcp.bind(("127.0.0.1", port))
            number = int(tcp.getsockname()[1])
            udp.bind(("127.0.0.1", number))
        except OSError:
            return 0
        return number
