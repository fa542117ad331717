"""Who reads from whom, and how files are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.flight import CHUNK, chunks, flight_id, span, upstream
from sidecar.model import Listing, RemoteFile

names = st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=40)


@pytest.mark.parametrize(
    ("rank", "line"),
    [(0, []), (1, [0]), (2, [0]), (3, [1, 0]), (6, [2, 0]), (7, [3, 1, 0]), (14, [6, 2, 0])],
)
def test_each_worker_reads_from_its_parent_in_a_tree_of_two_then_from_the_parents_above(
    rank: int, line: list[int]
) -> None:
    targets = [f"worker-{n}" for n in range(20)]
    assert upstream(targets, f"worker-{rank}")[: len(line)] == [f"worker-{n}" for n in line]


@given(names, st.data())
def test_everyone_before_and_nobody_behind_is_a_source(targets: list[str], data: st.DataObject) -> None:
    me = data.draw(st.sampled_from([*targets, "no target"]))
    rank = targets.index(me) if me in targets else len(targets)
    found = upstream(targets, me)
    assert sorted(found) == sorted(targets[:rank])
    assert len(set(found)) == len(found)


@given(names)
def test_no_worker_feeds_more_than_two_at_first(targets: list[str]) -> None:
    parents = [found[0] for name in targets if (found := upstream(targets, name))]
    assert all(parents.count(name) <= 2 for name in targets)


@given(st.integers(0, 10 * CHUNK))
def test_chunks_cover_a_file_without_gap_or_overlap(size: int) -> None:
    spans = [span(size, chunk) for chunk in range(chunks(size))]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][: len(spans)]
    assert (spans[-1][1] if spans else 0) == size
    assert all(0 < stop - start <= CHUNK for start, stop in spans)


def test_another_source_path_size_or_etag_is_another_flight() -> None:
    def name(source: str = "s", path: str = "p", size: int = 1, etag: str = "e") -> str:
        return flight_id(source, Listing(files=(RemoteFile(path=path, size=size, etag=etag),)))

    found = {name(), name(source="t"), name(path="q"), name(size=2), name(etag="f")}
    assert len(found) == 5
    assert name() in found
