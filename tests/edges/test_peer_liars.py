"""Peers that have the key and give something else than they should: never a wrong byte, and others are read instead."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.core.flight import CHUNK
from sidecar.model import Adapter, Entry, State
from tests.adapters import Files, adapter, revision
from tests.edges import peer_liars as lies
from tests.edges.fetching import content, proxy, s3, upload, wanted
from tests.edges.gossip_nodes import know_each_other, until
from tests.edges.peer_liars import Liar, Lie
from tests.edges.peer_workers import Worker, Workers, workers
from tests.s3proxy import Proxy
from tests.s3server import S3Server

__all__ = ["proxy", "s3", "workers"]

WEIGHTS = "adapter_model.safetensors"
LIAR = "uid-of-liar"
# What one connection may have taken before it was cut: the buffers of two sockets.
UNASKED = 24 * 1024 * 1024


@pytest.fixture
def files() -> Files:
    return adapter(weights_bytes=2 * CHUNK + 12345)


async def meet(workers: Workers, s3: S3Server, files: Files, lie: Lie) -> tuple[Adapter, Worker, Liar]:
    """An honest worker that has it all, in rank behind a liar, and the worker that asks both."""
    await workers.start(2, patience=4.0)
    wants = wanted(upload(s3, "liars", files), digest=revision(files))
    workers.targets = ["worker-0"]
    await workers.all[0].fetch(wants)
    liar = Liar(files, lie)
    await workers.nodes.start("liar", more=liar.routes)
    await until(know_each_other(workers.nodes), 10)
    workers.targets = ["liar", "worker-0", "worker-1"]
    return wants, workers.all[1], liar


def struck(worker: Worker) -> set[str]:
    return set().union(*(content.struck for content in worker.transfer._contents.values()))


@pytest.mark.parametrize(
    ("lie", "wrong"),
    [
        (lies.right_bytes, False),
        (lies.other_bytes_under_the_right_hash, True),
        (lies.more_bytes, False),
        (lies.fewer_bytes, False),
        (lies.bytes_that_break_off, False),
        (lies.bytes_without_end, False),
        (lies.bytes_without_end_or_length, False),
        (lies.the_way_elsewhere, False),
        (lies.right_bytes_without_a_signature, False),
        (lies.a_progress_that_is_no_number, False),
    ],
)
async def test_a_parent_that_gives_what_it_should_not_is_left_for_another_peer(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files, lie: Lie, wrong: bool
) -> None:
    wants, asking, liar = await meet(workers, s3, files, lie)
    before = len(proxy.gets())
    found = await asking.fetch(wants)
    assert content(found.path) == files
    assert liar.asked
    assert asking.received == sum(map(len, files.values()))
    assert len(proxy.gets()) == before, "the honest worker has it"
    assert struck(asking) == ({LIAR} if wrong else set())
    assert all(ask.sent <= UNASKED for ask in liar.asked)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [lies.drop_by_drop, lies.nothing_at_all])
async def test_a_parent_that_keeps_one_waiting_is_passed_by_and_not_struck_out(
    workers: Workers, s3: S3Server, files: Files, lie: Lie
) -> None:
    wants, asking, liar = await meet(workers, s3, files, lie)
    found = await asking.fetch(wants)
    assert content(found.path) == files
    assert asking.received > 0, "from the honest worker"
    assert not struck(asking)
    sent = [ask.sent for ask in liar.asked]
    await asyncio.sleep(0.2)
    assert [ask.sent for ask in liar.asked] == sent, "it talks to nobody any more"


@pytest.mark.slow
async def test_a_parent_on_a_slow_line_is_left_alone_as_long_as_bytes_come(
    workers: Workers, s3: S3Server, files: Files
) -> None:
    wants, asking, liar = await meet(workers, s3, files, lies.slowly_but_surely)
    found = await asking.fetch(wants)
    assert content(found.path) == files
    assert sum(ask.sent for ask in liar.asked) == sum(map(len, files.values())), "all of it, and all of it once"


async def test_bytes_that_fit_a_parents_own_hash_but_not_the_pinned_revision_are_not_published(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    wants, asking, _ = await meet(workers, s3, files, lies.other_bytes_under_their_own_hash)
    found = await asking.fetch(wants)
    assert content(found.path) == files
    assert list(asking.store.revisions()) == [revision(files)]
    assert struck(asking) == {LIAR}
    assert sum(one.sent for one in proxy.gets(WEIGHTS)) == 2 * len(files[WEIGHTS]), "the second time for this one"


@pytest.mark.parametrize(
    ("lie", "wrong"),
    [
        (lies.right_bytes, False),
        (lies.more_bytes, False),
        (lies.fewer_bytes, False),
        (lies.bytes_without_end, False),
        (lies.another_range, False),
        (lies.another_size, False),
        (lies.right_bytes_without_a_signature, False),
        (lies.another_list, True),
        (lies.a_list_of_nonsense, False),
        (lies.a_list_without_end, False),
    ],
)
async def test_a_holder_that_gives_what_it_should_not_is_left_for_another_peer(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files, lie: Lie, wrong: bool
) -> None:
    wants, asking, liar = await meet(workers, s3, files, lie)
    await announced(workers, asking, files)
    before = len(proxy.gets())
    found = await asking.fetch(wants)
    assert content(found.path) == files
    assert liar.asked
    assert asking.received == sum(map(len, files.values()))
    assert len(proxy.gets()) == before
    assert struck(asking) == ({LIAR} if wrong else set())
    assert all(ask.sent <= UNASKED for ask in liar.asked)


async def test_a_holder_whose_bytes_have_another_hash_is_struck_out(
    workers: Workers, s3: S3Server, files: Files
) -> None:
    wants, asking, _ = await meet(workers, s3, files, lies.other_bytes_under_the_right_hash)
    await announced(workers, asking, files)
    found = await asking.fetch(wants)
    assert content(found.path) == files
    assert list(asking.store.revisions()) == [revision(files)]
    assert struck(asking) == {LIAR}


async def announced(workers: Workers, asking: Worker, files: Files) -> None:
    """The liar says that it has it loaded, and the honest worker comes next by its download that has just ended."""
    liar = workers.nodes.all[-1]
    liar.announce(Entry(adapter="ns/a", state=State.LOADED, revision=revision(files)))
    workers.targets = ["worker-0", "worker-1"]
    await until(lambda: "ns/a" in asking.node.adapters("liar"), 10)
