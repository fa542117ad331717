"""Resident memory and idle CPU of one agent on Kubernetes that uses S3: 1,000 adapters, 1,000 peers.

`python -m tests.bench.bench_memory_kubernetes [--record] [--peers 1000] [--adapters 1000]`. A real control plane
(KUBEBUILDER_ASSETS, root) holds the adapters and the EndpointSlices; the agent is a real process with a pod's token;
its peers are one process with an address for each, which answers as if what they should hold were loaded: first an
agent without a gossip key asks them for their records, then one with a key gossips with them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from sidecar.core.keyring import parse_keys
from sidecar.core.placement import Worker, place
from sidecar.edges.sample_adapter import write_adapter
from sidecar.edges.stub_engine import StubEngine, StubOptions
from sidecar.model import Adapter, Distribution, Entry, Head, Record, Source, State
from tests.bench.crowd import Crowd
from tests.bench.results import record, table
from tests.kubernetes.controlplane import API_HOST, API_PORT, ControlPlane
from tests.kubernetes.workers import ACCOUNT, ADAPTERS, POOL, make_pod, prepare
from tests.s3server import S3Server

HEADING = "Memory of the agent on Kubernetes"
COMMAND = "python -m tests.bench.bench_memory_kubernetes --record"
BUDGET_MIB = 110
BUDGET_IDLE = 1
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


def answering(told: list[Record]) -> web.Application:
    """Answers /v1/record on the addresses of all peers."""
    bodies = {address(i): msgspec.json.encode(r) for i, r in enumerate(told)}

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        here = request.transport.get_extra_info("sockname")[0]
        if request.headers.get("If-None-Match") == '"1"':
            return web.Response(status=304, headers={"ETag": '"1"'})
        return web.Response(body=bodies[here], content_type="application/json", headers={"ETag": '"1"'})

    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_get("/v1/record", answer)
    return app


@contextlib.asynccontextmanager
async def peers_answering(told: list[Record]) -> AsyncIterator[None]:
    """One server on the addresses of all peers."""
    runner = web.AppRunner(answering(told), access_log=None)
    await runner.setup()
    assert runner.server is not None
    hosts = [address(i) for i in range(len(told))]
    server = await asyncio.get_running_loop().create_server(runner.server, hosts, 8790)
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
async def agent(
    plane: ControlPlane, scratch: Path, uid: str, environment: Mapping[str, str], *options: str
) -> AsyncIterator[Process]:
    """A real `lora-sidecar run` with the token of the pod with that uid; its log is at scratch/log."""
    account = scratch / "account"
    account.mkdir()
    (account / "token").write_text(plane.pod_token(NAMESPACE, ACCOUNT, OWN, uid))
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
            *(f"--listen={OWN_IP}:8790", f"--adapters-dir={scratch / 'adapters'}", *options),
            stdout=log,
            stderr=log,
            env=inherited | dict(environment) | image | kubernetes,
        )
    try:
        yield Process(process)
    finally:
        process.kill()
        await process.wait()


@dataclass(frozen=True)
class Measured:
    """MiB, seconds until the first adapter was loaded, and the share of a core at rest in percent."""

    resident: float
    own: float
    peak: float
    loaded_after: float
    idle: float
    loaded: int


async def measure(plane: ControlPlane, peers: int, adapters: int, scratch: Path) -> str:
    told = records(adapters, peers)
    prepare(plane, NAMESPACE)
    fill(plane, told, adapters)
    pod = make_pod(plane, NAMESPACE, OWN, OWN_IP, engine=["--model", "base", "--max-loras=50"])
    uid = str(pod["metadata"]["uid"])
    with S3Server() as s3:
        for path in sorted(write_adapter(scratch / "adapter", "bench", base="base").iterdir()):
            s3.put(BUCKET, f"{PREFIX}/{path.name}", path.read_bytes())
        async with peers_answering(told):
            asking = await one(plane, peers, scratch / "asking", uid, s3.env)
        text = secrets.token_hex(32)
        key = scratch / "key"
        key.write_text(text)
        async with Crowd(told, POOL, parse_keys(text), uid).living(answering(told)):
            gossiping = await one(plane, peers, scratch / "gossiping", uid, s3.env, f"--gossip-key-file={key}")
    return said(adapters, peers, asking, gossiping)


async def one(
    plane: ControlPlane, peers: int, scratch: Path, uid: str, environment: Mapping[str, str], *options: str
) -> Measured:
    """One agent, from its start."""
    scratch.mkdir()
    async with (
        StubEngine(StubOptions(model="base", max_loras=50), port=8000) as engine,
        agent(plane, scratch, uid, environment, *options) as process,
    ):
        began = time.monotonic()
        await _until(process, lambda: bool(engine.server.loras), "an adapter from S3 is loaded", scratch / "log")
        loaded_after = time.monotonic() - began
        await asyncio.sleep(REST_SECONDS)
        before = process.cpu_seconds
        await asyncio.sleep(REST_SECONDS)
        measured = Measured(
            resident=process.mib("VmRSS"),
            own=process.mib("RssAnon"),
            peak=process.mib("VmHWM"),
            loaded_after=loaded_after,
            idle=100 * (process.cpu_seconds - before) / REST_SECONDS,
            loaded=len(engine.server.loras),
        )
        await _all_are_known(peers)
        return measured


async def _all_are_known(peers: int) -> None:
    """Last, since the answer to this question takes memory."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{OWN_IP}:8790/v1/peers") as answer:
        rows = (await answer.json())["peers"]
    alive = sum(row["state"] == "alive" for row in rows)
    if alive < peers:
        raise RuntimeError(f"only {alive} of {peers} peers are alive for the agent: {rows[:2]}")


def said(adapters: int, peers: int, asking: Measured, gossiping: Measured) -> str:
    both = (asking, gossiping)
    rows = [
        ["resident (VmRSS), at rest, MiB", *(f"{m.resident:.1f}" for m in both), str(BUDGET_MIB)],
        ["of that, its own (RssAnon: not shared with files), MiB", *(f"{m.own:.1f}" for m in both), ""],
        ["its peak (VmHWM), MiB", *(f"{m.peak:.1f}" for m in both), ""],
        [f"CPU at rest over {REST_SECONDS:.0f} s, % of a core", *(f"{m.idle:.2f}" for m in both), str(BUDGET_IDLE)],
        ["started -> the first adapter loaded, s", *(f"{m.loaded_after:.1f}" for m in both), ""],
    ]
    head = [
        f"{adapters:,} adapters, {peers:,} peers, {asking.loaded} loaded here from S3",
        "no key",
        "gossip",
        "budget",
    ]
    return (
        f"{table(head, rows)}\n\n"
        "Without a key each peer is asked every five seconds, a request each; the budget of CPU is for gossip."
    )


async def _until(process: Process, condition: Any, what: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process.process.returncode is not None or time.monotonic() > deadline:
            print(log.read_text()[-4000:], file=sys.stderr)
            raise TimeoutError(f"{what}: not within {PATIENCE:.0f} s, or the agent has ended")
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
            body = asyncio.run(measure(plane, args.peers, args.adapters, scratch))
    print(body)
    if args.record:
        record(HEADING, COMMAND, body)


if __name__ == "__main__":
    main()
