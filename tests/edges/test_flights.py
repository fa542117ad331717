"""What can be read of a download under way: chunks as they become whole, however the bytes come."""

from __future__ import annotations

import asyncio
import hashlib
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.flight import CHUNK, chunks, span
from sidecar.edges.flights import Flight, FlightFile, Flights
from sidecar.model import Listing, RemoteFile
from tests.edges.fetching import wanted
from tests.edges.gossip_nodes import until

SIZE = 3 * CHUNK + 100
DATA = random.Random(1).randbytes(SIZE)
LISTING = Listing(files=(RemoteFile(path="weights", size=SIZE, etag="e"), RemoteFile(path="empty", size=0, etag="e")))


def expected(chunk: int) -> bytes:
    start, stop = span(SIZE, chunk)
    return hashlib.sha256(DATA[start:stop]).digest()


@settings(max_examples=30)
@given(st.lists(st.integers(1, SIZE - 1), max_size=6), st.lists(st.integers(0, SIZE - 1), max_size=6))
def test_chunks_are_hashed_however_the_bytes_are_cut_into_streams_and_blocks(
    bounds: list[int], cuts: list[int]
) -> None:
    """Each stream brings its part in order; streams take turns as they like, and a stream begins at a chunk."""
    told: list[int] = []
    file = FlightFile(Path("unused"), SIZE, (), lambda: told.append(1))
    starts = sorted({0, *(bound // CHUNK * CHUNK for bound in bounds)})
    streams = list(zip(starts, [*starts[1:], SIZE], strict=True))
    for start, stop in reversed(streams):
        edges = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
        for one, other in pairwise(edges):
            file.wrote(one, DATA[one:other])
    assert file.hashes == {chunk: expected(chunk) for chunk in range(chunks(SIZE))}
    assert len(told) == chunks(SIZE)
    assert file.received == SIZE


def test_a_chunk_with_a_hole_is_never_whole() -> None:
    file = FlightFile(Path("unused"), SIZE, (), lambda: None)
    file.wrote(0, DATA[:1000])
    file.wrote(2000, DATA[2000:CHUNK])
    assert file.hashes == {}
    file.wrote(1000, DATA[1000:CHUNK])
    assert file.hashes == {0: expected(0)}


async def test_what_an_earlier_process_brought_can_be_read_too(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    file = FlightFile(path, SIZE, [(0, CHUNK + 5), (3 * CHUNK, SIZE)], lambda: None)
    assert [await file.hash_of(chunk) for chunk in range(4)] == [expected(0), None, None, expected(3)]
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.handle()


async def test_who_waits_is_answered_when_the_chunk_is_whole_and_let_go_when_it_never_will_be(tmp_path: Path) -> None:
    flight = Flight(LISTING, tmp_path, lambda file: ())
    waiting = asyncio.create_task(flight.wait_for(0, 1, 10))
    sink = flight.tee(LISTING.files[0], CHUNK, lambda block: None)
    await asyncio.to_thread(sink, DATA[CHUNK : CHUNK + 10])
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.to_thread(sink, DATA[CHUNK + 10 : 2 * CHUNK])
    assert await waiting == expected(1)
    assert flight.progress == CHUNK
    late = asyncio.create_task(flight.wait_for(0, 2, 10))
    await asyncio.sleep(0)
    flight.close()
    assert await late is None
    assert await Flight(LISTING, tmp_path, lambda file: ()).wait_for(0, 0, 0.01) is None


async def test_a_sink_that_refuses_is_not_noted(tmp_path: Path) -> None:
    flight = Flight(LISTING, tmp_path, lambda file: ())

    def refuse(block: bytes) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        flight.tee(LISTING.files[0], 0, refuse)(DATA[:CHUNK])
    assert flight.progress == 0
    flight.close()


async def test_a_download_that_ended_is_read_though_its_files_have_other_names_now(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(DATA)
    flights = Flights()
    with flights.share(wanted("file:///somewhere"), LISTING, tmp_path, lambda file: [(0, file.size)]) as flight:
        pass
    (tmp_path / "weights").unlink()
    assert [await flight.wait_for(0, chunk, 0) for chunk in range(4)] == [expected(chunk) for chunk in range(4)]
    flights.close()


async def test_a_download_is_found_while_it_lasts_and_a_little_longer_if_it_ended_well(tmp_path: Path) -> None:
    flights, wants = Flights(linger=0.05), wanted("file:///somewhere")
    with flights.share(wants, LISTING, tmp_path) as flight:
        name = next(iter(flights._flights))
        assert flights.find(name) is flight
    assert flights.find(name) is flight
    await until(lambda: flights.find(name) is None, 5)
    assert flight.over
    with pytest.raises(RuntimeError, match="broken"), flights.share(wants, LISTING, tmp_path):
        raise RuntimeError("broken")
    assert flights.find(name) is None
    with flights.share(wants, LISTING, tmp_path) as first, flights.share(wants, LISTING, tmp_path) as second:
        assert first.over
        assert flights.find(name) is second
    flights.close()
    assert second.over
