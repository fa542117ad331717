"""How soon a pool on Kubernetes reacts: a custom resource applied, a hundred at once.

`python -m tests.bench.bench_reaction_kubernetes [--record] [--rounds 50]`. A real control plane (KUBEBUILDER_ASSETS,
root), and on the tests' small kubelet three pods as `lora-sidecar inject` makes them, with stub engines that load at
once; adapters of 34 KB on a real S3 server. The clock runs from just before the request that creates the resource until
the last of the agents has seen its engine list the adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from sidecar.edges.sample_adapter import write_adapter
from tests.bench.results import record, table
from tests.kubernetes.controlplane import ADMIN, API_HOST, API_URL, ControlPlane, wait_until
from tests.kubernetes.manifests import REPOSITORY
from tests.kubernetes.nodes import Nodes
from tests.kubernetes.pool import ADAPTER_LABEL, BASE_MODEL, Origin, Pool
from tests.s3server import S3Server

HEADING = "Reaction of a pool on Kubernetes"
COMMAND = "python -m tests.bench.bench_reaction_kubernetes --record"
WORKERS = 3
AT_ONCE = 100
LABELLED_ROUNDS = 10
BUCKET = "adapters"
Json = dict[str, Any]


class Bench:
    """The pool, and what its agents have logged."""

    def __init__(self, pool: Pool, s3: S3Server, directory: Path) -> None:
        self.pool, self.s3, self.directory = pool, s3, directory
        self.path = f"/apis/lora-sidecar.io/v1alpha1/namespaces/{pool.namespace}/adapters"
        self.names = [pod["metadata"]["name"] for pod in pool.pods()]

    def upload(self, name: str) -> Json:
        """Put an adapter of this name on the S3 server; its resource."""
        made = write_adapter(self.directory / name, name, base=BASE_MODEL)
        for file in made.iterdir():
            self.s3.put(BUCKET, f"{name}/{file.name}", file.read_bytes())
        return {
            "apiVersion": "lora-sidecar.io/v1alpha1",
            "kind": "Adapter",
            "metadata": {"name": name},
            "spec": {"baseModel": BASE_MODEL, "source": {"uri": f"s3://{BUCKET}/{name}"}},
        }

    def loaded(self) -> dict[str, list[float]]:
        """Adapter -> when (epoch seconds) each of the agents that have it saw it loaded."""
        found: dict[str, list[float]] = {}
        for name in self.names:
            for line in self.pool.log(name).splitlines():
                if '"adapter_loaded"' in line:
                    event = json.loads(line)
                    when = datetime.fromisoformat(event["time"]).timestamp()
                    found.setdefault(event["served_name"], []).append(when)
        return found

    def until_loaded(self, wanted: set[str]) -> float:
        """When the last of the agents had loaded the last of `wanted`."""

        def there() -> bool:
            found = self.loaded()
            return all(len(found.get(name, ())) == WORKERS for name in wanted)

        wait_until(there, f"{len(wanted)} adapters on {WORKERS} workers", timeout=60, interval=0.05)
        found = self.loaded()
        return max(max(found[name]) for name in wanted)

    def cpu(self) -> float:
        """CPU seconds of all agents so far."""
        ticks = 0
        for name in self.names:
            pid = self.pool.nodes.pid(self.pool.namespace, name, "lora-sidecar")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def resident(self) -> list[float]:
        """MiB of each agent."""
        found = []
        for name in self.names:
            pid = self.pool.nodes.pid(self.pool.namespace, name, "lora-sidecar")
            (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
            found.append(int(line.split()[1]) / 1024)
        return found


def one_by_one(bench: Bench, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds from applied to loaded on all workers; and of these, to the API server's own answer."""
    seconds, answered = [], []
    for i in range(rounds):
        resource = bench.upload(f"single-{i}")
        time.sleep(0.4 + 0.037 * (i % 17))  # so that rounds don't fall in step with any of the agents' timers
        began = time.time()
        bench.pool.cluster.post(bench.path, resource)
        answered.append(time.time() - began)
        seconds.append(bench.until_loaded({f"single-{i}"}) - began)
    return seconds, answered


