"""Origin file://: directories, archives, links, and files that change while they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.edges.origins import BLOCK, Origin, Origins
from sidecar.model import MAX_FILES, Listing, RemoteFile
from sidecar.ports import AdapterRejected, OriginChanged, OriginDenied
from sidecar.settings import Settings


def opened(path: Path) -> Origin:
    return Origins(Settings()).open(f"file://{path}")


async def content(origin: Origin, file: RemoteFile, start: int = 0, stop: int | None = None) -> bytes:
    blocks: list[bytes] = []
    await origin.read(file, start, file.size if stop is None else stop, blocks.append)
    return b"".join(blocks)


def sizes(listing: Listing) -> dict[str, int]:
    return {file.path: file.size for file in listing.files}


async def test_a_directory_is_listed_with_its_subdirectories_in_the_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b c").write_bytes(b"22")
    (tmp_path / "z").write_bytes(b"1")
    (tmp_path / "ä").write_bytes(b"")
    listing = await opened(tmp_path).listing()
    assert list(sizes(listing).items()) == [("sub/b c", 2), ("z", 1), ("ä", 0)]
    assert not listing.archive


async def test_ranges_come_in_order_and_whole(tmp_path: Path) -> None:
    data = os.urandom(2 * BLOCK + 77)
    (tmp_path / "x").write_bytes(data)
    origin = opened(tmp_path)
    (file,) = (await origin.listing()).files
    assert await content(origin, file) == data
    assert await content(origin, file, 5, BLOCK + 9) == data[5 : BLOCK + 9]


async def test_an_archive_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"packed")
    origin = opened(tmp_path / "x.tar.gz")
    listing = await origin.listing()
    assert (sizes(listing), listing.archive) == ({"x.tar.gz": 6}, True)
    assert await content(origin, listing.files[0]) == b"packed"


async def test_a_directory_may_be_named_like_an_archive(tmp_path: Path) -> None:
    (tmp_path / "x.zip").mkdir()
    (tmp_path / "x.zip" / "x.zip").write_bytes(b"inner")
    origin = opened(tmp_path / "x.zip")
    listing = await origin.listing()
    assert (sizes(listing), listing.archive) == ({"x.zip": 5}, False)
    assert await content(origin, listing.files[0]) == b"inner"


async def test_a_link_to_the_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "x").write_bytes(b"1")
    (tmp_path / "current").symlink_to("v1")
    origin = opened(tmp_path / "current")
    listing = await origin.listing()
    assert await content(origin, listing.files[0]) == b"1"


async def test_a_config_map_volume_is_listed_once(tmp_path: Path) -> None:
    (tmp_path / "..2026_01").mkdir()
    (tmp_path / "..2026_01" / "x").write_bytes(b"1")
    (tmp_path / "..data").symlink_to("..2026_01")
    (tmp_path / "x").symlink_to("..data/x")
    assert sizes(await opened(tmp_path).listing()) == {"x": 1}


async def test_a_snapshot_of_the_hub_clients_cache_works(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--o--r" / "snapshots" / "abc"
    blobs = tmp_path / "models--o--r" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1234").write_bytes(b"blob")
    (snapshot / "x").symlink_to("../../blobs/1234")
    origin = opened(snapshot)
    listing = await origin.listing()
    assert await content(origin, listing.files[0]) == b"blob"


def _link_outside(root: Path) -> None:
    (root.parent / "secret").write_bytes(b"s")
    (root / "x").symlink_to(root.parent / "secret")


def _link_to_directory(root: Path) -> None:
    (root / "sub").symlink_to(root.parent)


def _pipe(root: Path) -> None:
    os.mkfifo(root / "x")


def _strange_name(root: Path) -> None:
    (root / "a\\b").write_bytes(b"")


def _too_many(root: Path) -> None:
    for number in range(MAX_FILES + 1):
        (root / str(number)).touch()


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (_link_outside, "outside of the adapter's directory"),
        (_link_to_directory, "link to a directory"),
        (_pipe, "not an ordinary file"),
        (_strange_name, "backslash"),
        (_too_many, f"may have {MAX_FILES}"),
    ],
)
async def test_what_no_adapter_looks_like_is_rejected(tmp_path: Path, make: Callable[[Path], None], fault: str) -> None:
    root = tmp_path / "adapter"
    root.mkdir()
    make(root)
    with pytest.raises(AdapterRejected, match=fault) as raised:
        await opened(root).listing()
    assert str(root) in str(raised.value)


async def test_what_is_not_there_is_denied(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_bytes(b"")
    for name, fault in (("missing", "No such file"), ("empty", "empty directory"), ("text", "neither a directory")):
        with pytest.raises(OriginDenied, match=fault):
            await opened(tmp_path / name).listing()


def _rewrite(path: Path) -> None:
    path.write_bytes(b"67890")


def _grow(path: Path) -> None:
    path.write_bytes(b"123456")


def _replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"12345")
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.rename(path)


@pytest.mark.parametrize("change", [_rewrite, _grow, _replace, Path.unlink])
async def test_a_file_changed_since_its_listing_is_not_read(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    os.utime(path, ns=(0, 10**18))
    origin = opened(tmp_path)
    (file,) = (await origin.listing()).files
    change(path)
    with pytest.raises(OriginChanged, match="x"):
        await content(origin, file)


async def test_a_file_changed_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1" * (3 * BLOCK))
    os.utime(path, ns=(0, 10**18))
    origin = opened(tmp_path)
    (file,) = (await origin.listing()).files

    def change(_: bytes) -> None:
        path.write_bytes(b"2" * (3 * BLOCK))

    with pytest.raises(OriginChanged):
        await origin.read(file, 0, file.size, change)


def test_a_uri_that_is_none_is_rejected() -> None:
    with pytest.raises(AdapterRejected, match="unknown scheme"):
        Origins(Settings()).open("gs://bucket/x")
