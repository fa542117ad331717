"""Gossip over real sockets on loopback: membership, authentication, key rotation, blocked UDP."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from sidecar.core.keyring import Keyring, make_key
from sidecar.core.wire import AUTH_HEADER, Drop, Gate, HttpRequest, Kind, Party
from sidecar.edges.udp import UdpEndpoint
from sidecar.model import Entry, State
from sidecar.ports import ListenFailed, PeerUnreachable
from tests.edges.gossip_nodes import Nodes, know_each_other, running, until


@pytest_asyncio.fixture
async def nodes() -> AsyncIterator[Nodes]:
    async with running() as found:
        yield found


async def start(nodes: Nodes, count: int) -> None:
    for n in range(count):
        await nodes.start(f"worker-{n}")
    await until(know_each_other(nodes), 10)


async def test_agents_find_each_other_and_a_killed_one_is_found_dead(nodes: Nodes) -> None:
    await start(nodes, 5)
    nodes.all[3].load("ns/a")
    await until(lambda: all(node is nodes.all[3] or "ns/a" in node.adapters("worker-3") for node in nodes.all), 5)
    killed = nodes.all[2]
    changes = nodes.all[0].changes
    await killed.kill()
    left = [node for node in nodes.all if node is not killed]
    assert await until(lambda: all("worker-2" not in node.alive for node in left), 10) < 6
    assert nodes.all[0].changes > changes
    assert "worker-2" in nodes.all[0].peers.view(), "the dead are shown"
    assert all(len(node.alive) == 3 for node in left)


async def test_a_peer_is_asked_for_its_record_afresh(nodes: Nodes) -> None:
    await start(nodes, 2)
    one, two = nodes.all
    two.load("ns/fresh")
    record = await one.peers.ask("worker-1")
    assert [entry.adapter for entry in record.entries] == ["ns/fresh"]
    await two.kill()
    with pytest.raises(PeerUnreachable, match="worker-1"):
        await one.peers.ask("worker-1")
    with pytest.raises(PeerUnreachable, match="nobody"):
        await one.peers.ask("nobody")


async def test_a_record_too_large_for_datagrams_arrives_over_http(nodes: Nodes) -> None:
    await start(nodes, 3)
    entries = [
        Entry(adapter=f"namespace/adapter-{n}", state=State.FAILED, message=f"{n} " + "m" * 500) for n in range(500)
    ]
    nodes.all[1].announce(*entries)
    await until(lambda: all(len(node.adapters("worker-1")) == 500 for node in (nodes.all[0], nodes.all[2])), 5)


@pytest.mark.slow
async def test_blocked_datagrams_kill_nobody_and_are_said(nodes: Nodes) -> None:
    await start(nodes, 4)
    nodes.all[1].wire.blocked = True
    others = [node for node in nodes.all if node is not nodes.all[1]]
    await until(lambda: all(any("UDP" in p.message for p in node.peers.problems()) for node in others), 10)
    assert know_each_other(nodes)()
    assert {str(row["state"]) for node in others for row in node.peers.rows().values()} == {"alive"}
    nodes.all[1].load("ns/a")
    await until(lambda: all("ns/a" in node.adapters("worker-1") for node in others), 5)
    await nodes.all[1].kill()
    await until(lambda: all("worker-1" not in node.alive for node in others), 10)


@pytest.mark.slow
async def test_keys_rotate_without_a_gap(nodes: Nodes, tmp_path: Path) -> None:
    """Each file goes through: old; old and new; new and old; new. At no moment is anyone suspected."""
    old, new = "the old key of this test pool", "the new key of this test pool"
    files = [tmp_path / f"key-{n}" for n in range(3)]
    for n, file in enumerate(files):
        file.write_text(f"{old}\n")
        await nodes.start(f"worker-{n}", key_file=file)
    await until(know_each_other(nodes), 10)
    for lines in ([old, new], [new, old], [new]):
        for file in files:
            replacement = file.with_suffix(".new")
            replacement.write_text("\n".join(lines))
            os.replace(replacement, file)
        wanted = Keyring(tuple(make_key(line) for line in lines))
        await until(partial(_all_use, nodes, wanted), 10)
        assert know_each_other(nodes)()
    nodes.all[0].load("ns/after")
    await until(lambda: all("ns/after" in node.adapters("worker-0") for node in nodes.all[1:]), 5)
    assert [node.peers.dropped()[Drop.STRANGER] for node in nodes.all] == [0, 0, 0]


def _all_use(nodes: Nodes, keys: Keyring) -> bool:
    return all(node.peers.speaker.gate.keys == keys for node in nodes.all)


async def test_another_key_or_pool_is_another_world(nodes: Nodes) -> None:
    await start(nodes, 2)
    stranger = await nodes.start("stranger", keys=Keyring((make_key("some other key of a stranger"),)))
    neighbour = await nodes.start("neighbour", pool="another pool")
    victim = nodes.all[0]
    await until(lambda: victim.peers.dropped()[Drop.STRANGER] > 0 and victim.peers.dropped()[Drop.WRONG_POOL] > 0, 10)
    assert stranger.alive == neighbour.alive == set()
    assert victim.alive == {"worker-1"}


async def test_bad_datagrams_are_dropped_and_counted_and_nothing_stops(nodes: Nodes) -> None:
    await start(nodes, 2)
    victim, other = nodes.all
    good = next(data for data, _ in victim.wire.received if len(data) > 100)
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    bad = [good, good[:40], flipped, good + b"x", b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(600), bytes(3000)]
    elsewhere = Gate(Party("uid-of-worker-1", 1), "pool", victim.peers.speaker.gate.keys, 0)
    bad.append(elsewhere.seal(Kind.PING, Party("someone-else", 1), b"", other.peers._wall()))
    host, port = victim.address.split(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        for data in bad:
            sending.sendto(data, (host, int(port)))
    dropped = victim.peers.dropped()
    await until(lambda: sum(victim.peers.dropped().values()) >= len(bad), 5)
    for reason in (Drop.REPLAY, Drop.TRUNCATED, Drop.ALTERED, Drop.STRANGER, Drop.OVERSIZED, Drop.WRONG_ADDRESSEE):
        assert dropped[reason] >= 1, reason
    victim.load("ns/still-here")
    await until(lambda: "ns/still-here" in other.adapters("worker-0"), 5)


async def test_http_requests_that_are_not_authentic_are_refused_unread(nodes: Nodes) -> None:
    await start(nodes, 2)
    victim, other = nodes.all
    gate = other.peers.speaker.gate
    asked = HttpRequest(method="POST", path="/peer/sync")
    wall = other.peers._wall()

    def signed(body: bytes, request: HttpRequest = asked) -> str:
        return gate.sign_request(Party("uid-of-worker-0"), request, body, wall)[0]

    replayed = signed(b"\x94\x90\x90\x90\x90")
    cases = [
        ("", b"x" * 1_000_000, 403),
        ("no header at all", b"", 403),
        (signed(b"", HttpRequest(method="GET", path="/peer/sync")), b"", 403),
        (signed(b"", HttpRequest(method="POST", path="/peer/sync", query="a=b")), b"", 403),
        (replayed, b"\x94\x90\x90\x90\x90", 200),
        (replayed, b"\x94\x90\x90\x90\x90", 403),
        (signed(b"one body"), b"another body", 400),
        (signed(b"\xc1"), b"\xc1", 400),
    ]
    async with aiohttp.ClientSession() as session:
        for header, body, status in cases:
            async with session.post(
                f"http://{victim.address}/peer/sync", data=body, headers={AUTH_HEADER: header}
            ) as answer:
                assert answer.status == status, (header, body[:20])
                assert bool(answer.headers.get(AUTH_HEADER)) == (status != 403)
    assert know_each_other(nodes)()


async def test_two_agents_with_one_name_are_told_apart(nodes: Nodes) -> None:
    first = await nodes.start("worker-0", uid="uid-1")
    second = await nodes.start("worker-0", uid="uid-2")
    await until(lambda: second.peers.namesake() is not None, 5)
    found = second.peers.namesake()
    assert found is not None
    assert found.head.uid == "uid-1"
    assert first.peers.namesake() is None
    await until(lambda: any("--name" in problem.message for problem in first.peers.problems()), 5)


async def test_a_restart_finds_the_pool_by_its_last_known_addresses(nodes: Nodes) -> None:
    """The seeds are gone, and so is the platform: what state/ remembers is enough."""

    class Kept:
        def __init__(self) -> None:
            self.data: dict[str, bytes] = {}

        def save(self, name: str, data: bytes) -> None:
            self.data[name] = data

        def read(self, name: str) -> bytes | None:
            return self.data.get(name)

    store = Kept()
    await start(nodes, 2)
    third = await nodes.start("worker-2", store=store)
    await until(know_each_other(nodes), 10)
    await third.peers.save_addresses()
    await third.kill()
    again = await nodes.start("worker-2", store=store, alone=True)
    await until(lambda: again.alive == {"worker-0", "worker-1"}, 10)


async def test_a_port_in_use_is_named() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ListenFailed, match=f"UDP port {port}"):
            await UdpEndpoint("127.0.0.1", port).open(lambda data, source: None)


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
async def test_names_and_both_kinds_of_address_are_sent_to(host: str) -> None:
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    got: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()
    endpoint, target = UdpEndpoint(host, 0), UdpEndpoint("127.0.0.1", 0)
    await endpoint.open(lambda data, source: None)
    await target.open(lambda data, source: got.put_nowait((data, source)))
    try:
        port = target.address.split(":")[1]
        endpoint.send(target.address, b"by address")
        async with asyncio.timeout(5):
            assert (await got.get())[0] == b"by address"
        for bad in ("nonsense", "127.0.0.1:99999", "no.such.name.invalid:1", "[::1]:x"):
            endpoint.send(bad, b"lost")
        async with asyncio.timeout(5):
            while got.empty():  # the name is looked up aside: what comes first may be lost
                endpoint.send(f"localhost:{port}", b"by name")
                await asyncio.sleep(0.02)
            data, source = await got.get()
        assert data == b"by name"
        assert source.startswith("127.0.0.1:")
    finally:
        await endpoint.close()
        await target.close()
