"""Bytes from other workers: while they are still downloading, and published; and all that can be wrong with them."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from sidecar.core.flight import CHUNK
from sidecar.core.wire import AUTH_HEADER, HttpRequest, Party
from sidecar.edges.partial import FILES
from sidecar.model import Adapter
from sidecar.ports import Fetched
from tests.adapters import Files, adapter, revision, tar_gz
from tests.edges.fetching import content, proxy, s3, upload, wanted
from tests.edges.gossip_nodes import until
from tests.edges.peer_workers import Worker, Workers, workers
from tests.s3proxy import Asked, Fault, Proxy
from tests.s3server import S3Server

__all__ = ["proxy", "s3", "workers"]

WEIGHTS = "adapter_model.safetensors"
SIZE = 5 * CHUNK + 12345


@pytest.fixture
def files() -> Files:
    return adapter(weights_bytes=SIZE)


def read_from_origin(proxy: Proxy) -> int:
    """Bytes of weights that left the origin."""
    return sum(one.sent for one in proxy.gets(WEIGHTS))


def held_after(size: int, gate: asyncio.Event, proxy: Proxy) -> None:
    """The first reader of the weights gets so many bytes, and the rest once the gate is open."""

    def choose(asked: Asked) -> Fault | None:
        first = asked.method == "GET" and WEIGHTS in asked.path and len(proxy.gets(WEIGHTS)) == 1
        return Fault(after=size, wait=gate) if first else None

    proxy.fault = choose


async def test_children_read_what_the_first_has_so_far_and_the_origin_is_read_once(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    gate = asyncio.Event()
    held_after(3 * CHUNK + 1000, gate, proxy)
    await workers.start(4)
    wants = wanted(upload(s3, "cut-through", files))
    first = asyncio.create_task(workers.all[0].fetch(wants))
    await until(lambda: workers.all[0].flying() >= 3, 10)
    others = [asyncio.create_task(worker.fetch(wants)) for worker in workers.all[1:]]
    await until(lambda: all(worker.received >= 3 * CHUNK for worker in workers.all[1:]), 10)
    assert len(proxy.gets(WEIGHTS)) == 1
    gate.set()
    found = await asyncio.gather(first, *others)
    assert {each.revision for each in found} == {revision(files)}
    assert all(content(each.path) == files for each in found)
    assert read_from_origin(proxy) == len(files[WEIGHTS])


async def test_nobody_waits_for_the_download_of_what_everybody_reads_at_once(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    gate = asyncio.Event()
    held_after(3 * CHUNK + 1000, gate, proxy)
    await workers.start(2, follow_above=16 * SIZE)
    wants = wanted(upload(s3, "small", files))
    first = asyncio.create_task(workers.all[0].fetch(wants))
    await until(lambda: workers.all[0].flying() >= 3, 10)
    assert content((await workers.all[1].fetch(wants)).path) == files
    assert workers.all[1].received == 0
    gate.set()
    await first


async def test_an_archive_is_passed_on_as_it_is(workers: Workers, s3: S3Server, proxy: Proxy, files: Files) -> None:
    await workers.start(3)
    data = tar_gz(files)
    s3.put("bucket", "archives/one.tar.gz", data)
    wants = wanted("s3://bucket/archives/one.tar.gz")
    found = await asyncio.gather(*(worker.fetch(wants) for worker in workers.all))
    assert {each.revision for each in found} == {revision(files)}
    assert sum(one.sent for one in proxy.gets("one.tar.gz")) == len(data)


async def test_what_a_peer_has_published_is_read_from_it(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    await workers.start(2)
    wants = wanted(upload(s3, "published", files))
    one, two = workers.all
    fetched = await one.fetch(wants)
    one.announce(wants, fetched)
    one.flights.close()
    await until(lambda: "ns/a" in two.node.adapters("worker-0"), 5)
    before = len(proxy.gets())
    again = await two.fetch(wants, fetched.listing)
    assert again.revision == fetched.revision
    assert content(again.path) == files
    assert len(proxy.gets()) == before, "nothing came from the origin"
    assert two.received == sum(map(len, files.values()))


async def late(workers: Workers, s3: S3Server, files: Files) -> tuple[Worker, Adapter, Fetched]:
    """One that has unpacked an archive a while ago, and one that wants the same."""
    await workers.start(2, patience=1.5)
    s3.put("bucket", "late/one.tar.gz", tar_gz(files))
    wants = wanted("s3://bucket/late/one.tar.gz")
    one, two = workers.all
    fetched = await one.fetch(wants)
    one.announce(wants, fetched)
    one.flights.close()
    await until(lambda: "ns/a" in two.node.adapters("worker-0"), 5)
    return two, wants, fetched


async def test_what_a_peer_has_unpacked_is_read_from_it(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    two, wants, fetched = await late(workers, s3, files)
    before = len(proxy.gets())
    again = await two.fetch(wants, fetched.listing)
    assert (again.revision, again.listing) == (fetched.revision, fetched.listing)
    assert content(again.path) == files
    assert len(proxy.gets()) == before, "nothing came from the origin"
    assert two.received == sum(map(len, files.values()))


async def test_an_archive_is_read_from_the_origin_if_what_a_peer_unpacked_has_gone_bad(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    two, wants, fetched = await late(workers, s3, files)
    path = Path(fetched.path) / WEIGHTS
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(4 * CHUNK)
        file.write(b"not what was there")
    assert content((await two.fetch(wants, fetched.listing)).path) == files
    assert {uid for each in two.transfer._contents.values() for uid in each.struck} == {"uid-of-worker-0"}
    assert two.store.usage() == sum(map(len, files.values())), "nothing is left of the first try"


async def test_an_archive_is_read_from_the_origin_if_who_unpacked_it_has_gone(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    two, wants, fetched = await late(workers, s3, files)
    shutil.rmtree(workers.directory / "worker-0/blobs")
    assert content((await two.fetch(wants, fetched.listing)).path) == files
    assert two.store.usage() == sum(map(len, files.values())), "nothing is left of the first try"


async def test_a_parent_that_dies_leaves_the_rest_to_the_origin(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    gate = asyncio.Event()
    held_after(3 * CHUNK, gate, proxy)
    await workers.start(2)
    wants = wanted(upload(s3, "dies", files))
    parent, child = workers.all
    first = asyncio.create_task(parent.fetch(wants))
    second = asyncio.create_task(child.fetch(wants))
    await until(lambda: child.received >= 3 * CHUNK, 10)
    first.cancel()
    await parent.node.kill()
    found = await second
    gate.set()
    assert content(found.path) == files
    rest = [one for one in proxy.gets(WEIGHTS) if one.range and not one.range.startswith("bytes=0-")]
    assert sum(one.sent for one in rest) == len(files[WEIGHTS]) - 3 * CHUNK, "only what was missing"


async def test_a_chunk_that_went_bad_on_the_parents_disk_strikes_it_out(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    gate = asyncio.Event()
    held_after(3 * CHUNK, gate, proxy)
    await workers.start(2)
    wants = wanted(upload(s3, "bad-chunk", files))
    parent, child = workers.all
    first = asyncio.create_task(parent.fetch(wants))
    await until(lambda: parent.flying() >= 3, 10)
    staged = next((workers.directory / "worker-0/tmp/staging").glob(f"*/{FILES}/{WEIGHTS}"))
    with staged.open("r+b") as file:
        file.seek(CHUNK + 5)
        file.write(b"not what was there")
    found = await child.fetch(wants)
    assert content(found.path) == files
    assert child.received >= CHUNK, "the first chunk was right"
    struck = child.transfer._contents
    assert [each.struck for each in struck.values()] == [{"uid-of-worker-0"}]
    gate.set()
    await first


async def test_a_published_file_that_went_bad_is_refused_and_the_origin_asked(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    await workers.start(2)
    wants = wanted(upload(s3, "bad-blob", files))
    one, two = workers.all
    fetched = await one.fetch(wants)
    one.announce(wants, fetched)
    one.flights.close()
    await until(lambda: "ns/a" in two.node.adapters("worker-0"), 5)
    path = Path(fetched.path) / WEIGHTS
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(4 * CHUNK)
        file.write(b"not what was there")
    found = await two.fetcher.fetch(wants, fetched.listing, fetched.revision, lambda done, total: None)
    assert content(found.path) == files
    assert [each.struck for each in two.transfer._contents.values()] == [{"uid-of-worker-0"}]


async def test_peers_that_are_all_broken_cost_no_more_than_the_patience(
    workers: Workers, s3: S3Server, proxy: Proxy, files: Files
) -> None:
    """Upstream workers that have not even begun, and will not."""
    await workers.start(4, patience=1.0)
    wants = wanted(upload(s3, "broken", files))
    last = workers.all[3]
    listing = await last.fetcher.listing(wants)
    clock = asyncio.get_running_loop().time
    started = clock()
    alone = clock() - started
    found = await last.fetch(wants, listing)
    assert content(found.path) == files
    assert clock() - started < alone + 1.0 + 5.0
    assert read_from_origin(proxy) == len(files[WEIGHTS])


async def test_nothing_else_of_the_disk_is_served_and_nothing_to_strangers(
    workers: Workers, s3: S3Server, files: Files
) -> None:
    await workers.start(2)
    server, client = workers.all
    fetched = await server.fetch(wanted(upload(s3, "served", files)))
    stored = {file.path: file for file in server.store.files(fetched.revision)}
    blob = f"/peer/blobs/sha256/{stored[WEIGHTS].sha256}"
    gate = client.node.peers.speaker.gate
    wall = client.node.peers._wall()
    # Sent as they stand: a client library would tidy them up.
    paths = [
        (blob, 206),
        ("/peer/blobs/sha256/" + "0" * 64, 404),
        ("/peer/blobs/sha256/..%2f..%2fstate%2fidentity.json", 404),
        ("/peer/blobs/sha256/%2e%2e%2f%2e%2e%2fstate%2flock", 404),
        ("/peer/revisions/" + "0" * 64, 404),
        ("/peer/revisions/..", 404),
        (f"/peer/flight/{'0' * 32}/0/0", 404),
        (f"/peer/flight/{'0' * 32}/0/hashes", 404),
    ]
    async with aiohttp.ClientSession() as session:
        for path, status in paths:
            url = URL(f"http://{server.node.address}{path}", encoded=True)
            header, _ = gate.sign_request(Party("uid-of-worker-0"), HttpRequest(method="GET", path=path), b"", wall)
            async with session.get(url) as answer:
                assert (answer.status, await answer.read()) == (403, b""), path
            async with session.get(url, headers={AUTH_HEADER: header}) as answer:
                assert answer.status == status, path
                assert (await answer.read() == files[WEIGHTS]) == (status == 206)
            async with session.get(url, headers={AUTH_HEADER: header}) as answer:
                assert answer.status == 403, "a replay"


@pytest.mark.parametrize(
    ("asked", "status", "span"),
    [
        ("bytes=0-9", 206, (0, 10)),
        (f"bytes=10-{10**14}", 206, (10, None)),
        ("bytes=5-4", 416, None),
        (f"bytes={10**14}-", 416, None),
        ("bytes=-5", 416, None),
        ("bytes=0-1,3-4", 416, None),
        ("lines=0-9", 416, None),
    ],
)
async def test_ranges_of_published_files(
    workers: Workers, s3: S3Server, asked: str, status: int, span: tuple[int, int | None] | None
) -> None:
    await workers.start(2)
    server, client = workers.all
    files = adapter()
    fetched = await server.fetch(wanted(upload(s3, "ranges", files)))
    stored = {file.path: file for file in server.store.files(fetched.revision)}
    path = f"/peer/blobs/sha256/{stored[WEIGHTS].sha256}"
    gate, wall = client.node.peers.speaker.gate, client.node.peers._wall()
    request = HttpRequest(method="GET", path=path, range=asked)
    header, _ = gate.sign_request(Party("uid-of-worker-0"), request, b"", wall)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.node.address}{path}", headers={AUTH_HEADER: header, "Range": asked}) as answer,
    ):
        assert answer.status == status
        assert await answer.read() == (files[WEIGHTS][slice(*span)] if span else b"")


async def test_a_reader_that_goes_away_leaves_nothing_open(workers: Workers, s3: S3Server, files: Files) -> None:
    await workers.start(2)
    server, client = workers.all
    fetched = await server.fetch(wanted(upload(s3, "leaves", files)))
    stored = {file.path: file for file in server.store.files(fetched.revision)}
    path = f"/peer/blobs/sha256/{stored[WEIGHTS].sha256}"
    gate, wall = client.node.peers.speaker.gate, client.node.peers._wall()
    await asyncio.sleep(0)
    server.flights.close()

    def opened() -> int:
        links = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
        return sum(stored[WEIGHTS].sha256 in link or WEIGHTS in link for link in links)

    for _ in range(5):
        header, _ = gate.sign_request(Party("uid-of-worker-0"), HttpRequest(method="GET", path=path), b"", wall)
        async with aiohttp.ClientSession() as session:
            answer = await session.get(f"http://{server.node.address}{path}", headers={AUTH_HEADER: header})
            await answer.content.read(1000)
            answer.close()
    await until(lambda: opened() == 0, 5)
