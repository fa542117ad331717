"""Resident memory and idle CPU of one agent on Kubernetes that uses S3: 1,000 adapters, 1,000 peers.

`python -m tests.bench.bench_memory_kubernetes [--record] [--peers 1000] [--adapters 1000]`. A real control plane
(KUBEBUILDER_ASSETS, root) holds the adapters and the EndpointSlices; the agent is a real process with a pod's token;
its peers are one server with an address for each, which answers /v1/record as if what they should hold were loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from sidecar.core.placement import Worker, place
from sidecar.edges.sample_adapter import write_adapter
from sidecar.edges.stub_engine import StubEngine, StubOptions
from sidecar.model import Adapter, Distribution, Entry, Head, Record, Source, State
from tests.bench.results import record, table
from tests.kubernetes.controlplane import API_HOST, API_PORT, ControlPlane
from tests.kubernetes.workers import ACCOUNT, ADAPTERS, POOL, make_pod, prepare
from tests.s3server import S3Server

HEADING = "Memory of the agent on Kubernetes"
COMMAND = "python -m tests.bench.bench_memory_kubernetes --record"
BUDGET_MIB = 110
REST_SECONDS = 30.0
PATIENCE = 180.0
OWN = "w-0"
OWN_IP = "10.244.1.1"
BUCKET, PREFIX = "adapters", "one"
NAMESPACE = "bench"
REPLICAS = 3
SLICE = 100
REVISION = "sha256:" + "ab" * 32

# A private /run holds the pod's account, as the kubelet would mount it.
IN_POD = """
mount -t tmpfs none /run
mkdir -p /run/secrets/kubernetes.io
cp -r "$1" /run/secrets/kubernetes.io/serviceaccount
shift
exec "$@"
"""


def address(number: int) -> str:
    """The address of a peer."""
    return f"10.244.{16 + number // 250}.{1 + number % 250}"


def resource(number: int) -> dict[str, Any]:
    """One Adapter of the bench."""
    return {
        "apiVersion": "lora-sidecar.io/v1alpha1",
        "kind": "Adapter",
        "metadata": {"name": f"adapter-{number:04}"},
        "spec": {
            "baseModel": "base",
            "source": {"uri": f"s3://{BUCKET}/{PREFIX}"},
            "distribution": {"strategy": "fixed", "replicas": REPLICAS},
        },
    }


def records(adapters: int, peers: int) -> list[Record]:
    """What the peers say: what they should hold is loaded, and which files were decided on."""
    workers = [Worker(name=OWN, base_models=("base",), room=50)]
    workers += [Worker(name=f"p-{i:04}", base_models=("base",), room=50) for i in range(peers)]
    wanted = [
        Adapter(
            namespace=NAMESPACE,
            name=f"adapter-{n:04}",
            base_model="base",
            served_name=f"adapter-{n:04}",
            source=Source(uri=f"s3://{BUCKET}/{PREFIX}"),
            distribution=Distribution(strategy="fixed", replicas=REPLICAS),
        )
        for n in range(adapters)
    ]
    held: dict[str, list[Entry]] = {}
    for key, assignment in place(wanted, workers).items():
        for name in assignment.targets:
            entry = Entry(
                adapter=key, state=State.LOADED, revision=REVISION, served_name=key.partition("/")[2], since=1.0
            )
            held.setdefault(name, []).append(entry)
    return [
        Record(
            head=Head(
                uid=f"00000000-0000-4000-8000-{i:012}",
                name=f"p-{i:04}",
                pool=POOL,
                generation=1,
                address=f"{address(i)}:8790",
                zone=f"zone-{i % 3}",
                labels={"app": "vllm", "gpu": "a100", "pod-template-hash": "5d9c7b6f4d"},
                base_models=("base",),
                capacity=50,
                engine="1800000000.0",
                engine_version="0.32.0",
                engine_up=True,
                engine_seen=True,
                sidecar="0.1.0",
            ),
            version=1,
            entries=tuple(held.get(f"p-{i:04}", ())),
        )
        for i in range(peers)
    ]


@contextlib.asynccontextmanager
async def peers_answering(told: list[Record]) -> AsyncIterator[None]:
    """One server on the addresses of all peers."""
    bodies = {address(i): msgspec.json.encode(r) for i, r in enumerate(told)}

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        here = request.transport.get_extra_info("sockname")[0]
        if request.headers.get("If-None-Match") == '"1"':
            return web.Response(status=304, headers={"ETag": '"1"'})
        return web.Response(body=bodies[here], content_type="application/json", headers={"ETag": '"1"'})

    app = web.Application()
    app.router.add_get("/v1/record", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    server = await asyncio.get_running_loop().create_server(runner.server, list(bodies), 8790)
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()


def fill(plane: ControlPlane, told: list[Record], adapters: int) -> None:
    """Adapters, and slices that list the peers as the endpoints of the pool's Service."""
    for number in range(adapters):
        plane.post(ADAPTERS.format(NAMESPACE), resource(number))
    for start in range(0, len(told), SLICE):
        endpoints = [
            {
                "addresses": [address(start + i)],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": r.head.name, "uid": r.head.uid},
                "nodeName": f"node-{(start + i) % 100}",
                "zone": r.head.zone,
            }
            for i, r in enumerate(told[start : start + SLICE])
        ]
        body = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"bench-{start}", "labels": {"kubernetes.io/service-name": POOL}},
            "addressType": "IPv4",
            "endpoints": endpoints,
        }
        plane.post(f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", body)


class Process:
    """The agent's process, read from /proc."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def mib(self, field: str) -> float:
        """A field of /proc/<pid>/status."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{field}:\s*(\d+) kB", text)
        return int(found[1]) / 1024 if found else 0.0

    @property
    def cpu_seconds(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def agent(plane: ControlPlane, scratch: Path, environment: Mapping[str, str]) -> AsyncIterator[Process]:
    """A real `lora-sidecar run` with a pod's token; its log is at scratch/log."""
    pod = make_pod(plane, NAMESPACE, OWN, OWN_IP, engine=["--model", "base", "--max-loras=50"])
    account = scratch / "account"
    account.mkdir()
    (account / "token").write_text(plane.pod_token(NAMESPACE, ACCOUNT, OWN, pod["metadata"]["uid"]))
    (account / "ca.crt").write_bytes(plane.ca_file.read_bytes())
    image = {"MALLOC_ARENA_MAX": "2"}
    kubernetes = {"KUBERNETES_SERVICE_HOST": API_HOST, "KUBERNETES_SERVICE_PORT": str(API_PORT)}
    # As the image sets it: each thread's arena would keep what was once used in it.
    # Bytecode as an installed package has it: compiling at each start costs memory that then stays.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with (scratch / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *("unshare", "-m", "--propagation", "private", "sh", "-c", IN_POD, "sh", str(account)),
            *(sys.executable, "-m", "sidecar", "run", "--backend=kubernetes"),
            *(f"--listen={OWN_IP}:8790", f"--adapters-dir={scratch / 'adapters'}"),
            stdout=log,
            stderr=log,
            env=inherited | dict(environment) | image | kubernetes,
        )
    try:
        yield Process(process)
    finally:
        process.kill()
        await process.wait()


