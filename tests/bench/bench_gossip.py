"""What gossip costs one worker: bytes, CPU and memory with 10, 100 and 1,000 records of 10 adapters each.

`python -m tests.bench.bench_gossip [--record] [--seconds 30]`. The worker's gossip runs in a process of its own with
real sockets, HTTP server included. The pool is this process: it answers for every other worker as that worker would,
and probes the worker as often as a pool of that size does (one probe each period, whatever the size).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from aiohttp import web

from sidecar.core.keyring import INSECURE, Keyring
from sidecar.core.liveness import Timing
from sidecar.core.members import Member as Known
from sidecar.core.members import Members
from sidecar.core.messages import (
    EntryItem,
    Message,
    SyncAnswer,
    decode_message,
    decode_request,
    encode,
)
from sidecar.core.replica import Replica
from sidecar.core.speaker import SYNC, Outcome
from sidecar.core.wire import AUTH_HEADER, Dropped, Gate, HttpAnswer, HttpRequest, Kind, Opened, Party, body_hash
from sidecar.edges.peer_sync import HttpSync, routes
from sidecar.edges.udp import UdpEndpoint
from sidecar.loops.gossip import GossipPeers
from sidecar.model import Entry, Head, Member, Record, State
from tests.bench.results import record, table

HEADING = "Gossip"
COMMAND = "python -m tests.bench.bench_gossip --record"
ADAPTERS = 10
POOL = "pool"
WORKER = Party("uid-of-the-worker", 1)


def record_of(number: int, address: str) -> Record:
    """A worker's record as a real one looks: ten of a thousand adapters loaded."""
    chosen = random.Random(number).sample(range(1000), ADAPTERS)
    entries = tuple(
        Entry(
            adapter=f"models/customer-{n:04}-v2",
            state=State.LOADED,
            revision="sha256:" + f"{n:064x}",
            served_name=f"customer-{n:04}",
            since=1_760_000_000.0 + n,
        )
        for n in chosen
    )
    labels = {"app": "vllm", "pod-template-hash": "6d5f8c7b9", "topology": "a"}
    head = Head(
        uid=f"7b2d1f0a-52a8-4a3e-9c1d-{number:012}",
        name=f"llama-7d9c8b6f5-{number:05}",
        pool=POOL,
        address=address,
        zone=f"zone-{number % 3}",
        labels=labels,
        base_models=("meta-llama/Llama-3.1-8B-Instruct",),
        capacity=32,
        engine="vllm 0.32.0 12345",
        engine_up=True,
        engine_seen=True,
    )
    return Record(head=head, entries=entries)


