"""Network namespaces that a test owns: held by a file descriptor, gone with the process, entered by one thread.

EndpointSlices refuse loopback addresses, so a control plane whose pods are local processes needs addresses of its own.
A namespace keeps the usual ones too (127.0.0.1), nothing leaves it, and several test runs don't collide.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def die_with_parent() -> None:
    """For preexec_fn: the child is killed when the thread that started it ends, so only long-lived threads may fork."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl")


class NetworkNamespace:
    """One network namespace with its loopback up. Close it to let it go."""

    def __init__(self) -> None:
        self.fd = -1
        self._in_thread(self._unshare)

    def _unshare(self) -> None:
        _check(_libc.unshare(CLONE_NEWNET), "unshare")
        self.fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    @staticmethod
    def _in_thread(work: Callable[[], None]) -> None:
        failure: list[Exception] = []

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 -- raised again in the caller's thread
                failure.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        if failure:
            raise failure[0]

    @property
    def path(self) -> str:
        """A path to the namespace that this process's children can open, for nsenter and ip."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, what this thread opens and starts is in the namespace: sockets, threads, processes."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(self.fd, CLONE_NEWNET), "setns")
            yield
        finally:
            _check(_libc.setns(before, CLONE_NEWNET), "setns")
            os.close(before)

    def run(self, command: Sequence[str]) -> str:
        """Run a command inside to its end; its output. Raises CalledProcessError."""
        with self.entered():
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def close(self) -> None:
        """Let go of the namespace; it ends with the last process inside."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