async def measure(plane: ControlPlane, peers: int, adapters: int, scratch: Path) -> str:
    told = records(adapters, peers)
    prepare(plane, NAMESPACE)
    fill(plane, told, adapters)
    with S3Server() as s3:
        for path in sorted(write_adapter(scratch / "adapter", "bench", base="base").iterdir()):
            s3.put(BUCKET, f"{PREFIX}/{path.name}", path.read_bytes())
        async with (
            peers_answering(told),
            StubEngine(StubOptions(model="base", max_loras=50), port=8000) as engine,
            agent(plane, scratch, s3.env) as process,
        ):
            began = time.monotonic()
            await _until(process, lambda: bool(engine.server.loras), "an adapter from S3 is loaded")
            loaded_after = time.monotonic() - began
            await asyncio.sleep(REST_SECONDS)
            before = process.cpu_seconds
            await asyncio.sleep(REST_SECONDS)
            idle = 100 * (process.cpu_seconds - before) / REST_SECONDS
            rows = [
                ["resident (VmRSS), at rest", f"{process.mib('VmRSS'):.1f}"],
                ["of that, its own (RssAnon: not shared with files)", f"{process.mib('RssAnon'):.1f}"],
                ["its peak (VmHWM)", f"{process.mib('VmHWM'):.1f}"],
            ]
            loaded = len(engine.server.loras)
    return "\n".join(
        [
            table([f"{adapters:,} adapters, {peers:,} peers, {loaded} loaded here from S3", "MiB"], rows),
            "",
            f"Budget: {BUDGET_MIB} MiB. The first was loaded after {loaded_after:.1f} s. CPU at rest, asking each peer "
            f"every five seconds (no gossip): {idle:.1f} % of a core, over {REST_SECONDS:.0f} s.",
        ]
    )


async def _until(process: Process, condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process.process.returncode is not None or time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {PATIENCE:.0f} s, or the agent has ended; see its log")
        await asyncio.sleep(0.2)


@contextlib.contextmanager
def control_plane(scratch: Path) -> Iterator[ControlPlane]:
    """A control plane with the custom resource; inside, this process is in its network namespace."""
    plane = ControlPlane(Path(os.environ["KUBEBUILDER_ASSETS"]), scratch)
    try:
        plane.start()
        plane.kubectl("apply", "-k", str(Path(__file__).parents[2] / "crds"))
        plane.kubectl("wait", "--for=condition=Established", "crd/adapters.lora-sidecar.io", "--timeout=30s")
        plane.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        with plane.netns.entered():
            yield plane
    finally:
        plane.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the section of RESULTS.md")
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        with control_plane(scratch) as plane:
            try:
                body = asyncio.run(measure(plane, args.peers, args.adapters, scratch))
            except (TimeoutError, subprocess.CalledProcessError):
                print((scratch / "log").read_text()[-4000:], file=sys.stderr)
                raise
    print(body)
    if args.record:
        record(HEADING, COMMAND, body)


if __name__ == "__main__":
    main()
