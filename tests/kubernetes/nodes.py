"""The tests' nodes: the small kubelet in a process of its own, and what a test asks of it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.kubernetes.controlplane import ADMIN, API_URL, ControlPlane, Json, wait_until
from tests.kubernetes.netns import die_with_parent

# Each kubelet of a run has so many addresses of the pod network for itself.
ADDRESSES = 2048
ZONES = {"node-a": "zone-a", "node-b": "zone-b", "node-c": "zone-c"}


class Nodes:
    """Nodes of the cluster whose pods are processes on this machine."""

    _blocks = itertools.count()

    def __init__(self, plane: ControlPlane, directory: Path, zones: dict[str, str] | None = None) -> None:
        self.plane = plane
        self.directory = directory
        self._log = (directory / "kubelet.log").open("ab")
        with plane.netns.entered():
            self._process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "tests.kubernetes.kubelet",
                        "--server",
                        API_URL,
                        "--ca",
                        str(plane.ca_file),
                    ),
                    *("--token", ADMIN, "--directory", str(directory)),
                    *("--first-address", str(1 + ADDRESSES * next(self._blocks))),
                    *(f"{name}={zone}" for name, zone in (zones or ZONES).items()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
                preexec_fn=die_with_parent,
            )
        assert self._answer() == "ready", self.log_of_kubelet()
        for name in zones or ZONES:
            wait_until(lambda name=name: self._untainted(name), f"{name} takes pods")

    def _untainted(self, name: str) -> bool:
        return not self.plane.get(f"/api/v1/nodes/{name}")["spec"].get("taints")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def stop(self) -> None:
        """End the kubelet; every process of its pods ends with it."""
        self._process.kill()
        self._process.wait(timeout=30)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            pipe.close()

    def kill_node(self, name: str) -> None:
        """A node dies: its processes end, its heartbeats too, and nobody tells the API server."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"stop": name}) + "\n")
        self._process.stdin.flush()
        assert self._answer() == f"stopped {name}", self.log_of_kubelet()

    def pid(self, namespace: str, pod: str, container: str) -> int:
        """The container's first process, which leads a process group; 0 while there is none."""
        try:
            return int((self._home(namespace, pod, container) / "pid").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def kill(self, namespace: str, pod: str, container: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal all processes of a container."""
        os.killpg(self.pid(namespace, pod, container), number)

    def log(self, namespace: str, pod: str, container: str) -> str:
        """What a container has printed, over all its restarts; "" before its first start."""
        try:
            return (self._home(namespace, pod, container) / "log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def log_of_kubelet(self) -> str:
        """What the kubelet itself has printed."""
        return (self.directory / "kubelet.log").read_text(errors="replace")

    def _home(self, namespace: str, pod: str, container: str) -> Path:
        return self.directory / f"{namespace}_{pod}" / container

    def pods(self, namespace: str, selector: str = "") -> list[Json]:
        """The pods of a namespace."""
        query = f"?labelSelector={selector}" if selector else ""
        return list(self.plane.get(f"/api/v1/namespaces/{namespace}/pods{query}")["items"])


def is_ready(pod: Json) -> bool:
    """Whether the pod's Ready condition is true."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
