"""The gossip as the other loops see it: who is unheard, who is gone, and a generation that rises."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from sidecar.core.wire import Party
from sidecar.model import Member
from tests.edges.gossip_nodes import Nodes, know_each_other, running, until


@pytest_asyncio.fixture
async def nodes() -> AsyncIterator[Nodes]:
    async with running() as found:
        yield found


async def test_listed_peers_without_a_record_are_unheard(nodes: Nodes) -> None:
    one = await nodes.start("worker-0")
    two = await nodes.start("worker-1")
    listed: list[Member] = [
        Member(name="worker-0", address=one.address, uid=one.uid),
        Member(name="worker-1", address=two.address, uid=two.uid),
        Member(name="worker-2", address="127.0.0.1:1", uid="uid-of-worker-2"),
        Member(name="", address="127.0.0.1:2"),
    ]
    three = await nodes.start("worker-3", members=lambda: tuple(listed))
    assert three.peers.unheard() == {"worker-0", "worker-1", "worker-2", "127.0.0.1:2"}
    await until(lambda: three.peers.unheard() == {"worker-2", "127.0.0.1:2"}, 5)


async def test_what_the_platform_no_longer_lists_is_gone_at_once(nodes: Nodes) -> None:
    one = await nodes.start("worker-0")
    two = await nodes.start("worker-1")
    everyone = tuple(Member(name=node.name, address=node.address, uid=node.uid) for node in (one, two))
    fresh, listed = [True], [everyone]
    three = await nodes.start("worker-2", members=lambda: listed[0], fresh=lambda: fresh[0])
    await until(know_each_other(nodes), 5)
    changes = three.changes
    fresh[0], listed[0] = False, everyone[:1]
    one.load("ns/a")
    await until(lambda: "ns/a" in three.adapters("worker-0"), 5)
    assert three.alive == {"worker-0", "worker-1"}, "an old list takes nothing away"
    fresh[0] = True
    await until(lambda: "worker-1" not in three.peers.view(), 5)
    assert three.changes > changes


async def test_a_generation_the_pool_knows_higher_is_outbid_and_kept(nodes: Nodes) -> None:
    kept: list[int] = []
    one = await nodes.start("worker-0")
    again = await nodes.start("worker-1", rise=kept.append)
    await until(know_each_other(nodes), 5)
    before = again.peers.speaker.gossip.me
    await again.kill()
    nodes.all.remove(again)
    later = await nodes.start("worker-1", generation=before.generation + 5)
    await until(lambda: one.peers.view()["worker-1"].record.head.generation == before.generation + 5, 5)
    await later.kill()
    nodes.all.remove(later)
    last = await nodes.start("worker-1", generation=before.generation + 1, rise=kept.append)
    await until(lambda: bool(kept), 10)
    assert kept[-1] > before.generation + 5
    assert last.peers.speaker.gate.me == Party(last.uid, kept[-1])
    await until(know_each_other(nodes), 10)


async def test_an_unchanged_record_is_no_news_and_the_same_object(nodes: Nodes) -> None:
    one = await nodes.start("worker-0")
    two = await nodes.start("worker-1")
    two.load("ns/a")
    await until(lambda: "worker-1" in one.alive and "ns/a" in one.adapters("worker-1"), 5)
    changes, record = one.changes, one.peers.view()["worker-1"].record
    two.load("ns/a")
    two.load("ns/b")
    await until(lambda: "ns/b" in one.adapters("worker-1"), 5)
    assert one.changes == changes + 1
    assert one.peers.view()["worker-1"].record is one.peers.view()["worker-1"].record
    assert one.peers.view()["worker-1"].record is not record