class Puppets:
    """Everyone in the pool but the worker that is measured, which is `party` (its generation may be learned)."""

    def __init__(self, count: int, *, pool: str = POOL, keys: Keyring = INSECURE, party: Party = WORKER) -> None:
        self.count, self.pool, self.keys, self.party = count, pool, keys, party
        self.bytes_in = self.bytes_out = self.datagrams = self.http = self.calls = 0
        self.gates: dict[str, Gate] = {}
        self.members = Members(Known(Replica(party.uid, 0), 0.0), random.Random(1))
        self.names: list[str] = []
        self.udp: UdpEndpoint
        self.worker = ""
        self.found = asyncio.Event()
        self.news = 0

    async def start(self) -> str:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/peer/sync", self.sync)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        port = self.runner.addresses[0][1]
        self.udp = UdpEndpoint("127.0.0.1", port)
        await self.udp.open(self.datagram)
        for number in range(self.count):
            self.join(record_of(number, self.udp.address))
        return self.udp.address

    def join(self, found: Record) -> None:
        """One more worker of the pool."""
        replica = Replica(found.head.uid, 1)
        replica.write(found)
        self.members.add(Known(replica, 0.0))
        self.gates[found.head.uid] = Gate(Party(found.head.uid, 1), self.pool, self.keys, int(time.time() * 1e6))
        self.names.append(found.head.uid)

    async def stop(self) -> None:
        await self.udp.close()
        await self.runner.cleanup()

    def reset(self) -> None:
        self.bytes_in = self.bytes_out = self.datagrams = self.http = self.calls = 0

    def ping(self) -> None:
        """One probe of the worker, by whoever's turn it is."""
        self._say(random.choice(self.names), self.party, Kind.PING, 1)

    def change(self) -> None:
        """One worker changes one adapter, and tells the worker as the rumour passes by."""
        uid = random.choice(self.names)
        member = self.members.by_uid[uid]
        before = member.replica.version
        found = member.replica.record()
        assert found is not None
        self.news += 1
        entry = msgspec.structs.replace(found.entries[0], message=f"change {self.news}")
        member.replica.write(msgspec.structs.replace(found, entries=(entry, *found.entries[1:])))
        self.members.touch(member)
        delta = member.replica.delta(before)
        assert all(isinstance(item, EntryItem) for item in delta.items)
        self._say(uid, self.party, Kind.GOSSIP, 0, (delta,))

    def _say(self, uid: str, to: Party, kind: Kind, seq: int, deltas: Sequence[object] = ()) -> None:
        claims = (self.members.by_uid[uid].claim(),)
        body = encode(Message(seq, None, claims, tuple(deltas)))  # type: ignore[arg-type]
        data = self.gates[uid].seal(kind, to, body, time.time())
        self.bytes_in += len(data)
        self.datagrams += 1
        self.send(uid, data)

    def send(self, uid: str, data: bytes) -> None:
        """A datagram of that worker to the one that is measured."""
        self.udp.send(self.worker, data)

    def datagram(self, data: bytes, source: str) -> None:
        self.bytes_out += len(data)
        self.datagrams += 1
        # To whom it is addressed stands in the envelope; the gates only say whether it is them.
        envelope = msgspec.msgpack.decode(data[26:])
        opened = self.gates[envelope[3]].open(data, time.time())
        if isinstance(opened, Dropped):
            return
        self.party = opened.sender
        message = decode_message(opened.body)
        if opened.kind is Kind.PING and message is not None:
            self.worker = source
            self.found.set()
            self._say(envelope[3], opened.sender, Kind.ACK, message.seq)

    async def sync(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.http += len(body) + 900  # headers of both ways
        self.calls += 1
        header = request.headers[AUTH_HEADER]
        for uid, gate in self._addressed(header):
            opened = gate.check_request(header, HttpRequest(method="POST", path=SYNC.path), time.time())
            if isinstance(opened, Opened):
                answer = self._answer(uid, opened, gate, body)
                self.http += len(answer.body)
                return web.Response(body=answer.body, headers={AUTH_HEADER: answer.header})
        return web.Response(status=403)

    def _addressed(self, header: str) -> list[tuple[str, Gate]]:
        to = msgspec.msgpack.decode(base64.urlsafe_b64decode(header)[26:])[3]
        return [(to, self.gates[to])] if to else list(self.gates.items())[:1]

    def _answer(self, uid: str, opened: Opened, gate: Gate, body: bytes) -> Outcome:
        asked = decode_request(body)
        assert asked is not None
        worker = asked.claims[0]
        # The worker's own share of the checksums, as it says itself.
        me = self.members.me
        me.generation, me.incarnation, me.replica.generation = worker.generation, worker.incarnation, worker.generation
        me.replica.version = worker.version
        self.members.touch(me)
        buckets = tuple(n for n, theirs in enumerate(asked.sums) if theirs != self.members.sums[n])
        claims = [self.members.by_uid[uid].claim()]
        claims += [self.members.by_uid[found].claim() for n in buckets for found in self.members.buckets[n]]
        deltas = tuple(self.members.by_uid[want.uid].replica.delta(want.version) for want in asked.wants)
        data = encode(SyncAnswer(claims=tuple(claims), buckets=buckets, deltas=deltas))
        header = gate.sign_answer(opened, HttpAnswer(status=200), body_hash(data), time.time())
        return Outcome(status=200, header=header, body=data)


async def agent(pool: str) -> None:
    """The measured process: gossip and its HTTP server, nothing else of an agent."""
    later: list[GossipPeers] = []

    class Side:
        def admit(self, header: str, request: HttpRequest) -> Opened | Outcome:
            return later[0].admit(header, request)

        def answer(self, opened: Opened, body: bytes) -> Outcome:
            return later[0].answer(opened, body)

    app = web.Application()
    app.add_routes(routes(Side()))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    peers = GossipPeers(
        uid=WORKER.uid,
        generation=WORKER.generation,
        pool=POOL,
        keys=INSECURE,
        datagrams=UdpEndpoint("127.0.0.1", port),
        client=HttpSync(),
        members=lambda: (Member(name="pool", address=pool),),
        clock=time.time,
    )
    later.append(peers)
    head = msgspec.structs.replace(record_of(10**6, f"127.0.0.1:{port}").head, uid=WORKER.uid)
    peers.announce(Record(head=head))

    def changed() -> None:
        known = len(peers.speaker.gossip.members.by_uid)
        if known not in shown:
            shown.add(known)
            print(known, flush=True)

    shown: set[int] = set()
    await peers.run(changed)


def status(pid: int, field: str) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(count: int, seconds: float) -> list[list[str]]:
    puppets = Puppets(count)
    address = await puppets.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.bench_gossip", "--agent", address, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    rows: list[list[str]] = []
    try:
        started = time.monotonic()
        while int(await process.stdout.readline() or 0) < count:
            pass
        joined = time.monotonic() - started
        await puppets.found.wait()
        await asyncio.sleep(20)  # the first syncs follow each other more closely
        for label, changes in (("at rest", 0.0), ("10 changes a second", 10.0)):
            puppets.reset()
            before = cpu(process.pid)
            await run(puppets, seconds, changes)
            rows.append(
                [
                    f"{count:,} records, {label}",
                    f"{puppets.bytes_in / seconds:,.0f}",
                    f"{puppets.bytes_out / seconds:,.0f}",
                    f"{puppets.datagrams / seconds:.1f}",
                    f"{puppets.http / seconds:,.0f}",
                    f"{100 * (cpu(process.pid) - before) / seconds:.2f}",
                    f"{status(process.pid, 'VmRSS'):.1f}",
                    f"{joined:.2f}",
                ]
            )
    finally:
        process.kill()
        await process.wait()
        await puppets.stop()
    return rows


async def run(puppets: Puppets, seconds: float, changes: float) -> None:
    """Probe the worker as a pool does, with that many changes a second somewhere in the pool."""
    end = time.monotonic() + seconds
    period = Timing().period
    next_ping = next_change = time.monotonic()
    while (now := time.monotonic()) < end:
        if now >= next_ping:
            next_ping += period
            puppets.ping()
        if changes and now >= next_change:
            next_change += 1 / changes
            puppets.change()
        await asyncio.sleep(0.02)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--agent", default="")
    options = parser.parse_args()
    if options.agent:
        await agent(options.agent)
        return
    rows: list[list[str]] = []
    for count in (10, 100, 1000):
        rows += await measure(count, options.seconds)
    head = ["pool", "in B/s", "out B/s", "datagrams/s", "HTTP B/s", "CPU %", "VmRSS MiB", "joined after s"]
    text = (
        f"{table(head, rows)}\n\n"
        f"UDP payloads and HTTP bodies with headers, of one worker over {options.seconds:.0f} s; {ADAPTERS} adapters\n"
        "in each record; CPU of one core. Memory is of a process with the gossip and its HTTP server alone.\n"
        "Joined: from the start of the process until it had every record."
    )
    print(text)
    if options.record:
        record(HEADING, COMMAND, text)


if __name__ == "__main__":
    asyncio.run(main())
