"""Archives: unpacked whole and inside their directory, or refused with the reason."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import stat
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from sidecar.core.preflight import Limits
from sidecar.edges.archive import Interrupted, unpack
from sidecar.ports import AdapterRejected, EdgeError
from tests.edges.stored import Tree, content, read, revision, stored

FILES: dict[str, bytes] = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": b"w" * 5000, "sub/x": b""}
LIMITS = Limits(max_files=10, max_bytes=100_000)


def tar_bytes(tree: Tree, mode: str = "w", form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=form) as archive:  # type: ignore[call-overload]
        for name, data in tree.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def tar_of(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info in members:
            archive.addfile(info, io.BytesIO(b"x" * info.size))
    return out.getvalue()


def zip_bytes(tree: Tree, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in tree.items():
            archive.writestr(name, data)
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info


@pytest.fixture
def unpacked(memory_path: Path) -> Callable[[bytes], dict[str, bytes]]:
    """What lies in the directory afterwards; anything beside it is a failure."""

    def run(raw: bytes, limits: Limits = LIMITS) -> dict[str, bytes]:
        inner = memory_path / "inner"
        inner.mkdir(exist_ok=True)
        archive = memory_path / "adapter.archive"
        archive.write_bytes(raw)
        try:
            files = unpack(archive, inner / "target", limits)
        finally:
            assert sorted(path.name for path in memory_path.iterdir()) == ["adapter.archive", "inner"]
            assert [path.name for path in inner.iterdir()] == ["target"]
        found = read(inner / "target")
        assert sorted(files, key=lambda file: file.path) == sorted(stored(found), key=lambda file: file.path)
        return found

    return run


Unpacked = Callable[..., dict[str, bytes]]

GOOD = {
    "tar": tar_bytes(FILES),
    "tar.gz": tar_bytes(FILES, "w:gz"),
    "tar in two gzip members": gzip.compress(tar_bytes(FILES)[:700]) + gzip.compress(tar_bytes(FILES)[700:]),
    "ustar": tar_bytes(FILES, form=tarfile.USTAR_FORMAT),
    "gnu": tar_bytes(FILES, form=tarfile.GNU_FORMAT),
    "zip": zip_bytes(FILES),
    "zip stored": zip_bytes(FILES, zipfile.ZIP_STORED),
    "./": tar_bytes({f"./{name}": data for name, data in FILES.items()}),
    "one folder": tar_bytes({f"sql-v3/{name}": data for name, data in FILES.items()}),
    "one folder in a zip": zip_bytes({f"sql-v3/{name}": data for name, data in FILES.items()}),
    "a folder with a file of its name": tar_bytes({f"sub/{name}": data for name, data in FILES.items()}),
    "what macOS adds": zip_bytes(
        {
            **{f"sql/{name}": data for name, data in FILES.items()},
            "__MACOSX/sql/._adapter_config.json": b"x",
            "sql/.DS_Store": b"x",
            "sql/._x": b"x",
        }
    ),
    "no end marker": tar_bytes(FILES)[: 512 * 15],
}


@pytest.mark.parametrize("kind", GOOD)
def test_an_adapter_comes_out_of_every_kind_of_archive(unpacked: Unpacked, kind: str) -> None:
    assert unpacked(GOOD[kind]) == FILES


@pytest.mark.parametrize("command", [["tar", "-cf"], ["tar", "-czf"], ["tar", "--format=posix", "-cf"]])
def test_an_adapter_comes_out_of_what_the_system_s_tar_makes(
    unpacked: Unpacked, tmp_path: Path, command: list[str]
) -> None:
    tree = {**content("a"), "adapter_config.json": b"{}", "d" * 120 + "/" + "ü" * 60 + ".json": b"long"}
    source = tmp_path / "inner/source"
    for path, data in tree.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(data)
    made = subprocess.run([*command, "-", "-C", source, "."], capture_output=True, check=True).stdout
    subprocess.run(["rm", "-r", source], check=True)
    assert unpacked(made) == tree


def test_two_top_folders_are_kept_and_so_is_one_without_an_adapter(unpacked: Unpacked) -> None:
    for tree in (
        {"a/adapter_config.json": b"{}", "b/x": b""},
        {"a/model.bin": b""},
        {"a/b/adapter_config.json": b"{}"},
    ):
        assert unpacked(tar_bytes(tree)) == tree


def test_names_in_every_form_are_read(unpacked: Unpacked) -> None:
    tree = {
        "/".join(["long" * 20] * 5) + ".json": b"1",
        "ünïcode-文件.json": b"2",
        "a" * 99: b"3",
        "b" * 100: b"4",
        "d/" + "c" * 100: b"5",
    }
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        assert unpacked(tar_bytes(tree, form=form)) == tree


def test_what_is_left_of_an_earlier_attempt_is_gone(tmp_path: Path) -> None:
    (tmp_path / "target/old").mkdir(parents=True)
    (tmp_path / "target/old/file").write_bytes(b"x")
    (tmp_path / "a.tar").write_bytes(GOOD["tar"])
    unpack(tmp_path / "a.tar", tmp_path / "target", LIMITS)
    assert read(tmp_path / "target") == FILES


@pytest.mark.parametrize("pack", [tar_bytes, zip_bytes])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../../x", "'..'"),
        ("p/../../x", "'..'"),
        ("/abs", "absolute"),
        (".//abs", "absolute"),
        ("a\\..\\x", "backslash"),
        ("a\nb", "control"),
        ("a//b", "empty segment"),
        ("a/./b", "'.'"),
        ("x" * 300, "300 bytes"),
        ("n/" * 400 + "x", "characters"),
    ],
)
def test_a_name_that_leaves_the_directory_is_refused(
    unpacked: Unpacked, pack: Callable[[Tree], bytes], name: str, why: str
) -> None:
    with pytest.raises(AdapterRejected, match=why) as refused:
        unpacked(pack({**FILES, name: b"x"}))
    assert str(refused.value).startswith("adapter.archive: ")
    assert "at most 512 characters" in str(refused.value)


def sparse() -> tarfile.TarInfo:
    info = member("s", size=512)
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    return info


BAD_MEMBERS: list[tuple[Iterable[tarfile.TarInfo], str]] = [
    ([member("link", tarfile.SYMTYPE, link="/etc/passwd")], "link' is a symbolic link"),
    ([member("link", tarfile.SYMTYPE, link="/tmp"), member("link/x", size=1)], "link' is a symbolic link"),
    ([member("hard", tarfile.LNKTYPE, link="../../etc/passwd")], "hard' is a hard link"),
    ([member("dev", tarfile.CHRTYPE)], "dev' is a character device"),
    ([member("dev", tarfile.BLKTYPE)], "dev' is a block device"),
    ([member("fifo", tarfile.FIFOTYPE)], "fifo' is a FIFO"),
    ([member("s", tarfile.GNUTYPE_SPARSE)], "s' is a sparse file"),
    ([member("o", b"Z")], "o' is of the unknown type b'Z'"),
    ([sparse()], "is a sparse file"),
    ([member("a", size=1), member("a", size=1)], '"a": is there twice'),
    ([member("a", size=1), member("a/b", size=1)], '"a": is both a file and a folder'),
    ([member("a/b", size=1), member("a", size=1)], '"a": is both a file and a folder'),
    ([member(f"f{n}") for n in range(11)], "holds more than 10 files, the limit"),
    ([member(f"d{n}", tarfile.DIRTYPE) for n in range(100)], "has more than 40 headers"),
    ([member(f"._{n}", size=1) for n in range(100)], "has more than 40 headers"),
]


@pytest.mark.parametrize(("members", "why"), BAD_MEMBERS, ids=[why for _, why in BAD_MEMBERS])
def test_a_member_that_is_no_plain_file_is_refused(
    unpacked: Unpacked, members: list[tarfile.TarInfo], why: str
) -> None:
    with pytest.raises(AdapterRejected, match=why):
        unpacked(tar_of(*members))


def test_a_member_without_a_name_is_refused(unpacked: Unpacked) -> None:
    raw = zip_bytes({"a": b"x"})
    for magic, length, name in ((b"PK\x03\x04", 26, 30), (b"PK\x01\x02", 28, 46)):
        start = raw.index(magic)
        raw = raw[: start + length] + b"\0\0" + raw[start + length + 2 : start + name] + raw[start + name + 1 :]
    end = raw.index(b"PK\x05\x06")
    start = raw.index(b"PK\x01\x02")
    raw = raw[: end + 12] + (end - start).to_bytes(4, "little") + start.to_bytes(4, "little") + raw[end + 20 :]
    with pytest.raises(AdapterRejected, match="the path is empty"):
        unpacked(raw)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_a_link_or_device_in_a_zip_is_refused(unpacked: Unpacked, kind: int) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo("odd")
        info.external_attr = (kind | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(AdapterRejected, match=r"odd' is (a symbolic link|no plain file)"):
        unpacked(out.getvalue())


def test_an_encrypted_or_oddly_compressed_zip_is_refused(unpacked: Unpacked) -> None:
    with pytest.raises(AdapterRejected, match="compressed by method 14, not by deflate"):
        unpacked(zip_bytes(FILES, zipfile.ZIP_LZMA))
    raw = bytearray(zip_bytes({"a": b"x"}, zipfile.ZIP_STORED))
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(AdapterRejected, match="'a' is encrypted"):
        unpacked(bytes(raw))


@pytest.mark.parametrize("pack", [lambda tree: tar_bytes(tree, "w:gz"), zip_bytes, tar_bytes])
def test_a_bomb_is_refused_once_the_limit_of_bytes_is_out(
    unpacked: Unpacked, memory_path: Path, pack: Callable[[Tree], bytes]
) -> None:
    bomb = pack({"adapter_config.json": b"{}", "zeros": bytes(3_000_000)})
    with pytest.raises(AdapterRejected, match="unpacks to more than 100000 bytes, the limit for an adapter"):
        unpacked(bomb)
    on_disk = sum(path.stat().st_size for path in (memory_path / "inner").rglob("*") if path.is_file())
    assert 0 < on_disk <= 100_000


def test_a_zip_that_lies_about_a_size_can_t_get_around_the_limit(unpacked: Unpacked) -> None:
    raw = bytearray(zip_bytes({"zeros": bytes(3_000_000)}))
    for magic, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = raw.index(magic) + at
        raw[start : start + 4] = (10).to_bytes(4, "little")
    with pytest.raises(AdapterRejected):
        unpacked(bytes(raw))


def test_an_extension_header_of_gigabytes_is_not_read(unpacked: Unpacked) -> None:
    info = member("././@LongLink", tarfile.GNUTYPE_LONGNAME)
    info.size = 7 * 1024**3
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(AdapterRejected, match="extension header of 7516192768 bytes, more than 65536"):
        unpacked(gzip.compress(header + bytes(100_000)))


def test_a_zip_s_list_of_members_of_gigabytes_is_not_read(unpacked: Unpacked) -> None:
    raw = zip_bytes(FILES)
    end = bytearray(raw[raw.index(b"PK\x05\x06") :])
    end[12:16] = (2**21).to_bytes(4, "little")
    with pytest.raises(AdapterRejected, match="list of members of 2097152 bytes, more than 1048576"):
        unpacked(b"PK\x03\x04" + bytes(2**21) + raw[: raw.index(b"PK\x05\x06")] + bytes(end))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "is cut off"),
        (b"hello", "is cut off"),
        (b"<html>not found</html>" * 100, "is not a tar archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is cut off"),
        (b"\x1f\x8b" + b"x" * 1000, "(?i)compression method"),
        (b"PK\x03\x04" + b"x" * 1000, "not a zip file"),
        (GOOD["tar"][:600], "is cut off"),
        (GOOD["tar.gz"][:-60], "is cut off"),
        (GOOD["zip"][:-60], "not a zip file"),
        (gzip.compress(b"x" * 2000, mtime=0), "is not a tar archive"),
        (b"BZh9" + b"x" * 1000, "is not a tar archive"),
    ],
)
def test_what_is_no_archive_or_only_a_part_of_one_is_refused(unpacked: Unpacked, raw: bytes, why: str) -> None:
    with pytest.raises(AdapterRejected, match=why) as refused:
        unpacked(raw)
    assert "a whole .tar, .tar.gz or .zip is needed" in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip", "gnu"])
def test_an_archive_with_any_bytes_changed_is_unpacked_or_refused_and_never_leaves_its_place(
    unpacked: Unpacked, kind: str
) -> None:
    rng = random.Random(kind)
    for _ in range(60):
        raw = bytearray(GOOD[kind])
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.choice([0, 1, 0x2E, 0x2F, 0x35, 0x80, 0xFF, rng.randrange(256)])
        if rng.random() < 0.3:
            raw = raw[: rng.randrange(len(raw))]
        # That nothing lies beside the directory is checked each time.
        with contextlib.suppress(AdapterRejected):
            unpacked(bytes(raw))


def test_unpacking_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(GOOD["tar"])
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted, match=r"adapter of s3://b/a.tar: unpacking was interrupted"):
        unpack(tmp_path / "a.tar", tmp_path / "target", LIMITS, name="adapter of s3://b/a.tar", stop=stop)


def test_an_archive_that_is_gone_is_no_fault_of_its_content(tmp_path: Path) -> None:
    with pytest.raises(EdgeError, match="No such file") as error:
        unpack(tmp_path / "a.tar", tmp_path / "target", LIMITS)
    assert not isinstance(error.value, AdapterRejected)


def test_equal_content_has_one_revision_whatever_it_was_packed_in(tmp_path: Path) -> None:
    found = set()
    for kind, raw in GOOD.items():
        (tmp_path / "archive").write_bytes(raw)
        files = unpack(tmp_path / "archive", tmp_path / "target", LIMITS, name=kind)
        assert {file.path for file in files} == set(FILES)
        found.add(revision(read(tmp_path / "target")))
    assert found == {revision(FILES)}


def test_unpacked_files_can_t_be_run(tmp_path: Path) -> None:
    info = member("script", size=3)
    info.mode = 0o6755
    (tmp_path / "a").write_bytes(tar_of(info))
    unpack(tmp_path / "a", tmp_path / "target", LIMITS)
    assert os.stat(tmp_path / "target/script").st_mode & 0o7111 == 0