def until_labelled(bench: Bench, rounds: int) -> list[float]:
    """Seconds from applied until the label routes to all workers."""
    seconds = []
    for i in range(rounds):
        resource = bench.upload(f"labelled-{i}")
        time.sleep(1.3 + 0.037 * i)  # the pods may be patched again a second after the last time
        began = time.time()
        bench.pool.cluster.post(bench.path, resource)
        selector = f"{ADAPTER_LABEL}/labelled-{i}=loaded"
        wait_until(lambda s=selector: len(bench.pool.pods(s)) == WORKERS, selector, interval=0.02)  # type: ignore[misc]  # mypy can't infer a lambda with a default
        seconds.append(time.time() - began)
    return seconds


async def create(bench: Bench, resources: list[Json]) -> None:
    """Create resources as quickly as the API server takes them."""
    context = ssl.create_default_context(cafile=str(bench.pool.cluster.ca_file))
    headers = {"Authorization": f"Bearer {ADMIN}"}
    connector = aiohttp.TCPConnector(ssl=context, limit=10)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:

        async def one(resource: Json) -> None:
            async with session.post(API_URL + bench.path, json=resource) as response:
                response.raise_for_status()

        await asyncio.gather(*(one(resource) for resource in resources))


def at_once(bench: Bench) -> tuple[float, float, float]:
    """Seconds until a hundred are loaded on all workers, to the last answer of the API server; an agent's CPU."""
    resources = [bench.upload(f"together-{i}") for i in range(AT_ONCE)]
    time.sleep(3)
    cpu, began = bench.cpu(), time.time()
    asyncio.run(create(bench, resources))
    created = time.time() - began
    last = bench.until_loaded({f"together-{i}" for i in range(AT_ONCE)}) - began
    return last, created, (bench.cpu() - cpu) / WORKERS


def measure(bench: Bench, rounds: int) -> str:
    bench.pool.cluster.post(bench.path, bench.upload("first"))  # S3's library is imported with it
    bench.until_loaded({"first"})
    single, answered = one_by_one(bench, rounds)
    labelled = until_labelled(bench, LABELLED_ROUNDS)
    together, created, cpu = at_once(bench)
    resident = bench.resident()
    rows = [
        [f"resource applied -> loaded on all {WORKERS}", *numbers(single), "0.1, p99 0.5"],
        ["of that, the API server's answer", *numbers(answered), ""],
        [f"resource applied -> its label on all {WORKERS} pods", *numbers(labelled), ""],
        [f"{AT_ONCE} at once -> all loaded on all {WORKERS}", *numbers([together]), "3"],
        ["of that, the API server's last answer", *numbers([created]), ""],
    ]
    return "\n".join(
        [
            table(["from -> to", "runs", "p50 s", "p99 s", "worst s", "budget s"], rows),
            "",
            "etcd, the API server, the controllers, the S3 server, three agents and three engines share the machine.",
            f"The hundred cost each agent {cpu:.2f} s of CPU. Resident at the end: {statistics.median(resident):.1f} "
            f"MiB each (most: {max(resident):.1f}), with {AT_ONCE + rounds + LABELLED_ROUNDS + 1} adapters loaded.",
        ]
    )


def numbers(seconds: list[float]) -> list[str]:
    ordered = sorted(seconds)

    def share(percent: int) -> str:
        return f"{ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]:.3f}"

    return [str(len(ordered)), share(50), share(99), f"{ordered[-1]:.3f}"]


@contextlib.contextmanager
def started(root: Path) -> Iterator[Callable[[int], str]]:
    """Everything that runs; gives `measure` for so many rounds."""
    plane = ControlPlane(Path(os.environ["KUBEBUILDER_ASSETS"]), root)
    with contextlib.ExitStack() as stack:
        stack.callback(plane.stop)
        plane.start()
        plane.kubectl("apply", "-k", str(REPOSITORY / "crds"))
        plane.kubectl("wait", "--for=condition=Established", "crd/adapters.lora-sidecar.io", "--timeout=30s")
        nodes = Nodes(plane, root)
        stack.callback(nodes.stop)
        stack.enter_context(plane.netns.entered())
        s3 = stack.enter_context(S3Server(API_HOST))
        origin = Origin()
        stack.callback(origin.close)
        pool = Pool(plane, nodes, "default", origin)
        pool.agent_env = s3.env
        pool.install(WORKERS, capacity=2 * AT_ONCE + 100)
        yield lambda rounds: measure(Bench(pool, s3, root / "adapters"), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the section of RESULTS.md")
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lora-sidecar-bench-") as root, started(Path(root)) as run:
        body = run(args.rounds)
    print(body)
    if args.record:
        record(HEADING, COMMAND, body)


if __name__ == "__main__":
    main()
