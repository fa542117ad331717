"""Room: a quota with least recently used first, what may never go, promises to downloads, and disks that are full."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from sidecar.edges.disk import AdapterStore
from sidecar.ports import DiskFull
from tests.edges.stored import content, publish, read, revision, stored, write

MIB = 1024**2
CONFIG = len(b'{"r": 8}')


def names(*seeds: str) -> list[str]:
    return [revision(content(seed)) for seed in seeds]


@pytest.fixture
def root(memory_path: Path) -> Path:
    return memory_path / "adapters"


@pytest.fixture
def store(root: Path) -> Iterator[AdapterStore]:
    """Room for three adapters of 1,000 bytes."""
    store = AdapterStore.open(str(root), quota=3 * 1000 + CONFIG)
    yield store
    store.close()


# -- a quota -----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_until_the_quota_is_met(store: AdapterStore) -> None:
    for seed in "abcde":
        publish(store, content(seed))
    store.touch(names("a")[0])
    assert store.evict(frozenset()) == tuple(names("b", "c"))
    assert set(store.revisions()) == set(names("a", "d", "e"))
    assert store.usage() == 3 * 1000 + CONFIG
    assert store.evict(frozenset()) == ()


def test_the_order_of_use_outlives_the_process_even_with_a_clock_set_back(store: AdapterStore, root: Path) -> None:
    for seed in "abcde":
        publish(store, content(seed))
    tomorrow = 4_000_000_000
    newest = root / f"state/revisions/{names('b')[0].removeprefix('sha256:')}.json"
    os.utime(newest, (tomorrow, tomorrow))
    store.close()
    again = AdapterStore.open(str(root), quota=3 * 1000 + CONFIG)
    again.touch(names("a")[0])
    assert again.evict(frozenset()) == tuple(names("c", "d"))
    again.close()


def test_what_is_kept_stays_however_far_over_the_quota(store: AdapterStore) -> None:
    for seed in "abcde":
        publish(store, content(seed))
    assert store.evict(frozenset(names("a", "b", "c", "d"))) == tuple(names("e"))
    assert set(store.revisions()) == set(names("a", "b", "c", "d"))


def test_an_unloaded_adapter_s_files_stay_for_as_long_as_the_engine_may_read_them(store: AdapterStore) -> None:
    """The caller keeps a revision until its grace is over; only then the quota takes it, and it is really gone."""
    _, path = publish(store, content("unloaded"))
    for seed in "abc":
        publish(store, content(seed))
    wanted = frozenset(names("a", "b", "c"))
    assert store.evict(wanted | {names("unloaded")[0]}) == ()
    assert read(path) == content("unloaded")
    assert store.evict(wanted) == tuple(names("unloaded"))
    assert not path.exists()


def test_a_quota_is_kept_over_any_number_of_adapters(root: Path) -> None:
    store = AdapterStore.open(str(root), quota=100_000)
    store.evict(frozenset())
    for number in range(20):
        tree = content(str(number), 15_000)
        store.need(15_000 + CONFIG, f"{number}")
        publish(store, tree, f"{number}")
        store.evict(frozenset({revision(tree)}))
        assert store.usage() <= 100_000
    assert len(store.revisions()) == 6
    contents = [*(root / "revisions").rglob("*"), *(root / "blobs").rglob("*"), *(root / "tmp").rglob("*")]
    on_disk = {path.stat().st_ino: path.stat().st_size for path in contents if path.is_file()}
    assert sum(on_disk.values()) == store.usage()
    store.close()


def test_content_that_another_revision_shares_stays_when_one_goes(store: AdapterStore) -> None:
    for seed in "abcd":
        publish(store, content(seed))
    store.evict(frozenset())
    for seed in "bcd":
        path = store.revisions()[names(seed)[0]]
        assert read(path) == content(seed)
        assert all(store.blob(file.sha256) for file in stored(content(seed)))
    assert store.blob(stored(content("a"))[1].sha256) is None


def test_without_a_quota_everything_stays(root: Path) -> None:
    store = AdapterStore.open(str(root))
    for seed in "abcde":
        publish(store, content(seed))
    assert store.evict(frozenset()) == ()
    store.need(10**6)
    assert len(store.revisions()) == 5
    store.close()


# -- need --------------------------------------------------------------------------------------------------------


def test_need_lets_the_unused_go_but_nothing_that_was_kept(store: AdapterStore) -> None:
    for seed in "abc":
        publish(store, content(seed))
    store.evict(frozenset(names("a", "c")))
    store.need(1000)
    assert set(store.revisions()) == set(names("a", "c"))
    with pytest.raises(DiskFull, match="2,000 bytes do not fit: of --disk-quota 3,008 bytes, 2,008 bytes are"):
        store.need(2000)
    assert set(store.revisions()) == set(names("a", "c"))


def test_need_takes_nothing_away_before_anybody_has_said_what_is_in_use(store: AdapterStore) -> None:
    for seed in "abc":
        publish(store, content(seed))
    with pytest.raises(DiskFull, match="Raise the quota, or remove adapters"):
        store.need(1)
    assert len(store.revisions()) == 3


def test_need_spares_what_was_published_since_anybody_said_what_is_in_use(store: AdapterStore) -> None:
    publish(store, content("a"))
    store.evict(frozenset())
    publish(store, content("b"))
    store.need(1500)
    assert list(store.revisions()) == names("b")
    with pytest.raises(DiskFull):
        store.need(2500)
    store.evict(frozenset())
    store.need(2500)
    assert not store.revisions()


def test_nothing_goes_for_what_does_not_fit_anyway(store: AdapterStore) -> None:
    for seed in "abc":
        publish(store, content(seed))
    store.evict(frozenset())
    with pytest.raises(DiskFull):
        store.need(10_000)
    assert len(store.revisions()) == 3


def test_two_downloads_are_not_promised_the_same_room(store: AdapterStore) -> None:
    store.need(2000, "one")
    with pytest.raises(DiskFull):
        store.need(2000, "two")
    assert store.usage() == 2000
    write(store.staging("one"), {"part": bytes(1500)})
    assert store.usage() == 2000
    store.need(2000, "one")
    store.discard("one")
    store.need(2000, "two")
    assert store.usage() == 2000


def test_a_promise_ends_with_the_publication(store: AdapterStore) -> None:
    store.need(2000, "k")
    publish(store, content("a"), "k")
    assert store.usage() == 1000 + CONFIG


def test_a_promise_ends_when_the_download_is_let_go_and_what_it_brought_goes_when_room_is_needed(
    store: AdapterStore,
) -> None:
    before = store.usage()
    store.need(500, "one")
    (store.staging("one") / "some").write_bytes(bytes(100))
    assert store.usage() == before + 500
    store.release("one")
    assert store.usage() == before + 100
    assert (store.staging("one") / "some").exists(), "it may be gone on with"
    store.release("one")
    store.need(store._quota - before - 50, "two")
    assert not (store.staging("one") / "some").exists()


def test_abandoned_downloads_go_before_any_adapter(store: AdapterStore, root: Path) -> None:
    publish(store, content("a"))
    write(store.staging("abandoned"), {"part": bytes(1500)})
    store.close()
    again = AdapterStore.open(str(root), quota=3 * 1000 + CONFIG)
    again.evict(frozenset())
    write(again.staging("mine"), {"part": bytes(500)})
    again.need(1000, "mine")
    assert sorted(path.name for path in (root / "tmp/staging").iterdir()) == ["mine"]
    assert list(again.revisions()) == names("a")
    again.close()


def test_a_resumed_download_is_not_abandoned(store: AdapterStore, root: Path) -> None:
    write(store.staging("mine"), {"part": bytes(1500)})
    store.close()
    again = AdapterStore.open(str(root), quota=3 * 1000)
    again.need(3000, "mine")
    assert read(again.staging("mine")) == {"part": bytes(1500)}
    again.close()


# -- a disk that is full -----------------------------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = Path(tempfile.mkdtemp(prefix="lora-sidecar-test-"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], check=False, capture_output=True)
    if mounted.returncode:
        path.rmdir()
        pytest.skip("mounting isn't permitted here")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
    path.rmdir()


def fill(path: Path) -> None:
    with (path / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_what_does_not_fit_on_the_disk_is_said_before_a_byte_is_read(small: Path) -> None:
    store = AdapterStore.open(str(small))
    with pytest.raises(DiskFull, match=rf"5\.0 MiB do not fit: [34]\.\d MiB are free on the file system of {small}"):
        store.need(5 * MIB)
    with pytest.raises(DiskFull, match="set --disk-quota, so that unused adapters are let go"):
        store.need(5 * MIB, "k")
    store.need(3 * MIB, "k")
    with pytest.raises(DiskFull):
        store.need(1 * MIB, "promised to k already")
    with (store.staging("k") / "part").open("wb") as file:
        file.truncate(3 * MIB)
    store.need(3 * MIB, "k")
    (store.staging("k") / "part").write_bytes(bytes(3 * MIB))
    store.need(3 * MIB, "k")
    store.close()


def test_a_quota_larger_than_the_disk_lets_the_unused_go_when_the_disk_is_full(small: Path) -> None:
    store = AdapterStore.open(str(small), quota=1000 * MIB)
    trees = [{**content(seed), "sub/adapter_model.safetensors": seed.encode() * MIB} for seed in "abc"]
    for tree in trees:
        publish(store, tree)
    store.evict(frozenset({revision(trees[1])}))
    store.need(2 * MIB)
    assert list(store.revisions()) == [revision(trees[1])]
    with pytest.raises(DiskFull, match="or remove adapters"):
        store.need(3 * MIB)
    store.close()


def test_on_a_full_disk_state_and_adapters_stay_as_they_were_and_all_goes_on_when_there_is_room(small: Path) -> None:
    store = AdapterStore.open(str(small))
    store.save("memory.json", b"old")
    publish(store, content("a"))
    staged = write(store.staging("b") / "files", content("b"))
    fill(small)
    with pytest.raises(DiskFull, match=r"saving .*memory.json: No space left on device"):
        store.save("memory.json", bytes(100_000))
    assert store.read("memory.json") == b"old"
    with pytest.raises(DiskFull, match="1 bytes do not fit: 0 bytes are free"):
        store.need(1)
    with pytest.raises(DiskFull, match="publishing sha256:"):
        store.publish(staged, stored(content("b")))
    assert list(store.revisions()) == names("a")
    assert store.verify(names("a")[0])
    assert read(staged) == content("b")
    store.close()

    again = AdapterStore.open(str(small))
    assert list(again.revisions()) == names("a")
    assert again.read("memory.json") == b"old"
    (small / "ballast").unlink()
    again.save("memory.json", b"new")
    again.publish(staged, stored(content("b")))
    assert set(again.revisions()) == set(names("a", "b"))
    assert all(again.verify(name) for name in names("a", "b"))
    again.close()


def test_eviction_works_on_a_full_disk(small: Path) -> None:
    store = AdapterStore.open(str(small), quota=1)
    publish(store, content("a"))
    fill(small)
    assert store.evict(frozenset()) == tuple(names("a"))
    assert not store.revisions()
    store.close()


# -- several threads ----------------------------------------------------------------------------------------------


def look(store: AdapterStore, trees: dict[str, dict[str, bytes]]) -> None:
    """What is offered is whole, or already gone."""
    for name, path in store.revisions().items():
        store.touch(name)
        with contextlib.suppress(FileNotFoundError):
            assert all(trees[name][file] == data for file, data in read(path).items())


def test_threads_that_publish_evict_and_read_at_once_see_only_whole_revisions(store: AdapterStore) -> None:
    seeds = [f"s{number}" for number in range(12)]
    trees = {revision(content(seed)): content(seed) for seed in seeds}
    published = threading.Event()

    def publishing(offset: int) -> None:
        for at in range(len(seeds)):
            publish(store, content(seeds[(at + offset) % len(seeds)]), f"{offset}-{at}")

    def until_published(work: Callable[[], object]) -> None:
        while not published.is_set():
            work()

    with ThreadPoolExecutor(5) as pool:
        others = [
            pool.submit(until_published, lambda: store.evict(frozenset())),
            pool.submit(until_published, lambda: look(store, trees)),
        ]
        publishers = [pool.submit(publishing, offset) for offset in (0, 4, 8)]
        wait(publishers)
        published.set()
    for future in others + publishers:
        future.result()
    store.evict(frozenset())
    assert store.usage() <= 3 * 1000 + CONFIG
    assert all(store.verify(name) for name in store.revisions())
