"""The kubelet's process: its nodes, and a pod task for every pod that is bound to one of them.

Commands come as JSON lines on stdin: {"stop": NODE} kills a node (its processes and its heartbeats) without a word to
the API server. The end of stdin ends everything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from tests.kubernetes.kubelet.api import Api
from tests.kubernetes.kubelet.container import now
from tests.kubernetes.kubelet.network import PodNetwork, forward
from tests.kubernetes.kubelet.pod import Pod

Json = dict[str, Any]
HEARTBEAT_SECONDS = 10.0
CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "250", "ephemeral-storage": "1Ti", "nvidia.com/gpu": "64"}


class Kubelet:
    """All nodes of one test run."""

    def __init__(self, api: Api, nodes: dict[str, str], directory: Path, server: str) -> None:
        self.api = api
        self.nodes = nodes
        self.directory = directory
        self.pods: dict[str, Pod] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        host, port = server.removeprefix("https://").split(":")
        self.variables = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    async def run(self) -> None:
        """Until stdin ends."""
        forward()
        for name, zone in self.nodes.items():
            await self._register(name, zone)
        print("ready", flush=True)
        work = [asyncio.create_task(self._heartbeats()), asyncio.create_task(self._watch())]
        await self._commands()
        for task in work + list(self.tasks.values()):
            task.cancel()
        for pod in self.pods.values():
            pod.kill()

    async def _register(self, name: str, zone: str) -> None:
        labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone, "kubernetes.io/os": "linux"}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        await self.api.apply(f"/api/v1/nodes/{name}", node)
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "ready",
            "lastHeartbeatTime": now(),
            "lastTransitionTime": now(),
        }
        status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [condition]}
        await self.api.merge(f"/api/v1/nodes/{name}/status", {"status": status})

    async def _heartbeats(self) -> None:
        while True:
            for name in list(self.nodes):
                lease = {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": name},
                    "spec": {
                        "holderIdentity": name,
                        "leaseDurationSeconds": 40,
                        "renewTime": now().replace("Z", ".000000Z"),
                    },
                }
                try:
                    await self.api.apply(
                        f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}", lease
                    )
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    print(f"no heartbeat of {name}: {error!r}", file=sys.stderr)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _watch(self) -> None:
        async for kind, found in self.api.watch("/api/v1/pods"):
            if kind == "LISTED":
                present = {pod["metadata"]["uid"] for pod in found["items"]}
                for uid in set(self.pods) - present:
                    self.pods[uid].removed()
                for pod in found["items"]:
                    self._seen(pod)
            elif kind == "DELETED":
                if found["metadata"]["uid"] in self.pods:
                    self.pods[found["metadata"]["uid"]].removed()
            elif kind in ("ADDED", "MODIFIED"):
                self._seen(found)

    def _seen(self, found: Json) -> None:
        uid, node = found["metadata"]["uid"], found["spec"].get("nodeName")
        if uid in self.pods:
            self.pods[uid].update(found)
        elif node in self.nodes and found.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            pod = Pod(self.api, found, self.directory, self.variables)
            self.pods[uid] = pod
            pod.update(found)
            self.tasks[uid] = asyncio.create_task(pod.run())
            self.tasks[uid].add_done_callback(lambda task: self._finished(uid, task))

    def _finished(self, uid: str, task: asyncio.Task[None]) -> None:
        self.pods.pop(uid, None)
        self.tasks.pop(uid, None)
        if not task.cancelled() and task.exception() is not None:
            print(f"pod {uid} failed here: {task.exception()!r}", file=sys.stderr)

    async def _commands(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            name = json.loads(line)["stop"]
            self.nodes.pop(name, None)
            for uid, pod in list(self.pods.items()):
                if pod.node == name:
                    self.tasks[uid].cancel()
                    pod.kill()
            print(f"stopped {name}", flush=True)


async def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--ca", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--first-address", type=int, default=1, help="where in the pod network to begin")
    parser.add_argument("nodes", nargs="+", help="NAME=ZONE")
    args = parser.parse_args()
    PodNetwork.following = args.first_address
    nodes = dict(node.split("=") for node in args.nodes)
    async with Api(args.server, args.ca, args.token) as api:
        await Kubelet(api, nodes, args.directory, args.server).run()


asyncio.run(main())
