"""The fetcher against a real S3 server, behind a proxy that breaks what it is told to."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from sidecar.edges.disk import AdapterStore
from sidecar.edges.download import ReadRange
from sidecar.edges.fetch import OriginFetcher
from sidecar.edges.flights import Flight, Flights, Present
from sidecar.edges.origins import Sink
from sidecar.edges.threads import in_thread
from sidecar.model import Adapter, Listing, RemoteFile
from sidecar.ports import AdapterRejected, DiskFull, Fetched, OriginChanged, OriginDenied
from sidecar.settings import MIB, Settings
from tests.adapters import adapter, revision, tar_gz
from tests.edges.fetching import content, fetched, fetcher, ignore, noted, proxy, s3, store, upload, wanted
from tests.s3proxy import Asked, Fault, Proxy
from tests.s3server import S3Server

__all__ = ["fetcher", "proxy", "s3", "store"]


async def test_from_a_prefix_to_a_published_revision(
    s3: S3Server, proxy: Proxy, store: AdapterStore, fetcher: OriginFetcher
) -> None:
    files = adapter("first") | {"sub dir/ü.txt": b"more"}
    told: list[tuple[int, int]] = []
    one = wanted(upload(s3, "first", files))
    listing = await fetcher.listing(one)
    result = await fetcher.fetch(one, listing, None, lambda done, total: told.append((done, total)))
    assert result.revision == revision(files)
    assert result.listing == listing
    assert content(result.path) == files
    assert store.revisions() == {result.revision: result.path}
    assert told[-1] == (listing.size, listing.size)
    assert told == sorted(told)
    assert all(one.if_match for one in proxy.gets())


async def test_a_revision_that_is_here_is_not_fetched(s3: S3Server, proxy: Proxy, fetcher: OriginFetcher) -> None:
    one = wanted(upload(s3, "here", adapter("here")))
    first = await fetched(fetcher, one)
    gets = len(proxy.gets())
    again = await fetched(fetcher, one, first.revision)
    pinned = await fetched(fetcher, wanted(one.source.uri, digest=first.revision))
    assert (again, pinned) == (first, first)
    assert len(proxy.gets()) == gets


async def test_of_two_prefixes_one_of_which_begins_the_other_each_is_its_own(
    s3: S3Server, fetcher: OriginFetcher
) -> None:
    one, ten = upload(s3, "loras/1", adapter("one")), upload(s3, "loras/10", adapter("ten"))
    assert (await fetched(fetcher, wanted(one))).revision == revision(adapter("one"))
    assert (await fetched(fetcher, wanted(ten))).revision == revision(adapter("ten"))


async def test_an_archive_is_the_same_revision_as_its_files(
    s3: S3Server, tmp_path: Path, fetcher: OriginFetcher
) -> None:
    files = adapter("packed")
    s3.put("bucket", "packed/it.tar.gz", tar_gz(files))
    result = await fetched(fetcher, wanted("s3://bucket/packed/it.tar.gz"))
    assert result.revision == revision(files)
    assert content(result.path) == files
    local = tmp_path / "it.tgz"
    local.write_bytes(tar_gz({f"top/{path}": data for path, data in files.items()}))
    assert (await fetched(fetcher, wanted(f"file://{local}"))).revision == revision(files)


async def test_files_are_copied_so_that_their_origin_may_change(tmp_path: Path, fetcher: OriginFetcher) -> None:
    files = adapter("local")
    source = tmp_path / "source"
    source.mkdir()
    for path, data in files.items():
        (source / path).write_bytes(data)
    result = await fetched(fetcher, wanted(f"file://{source}"))
    for path in files:
        (source / path).write_bytes(b"changed")
    assert content(result.path) == files


async def test_an_object_whose_connection_breaks_twice_costs_no_other_object_a_second_read(
    s3: S3Server, proxy: Proxy, fetcher: OriginFetcher
) -> None:
    files = adapter("flaky", weights_bytes=300_000) | {"1.txt": b"1" * 9000, "2.txt": b"2" * 9000}
    cuts = itertools.chain([70_000, 70_000], itertools.repeat(None))

    def fault(asked: Asked) -> Fault | None:
        cut = next(cuts) if "safetensors" in asked.path else None
        return Fault(after=cut) if cut is not None else None

    one = wanted(upload(s3, "flaky", files))
    proxy.fault = fault
    result = await fetched(fetcher, one)
    assert content(result.path) == files
    assert [len(proxy.gets(path)) for path in files] == [1, 3, 1, 1]
    assert sum(asked.sent for asked in proxy.gets()) == result.listing.size


async def test_a_download_that_fails_keeps_what_is_whole_for_the_next_time(
    s3: S3Server, proxy: Proxy, tmp_path: Path, fetcher: OriginFetcher
) -> None:
    files = adapter("outage", weights_bytes=300_000)
    one = wanted(upload(s3, "outage", files))
    listing = await fetcher.listing(one)
    goes_on = asyncio.Event()
    proxy.fault = lambda asked: Fault(status=403, wait=goes_on) if "safetensors" in asked.path else None
    failing = asyncio.create_task(fetcher.fetch(one, listing, None, ignore))
    await noted(tmp_path / "adapters", 1)
    goes_on.set()
    with pytest.raises(OriginDenied, match=r"s3://bucket/outage.*403"):
        await failing
    proxy.fault = lambda _: None
    proxy.asked.clear()
    assert (await fetched(fetcher, one)).revision == revision(files)
    assert [asked.path.rpartition("/")[2] for asked in proxy.gets()] == ["adapter_model.safetensors"]


async def test_one_download_for_all_who_want_it(s3: S3Server, proxy: Proxy, fetcher: OriginFetcher) -> None:
    files = adapter("shared")
    uri = upload(s3, "shared", files)
    listing = await fetcher.listing(wanted(uri))
    callers = [fetcher.fetch(wanted(uri, f"adapter-{number}"), listing, None, ignore) for number in range(8)]
    results = await asyncio.gather(*callers)
    assert {result.revision for result in results} == {revision(files)}
    assert len(proxy.gets()) == len(files)


async def test_who_waits_gets_the_result_though_the_first_caller_goes(
    s3: S3Server, proxy: Proxy, fetcher: OriginFetcher
) -> None:
    one = wanted(upload(s3, "left", adapter("left")))
    listing = await fetcher.listing(one)
    goes_on, reached = asyncio.Event(), asyncio.Event()
    proxy.fault = lambda asked: Fault(wait=goes_on, then=reached.set) if "safetensors" in asked.path else None
    first = asyncio.create_task(fetcher.fetch(one, listing, None, ignore))
    await reached.wait()
    second = asyncio.create_task(fetcher.fetch(wanted(one.source.uri, "b"), listing, None, ignore))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    goes_on.set()
    assert (await second).revision == revision(adapter("left"))
    assert len(proxy.gets("safetensors")) == 1


async def test_a_download_that_nobody_waits_for_any_more_ends_and_is_taken_up_again(
    s3: S3Server, proxy: Proxy, store: AdapterStore, fetcher: OriginFetcher
) -> None:
    files = adapter("alone")
    one = wanted(upload(s3, "alone", files))
    listing = await fetcher.listing(one)
    never, reached = asyncio.Event(), asyncio.Event()
    proxy.fault = lambda asked: Fault(wait=never, then=reached.set) if "safetensors" in asked.path else None
    only = asyncio.create_task(fetcher.fetch(one, listing, None, ignore))
    await reached.wait()
    only.cancel()
    proxy.fault = lambda _: None
    # At once, while the old one is still letting go.
    again = asyncio.create_task(fetcher.fetch(one, listing, None, ignore))
    assert (await again).revision == revision(files)
    assert content(store.revisions()[revision(files)]) == files
    never.set()


async def test_an_object_replaced_while_it_is_downloaded_is_never_mixed(
    s3: S3Server, proxy: Proxy, store: AdapterStore, fetcher: OriginFetcher
) -> None:
    old, new = adapter("old", weights_bytes=400_000), adapter("new", weights_bytes=400_000)
    one = wanted(upload(s3, "replaced", old))
    replaced = itertools.chain([lambda: upload(s3, "replaced", new)], itertools.repeat(None))

    def fault(asked: Asked) -> Fault | None:
        replace = next(replaced) if "safetensors" in asked.path else None
        return Fault(after=70_000, then=lambda: None if replace is None else (replace(), None)[1]) if replace else None

    proxy.fault = fault
    with pytest.raises(OriginChanged, match=r"adapter_model\.safetensors was changed since it was listed"):
        await fetched(fetcher, one)
    assert store.revisions() == {}
    assert content((await fetched(fetcher, one)).path) == new


async def test_what_has_another_hash_than_the_pinned_one_is_rejected(
    s3: S3Server, store: AdapterStore, fetcher: OriginFetcher
) -> None:
    files = adapter("pinned")
    digest = "sha256:" + "0" * 64
    with pytest.raises(AdapterRejected, match=rf"{revision(files)}.*pins {digest}"):
        await fetched(fetcher, wanted(upload(s3, "pinned", files), digest=digest))
    assert store.revisions() == {}


async def test_what_has_another_hash_than_the_pools_is_a_change(
    s3: S3Server, store: AdapterStore, fetcher: OriginFetcher
) -> None:
    files = adapter("decided")
    decided = "sha256:" + "1" * 64
    with pytest.raises(OriginChanged, match=rf"{revision(files)}.*{decided}"):
        await fetched(fetcher, wanted(upload(s3, "decided", files)), decided)
    assert store.revisions() == {}


async def test_callers_with_other_expectations_share_one_download(
    s3: S3Server, proxy: Proxy, fetcher: OriginFetcher
) -> None:
    files = adapter("mixed")
    uri = upload(s3, "mixed", files)
    listing = await fetcher.listing(wanted(uri))
    wrong = wanted(uri, "wrong", digest="sha256:" + "0" * 64)
    refused, given = await asyncio.gather(
        fetcher.fetch(wrong, listing, None, ignore),
        fetcher.fetch(wanted(uri, "right"), listing, revision(files), ignore),
        return_exceptions=True,
    )
    assert isinstance(refused, AdapterRejected)
    assert isinstance(given, Fetched)
    assert len(proxy.gets()) == len(files)


async def test_a_pin_and_a_decision_that_differ_are_told_apart(s3: S3Server, fetcher: OriginFetcher) -> None:
    one = wanted(upload(s3, "both", adapter("both")), digest="sha256:" + "0" * 64)
    with pytest.raises(AdapterRejected, match="pins"):
        await fetched(fetcher, one, "sha256:" + "1" * 64)


@pytest.mark.parametrize(
    ("files", "fault", "gets"),
    [
        ({"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}, "--allow-pickle", 0),
        ({"adapter_model.safetensors": b"x"}, "adapter_config.json", 0),
        (adapter("rank", rank=64), "64", 2),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"short"}, "adapter_", 2),
    ],
)
async def test_what_the_engine_could_not_serve_is_rejected_as_early_as_it_shows(
    files: dict[str, bytes], fault: str, gets: int, s3: S3Server, proxy: Proxy, store: AdapterStore
) -> None:
    strict = OriginFetcher(Settings(max_lora_rank=16), store)
    uri = upload(s3, f"rejected-{gets}-{len(files)}-{fault.strip('-')}", files)
    with pytest.raises(AdapterRejected) as raised:
        await fetched(strict, wanted(uri))
    assert fault in str(raised.value)
    assert uri in str(raised.value)
    assert len(proxy.gets()) == gets
    assert store.revisions() == {}
    assert list(Path(store.staging("probe")).parent.iterdir()) == [store.staging("probe")]
    await strict.close()


@pytest.mark.parametrize("path", ["../../x", "/etc/passwd", "a/../../x", "a\\..\\x"])
async def test_a_peers_list_that_leaves_the_directory_is_rejected(path: str, fetcher: OriginFetcher) -> None:
    listing = Listing(files=(RemoteFile(path="adapter_config.json", size=2), RemoteFile(path=path, size=1)))
    with pytest.raises(AdapterRejected, match="stay inside"):
        await fetcher.fetch(wanted("s3://bucket/x"), listing, None, ignore)


async def test_an_adapter_beyond_the_limit_is_rejected_unread(s3: S3Server, proxy: Proxy, store: AdapterStore) -> None:
    small = OriginFetcher(Settings(max_adapter_bytes=100), store)
    with pytest.raises(AdapterRejected, match="limit for one adapter is 100"):
        await small.listing(wanted(upload(s3, "large", adapter("large"))))
    assert proxy.gets() == []
    await small.close()


async def test_a_uri_that_names_nothing_is_rejected_and_a_secret_outside_kubernetes(fetcher: OriginFetcher) -> None:
    with pytest.raises(AdapterRejected, match="unknown scheme"):
        await fetcher.listing(wanted("gs://bucket/x"))
    with pytest.raises(AdapterRejected, match="the Secret 'token', and Secrets are read only in Kubernetes"):
        await fetcher.listing(wanted("s3://bucket/x", secret="token"))


async def test_a_quota_that_is_too_small_says_so_before_a_byte_is_read(
    s3: S3Server, proxy: Proxy, tmp_path: Path
) -> None:
    tiny = AdapterStore.open(str(tmp_path / "tiny"), quota=1000)
    fetcher = OriginFetcher(Settings(), tiny)
    with pytest.raises(DiskFull, match="--disk-quota"):
        await fetched(fetcher, wanted(upload(s3, "quota", adapter("quota", weights_bytes=5000))))
    assert proxy.gets() == []
    await fetcher.close()
    tiny.close()


class SomePeers:
    """Peers that have the beginning of each file, right or wrong."""

    def __init__(self, files: dict[str, bytes], share: float) -> None:
        self.files = files
        self.part = share
        self.asked: list[str] = []
        self.wrong = 0
        self._flights = Flights()

    def share(self, adapter: Adapter, listing: Listing, root: Path, present: Present) -> AbstractContextManager[Flight]:
        return self._flights.share(adapter, listing, root, present)

    def refuted(self, adapter: Adapter, listing: Listing) -> None:
        self.wrong += 1

    def close(self) -> None:
        self._flights.close()

    async def published(self, adapter: Adapter, listing: Listing) -> Listing | None:
        return None

    async def read(
        self,
        adapter: Adapter,
        listing: Listing,
        file: RemoteFile,
        start: int,
        stop: int,
        sink: Sink,
        origin: ReadRange | None,
    ) -> int:
        self.asked.append(file.path)
        reached = start + int((stop - start) * self.part)
        await in_thread(lambda: sink(self.files[file.path][start:reached]))
        return reached


async def test_peers_are_asked_first_and_the_origin_for_the_rest(
    s3: S3Server, proxy: Proxy, store: AdapterStore
) -> None:
    files = adapter("peers", weights_bytes=100_000)
    peers = SomePeers(files, 0.75)
    shared = OriginFetcher(Settings(), store, peers=peers)
    result = await fetched(shared, wanted(upload(s3, "peers", files)))
    assert content(result.path) == files
    assert sorted(peers.asked) == sorted(files)
    assert sum(asked.sent for asked in proxy.gets()) == pytest.approx(result.listing.size / 4, abs=2)
    assert peers.wrong == 0
    await shared.close()
    peers.close()


async def test_wrong_bytes_from_peers_cost_a_second_download_and_nothing_else(
    s3: S3Server, proxy: Proxy, store: AdapterStore
) -> None:
    files = adapter("lies", weights_bytes=100_000)
    wrong = {path: data[:-1] + b"?" for path, data in files.items()}
    one = wanted(upload(s3, "lies", files), digest=revision(files))
    peers = SomePeers(wrong, 1.0)
    shared = OriginFetcher(Settings(), store, peers=peers)
    assert (await fetched(shared, one)).revision == revision(files)
    assert len(proxy.gets()) == len(files)
    assert list(store.revisions()) == [revision(files)]
    assert peers.wrong == 1
    await shared.close()
    peers.close()


async def test_large_files_come_in_parts_on_several_streams(s3: S3Server, proxy: Proxy, fetcher: OriginFetcher) -> None:
    files = adapter("parts", weights_bytes=70 * MIB)
    result = await fetched(fetcher, wanted(upload(s3, "parts", files)))
    assert result.revision == revision(files)
    ranges = sorted(asked.range for asked in proxy.gets("safetensors"))
    assert len(ranges) == 3
    assert all(ranges)
