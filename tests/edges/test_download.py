"""The transfer of bytes: faults at any place, crashes between any two notes, transfers that hang."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.edges.download import ATTEMPTS, Closed, Download
from sidecar.edges.filesystem import StoreFailed
from sidecar.edges.origins import BLOCK, Sink
from sidecar.edges.partial import FILES, PartialContent, RunningHash, known_sha256
from sidecar.edges.slots import Slots
from sidecar.edges.threads import in_thread
from sidecar.model import Listing, RemoteFile
from sidecar.ports import OriginChanged, OriginDenied, OriginError

PART_BYTES = 16


class Memory:
    """An origin in memory that breaks its n-th answer after as many bytes as `faults` says (None: not at all)."""

    def __init__(self, contents: dict[str, bytes], faults: list[int | None] | None = None) -> None:
        self.contents = contents
        self.faults = iter(faults or [])
        self.delivered: list[tuple[str, int, int]] = []
        self.error: type[OriginError] = OriginError

    @property
    def listing(self) -> Listing:
        files = [RemoteFile(path=path, size=len(data)) for path, data in sorted(self.contents.items())]
        return Listing(files=tuple(files))

    async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        fault = next(self.faults, None)
        end = stop if fault is None else min(stop, start + fault)

        def deliver() -> None:
            for at in range(start, end, 5):
                sink(self.contents[file.path][at : min(at + 5, end)])

        await in_thread(deliver)
        self.delivered.append((file.path, start, end))
        if fault is not None:
            raise self.error("broken")


async def no_pause(_: float) -> None:
    await asyncio.sleep(0)


def no_reuse(_: str, __: Path) -> bool:
    return False


async def brought(directory: Path, origin: Memory) -> dict[str, str]:
    """sha256 by path, after a download that succeeds."""
    content = PartialContent(directory, origin.listing, no_reuse, PART_BYTES)
    try:
        download = Download(content, origin.read, Slots(3), pause=no_pause)
        files = await download.run()
        assert download.bytes_done == origin.listing.size
    finally:
        content.close()
    for path, data in origin.contents.items():
        assert (directory / FILES / path).read_bytes() == data
    return {file.path: file.sha256 for file in files}


def hashes(contents: dict[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(data).hexdigest() for path, data in contents.items()}


names = st.sampled_from(["a", "b", "sub/c", "sub/d/e"])
some_contents = st.dictionaries(names, st.binary(max_size=5 * PART_BYTES), min_size=1)


@given(some_contents, st.lists(st.none() | st.integers(0, 40), max_size=ATTEMPTS - 1))
@settings(max_examples=40)
def test_no_fault_costs_a_byte_that_is_here(contents: dict[str, bytes], faults: list[int | None]) -> None:
    origin = Memory(contents, faults)
    with TemporaryDirectory() as directory:
        assert asyncio.run(brought(Path(directory), origin)) == hashes(contents)
    assert sum(end - start for _, start, end in origin.delivered) == origin.listing.size


# The journal's length depends on which parts come first, so its beginning is drawn as a share of it.
@given(some_contents, st.integers(0, 12), st.integers(0, 200), st.binary(max_size=4))
@settings(max_examples=40)
def test_a_crash_at_any_place_is_taken_up_from_what_was_noted(
    contents: dict[str, bytes], answers: int, share: int, junk: bytes
) -> None:
    with TemporaryDirectory() as directory:
        dying = Memory(contents, [None] * answers + [7] * 100)
        dying.error = OriginDenied
        with suppress(OriginDenied):
            asyncio.run(brought(Path(directory), dying))
        # What a power cut leaves: some beginning of the journal, and behind it what no sector was written for.
        journal = Path(directory, "journal")
        noted = journal.read_bytes()
        journal.write_bytes(noted[: len(noted) * share // 200] + junk)
        assert asyncio.run(brought(Path(directory), Memory(contents))) == hashes(contents)


async def test_what_is_noted_is_not_fetched_again(tmp_path: Path) -> None:
    contents = {"a": b"1" * 10, "b": b"2" * (3 * PART_BYTES)}

    class Dying(Memory):
        async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
            if start < 32:
                return await super().read(file, start, stop, sink)
            while (tmp_path / "journal").read_bytes().count(b"\n") < 4:  # noqa: ASYNC110  # a file has no event
                await asyncio.sleep(0.001)
            raise OriginDenied("gone")

    dying = Dying(contents)
    with pytest.raises(OriginDenied):
        await brought(tmp_path, dying)
    again = Memory(contents)
    await brought(tmp_path, again)
    assert sorted(dying.delivered + again.delivered) == [("a", 0, 10), ("b", 0, 16), ("b", 16, 32), ("b", 32, 48)]
    last = Memory(contents)
    await brought(tmp_path, last)
    assert last.delivered == []


async def test_a_small_file_that_was_noted_but_not_synced_is_compared(tmp_path: Path) -> None:
    contents = {"a": b"1" * 10}
    await brought(tmp_path, Memory(contents))
    (tmp_path / FILES / "a").write_bytes(bytes(10))
    again = Memory(contents)
    assert await brought(tmp_path, again) == hashes(contents)
    assert again.delivered == [("a", 0, 10)]


async def test_a_noted_part_beyond_the_end_of_its_file_is_fetched_again(tmp_path: Path) -> None:
    contents = {"b": b"2" * (3 * PART_BYTES)}
    await brought(tmp_path, Memory(contents))
    with (tmp_path / FILES / "b").open("rb+") as file:
        file.truncate(PART_BYTES + 3)
    again = Memory(contents)
    assert await brought(tmp_path, again) == hashes(contents)
    assert sorted(again.delivered) == [("b", 16, 32), ("b", 32, 48)]


async def test_notes_about_another_version_are_worth_nothing(tmp_path: Path) -> None:
    old = Memory({"a": b"1" * 10, "b": b"2" * 40})
    await brought(tmp_path, old)
    new = Memory({"a": b"3" * 10, "b": b"4" * 41})
    assert await brought(tmp_path, new) == hashes(new.contents)


async def test_a_file_that_the_engine_may_read_is_never_written_to(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(b"served")
    target = tmp_path / "staging" / FILES / "a"
    target.parent.mkdir(parents=True)
    target.hardlink_to(blob)
    await brought(tmp_path / "staging", Memory({"a": b"fresh!"}))
    assert blob.read_bytes() == b"served"


async def test_content_that_is_on_the_disk_already_is_linked(tmp_path: Path) -> None:
    data = b"known" * 10
    sha256 = hashlib.sha256(data).hexdigest()
    blob = tmp_path / "blob"
    blob.write_bytes(data)
    blob.chmod(0o444)

    def reuse(wanted: str, target: Path) -> bool:
        assert wanted == sha256
        target.hardlink_to(blob)
        return True

    remote = RemoteFile(path="a", size=len(data), etag=f"sha256:{sha256}")
    (tmp_path / "staging").mkdir()
    content = PartialContent(tmp_path / "staging", Listing(files=(remote,)), reuse, PART_BYTES)
    origin = Memory({"a": b"never read"})
    (file,) = await Download(content, origin.read, Slots(1)).run()
    content.close()
    assert (file.sha256, origin.delivered) == (sha256, [])
    assert (tmp_path / "staging" / FILES / "a").samefile(blob)


def test_only_an_origin_that_says_so_tells_a_hash() -> None:
    digest = "0" * 64
    assert known_sha256(RemoteFile(path="a", size=1, etag=f"sha256:{digest}")) == digest
    for etag in (digest, f'"sha256:{digest}"', f"sha256:{digest}0", "sha256:x", ""):
        assert known_sha256(RemoteFile(path="a", size=1, etag=etag)) == ""


@pytest.mark.parametrize("error", [OriginDenied, OriginChanged])
async def test_what_no_retry_heals_is_not_retried(tmp_path: Path, error: type[OriginError]) -> None:
    origin = Memory({"a": b"1"}, [0])
    origin.error = error
    with pytest.raises(error):
        await brought(tmp_path, origin)
    assert len(origin.delivered) == 1


async def test_retries_of_a_part_are_bounded(tmp_path: Path) -> None:
    origin = Memory({"a": b"1"}, [0] * 100)
    with pytest.raises(OriginError, match="broken"):
        await brought(tmp_path, origin)
    assert len(origin.delivered) == ATTEMPTS


class Wrong(Memory):
    """Gives more, or less, than it was asked for, and calls it a success."""

    def __init__(self, surplus: int) -> None:
        super().__init__({"a": b"1" * 10})
        self.surplus = surplus

    async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        await in_thread(lambda: sink(b"1" * (stop - start + self.surplus)))


@pytest.mark.parametrize(("surplus", "error"), [(1, OriginChanged), (-10, OriginError)])
async def test_more_or_less_than_was_asked_for_is_an_error(
    tmp_path: Path, surplus: int, error: type[OriginError]
) -> None:
    with pytest.raises(error):
        await brought(tmp_path, Wrong(surplus))


async def test_a_reader_that_was_given_up_shifts_nothing(tmp_path: Path) -> None:
    """Its last block comes after its successor has begun."""
    late: list[Sink] = []
    contents = {"a": b"0123456789"}

    class Hanging(Memory):
        async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
            if late:
                with pytest.raises(Closed):
                    late[0](b"0123456789")
                await super().read(file, start, stop, sink)
            else:
                late.append(sink)
                await asyncio.Event().wait()

    origin = Hanging(contents)
    content = PartialContent(tmp_path, origin.listing, no_reuse, PART_BYTES)
    slots = Slots(1, look_seconds=0.01, give_up=0.02)
    (file,) = await Download(content, origin.read, slots, pause=no_pause).run()
    content.close()
    assert file.sha256 == hashes(contents)["a"]


async def test_a_write_after_the_end_goes_nowhere(tmp_path: Path) -> None:
    """Its descriptor may be another file's by then."""
    origin = Memory({"a": b"1" * 10})
    content = PartialContent(tmp_path, origin.listing, no_reuse, PART_BYTES)
    content.close()
    with pytest.raises(StoreFailed):
        content.files[0].write(0, b"late")
    with pytest.raises(StoreFailed):
        content.files[0].finish()


def test_parts_that_become_whole_together_are_hashed_once(tmp_path: Path) -> None:
    data = b"0123456789abcdef" * (BLOCK // 4)
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file, ThreadPoolExecutor(8) as threads:
        for _ in range(10):
            running = RunningHash()
            stops = [BLOCK * quarter + 7 for quarter in range(4)] * 4 + [len(data)]
            list(threads.map(lambda stop, running=running: running.catch_up(file.fileno(), stop), stops))
            assert running.hexdigest() == hashlib.sha256(data).hexdigest()


def forever() -> Coroutine[None, None, bool]:
    return asyncio.Event().wait()


async def test_transfers_that_hang_give_their_slots_away() -> None:
    slots = Slots(2, look_seconds=0.01, give_up=1000)
    hanging = [asyncio.create_task(slots.run(forever, lambda: 0)) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert await slots.run(lambda: asyncio.sleep(0, "done"), lambda: 0) == "done"
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    # What was given away is not given back again.
    assert await most_at_once(slots) == 2


async def test_a_transfer_that_hangs_too_long_is_given_up() -> None:
    with pytest.raises(OriginError, match="the file: no byte"):
        await Slots(1, look_seconds=0.01, give_up=0.02).run(forever, lambda: 0, "the file")


async def test_a_transfer_that_moves_keeps_its_slot() -> None:
    slots = Slots(1, look_seconds=0.01, give_up=0.02)
    counter = iter(range(10**9))
    moving = asyncio.create_task(slots.run(lambda: asyncio.sleep(0.2), lambda: next(counter)))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(slots.run(lambda: asyncio.sleep(0), lambda: 0))
    await moving
    assert not waiting.done()
    await waiting


async def test_no_more_than_so_many_at_once() -> None:
    assert await most_at_once(Slots(3)) == 3


async def most_at_once(slots: Slots) -> int:
    """How many of many transfers are under way together."""
    now, most = 0, 0

    async def transfer() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    await asyncio.gather(*(slots.run(transfer, lambda: 0) for _ in range(30)))
    return most
