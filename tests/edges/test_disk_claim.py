"""Claiming the adapters directory: one agent a directory, and every obstacle is said with its way out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.edges.adapters_dir import StoreUnusable
from sidecar.edges.disk import AdapterStore

ROOT = Path(__file__).parents[2]
NOBODY = 65534

HOLD = """
import sys
from sidecar.edges.disk import AdapterStore
store = AdapterStore.open(sys.argv[1], holder=sys.argv[2])
print("open", flush=True)
sys.stdin.read()
"""
TRY = """
import sys
from sidecar.edges.disk import AdapterStore
from sidecar.ports import EdgeError
try:
    store = AdapterStore.open(sys.argv[1])
    name, path = store.publish(store.staging("k"), [])
    store.evict(frozenset())
    print("fine")
except EdgeError as error:
    print(error)
"""

AS_NOBODY = f"""
import os, sys
from sidecar.edges.disk import AdapterStore
from tests.edges.stored import content, publish, read
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )


def output(script: str, *arguments: str) -> str:
    with start(script, *arguments) as process:
        return process.communicate(timeout=30)[0]


def output_as_nobody(script: str, *arguments: str) -> str:
    """The script is run with everything imported before it gives up being root, who may read the interpreter."""
    return output(AS_NOBODY + script, *arguments)


def test_what_is_missing_is_made(tmp_path: Path) -> None:
    AdapterStore.open(str(tmp_path / "adapters")).close()
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert made == {
        "adapters",
        "adapters/revisions",
        "adapters/blobs",
        "adapters/blobs/sha256",
        "adapters/state",
        "adapters/state/lock",
        "adapters/state/revisions",
        "adapters/tmp",
        "adapters/tmp/staging",
    }


def test_the_engine_s_user_can_read_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        AdapterStore.open(str(tmp_path / "adapters")).close()
    finally:
        os.umask(before)
    assert (tmp_path / "adapters").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "adapters/revisions").stat().st_mode & 0o777 == 0o755


def test_a_second_process_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    with start(HOLD, str(tmp_path), "worker-7") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreUnusable) as refused:
            AdapterStore.open(str(tmp_path))
        assert f"worker-7 (pid {holder.pid} on " in str(refused.value)
        assert str(tmp_path) in str(refused.value)
        assert f"worker-7 (pid {holder.pid} on " in output(TRY, str(tmp_path))
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    # Killed, it can't say goodbye; the lock goes with it.
    AdapterStore.open(str(tmp_path)).close()


def test_a_second_store_in_one_process_is_refused_too(tmp_path: Path) -> None:
    first = AdapterStore.open(str(tmp_path), holder="me")
    with pytest.raises(StoreUnusable, match=f"in use by me .pid {os.getpid()}"):
        AdapterStore.open(str(tmp_path))
    first.close()
    first.close()
    AdapterStore.open(str(tmp_path)).close()


def test_the_lock_does_not_pass_to_child_processes(tmp_path: Path) -> None:
    first = AdapterStore.open(str(tmp_path))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        first.close()
        AdapterStore.open(str(tmp_path)).close()


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match=f"{tmp_path}/a does not exist; mount the volume"):
        AdapterStore.open(str(tmp_path / "a/b"))


def test_a_file_in_the_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(StoreUnusable, match="f is not a directory: name one"):
        AdapterStore.open(str(tmp_path / "f"))
    (tmp_path / "dangling").symlink_to("/nonexistent")
    with pytest.raises(StoreUnusable, match="dangling is not a directory"):
        AdapterStore.open(str(tmp_path / "dangling"))


@pytest.mark.parametrize("name", ["revisions", "blobs", "state", "tmp"])
def test_a_part_that_is_a_link_or_a_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnusable, match=f"root/{name} is not a directory; remove it"):
        AdapterStore.open(str(tmp_path / "root"))


def test_a_directory_whose_tmp_belongs_to_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/precious").write_text("x")
    with pytest.raises(StoreUnusable, match="a tmp/ that no agent made"):
        AdapterStore.open(str(tmp_path))
    assert (tmp_path / "tmp/precious").read_text() == "x"


def test_a_link_to_the_directory_is_named_to_the_engine_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = AdapterStore.open(str(tmp_path / "link"))
    assert store.revisions_dir == str(tmp_path / "link/revisions")
    _, path = store.publish(store.staging("k"), [])
    assert str(path).startswith(store.revisions_dir)
    store.close()


def test_a_relative_directory_is_given_to_the_engine_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = AdapterStore.open("adapters")
    assert store.revisions_dir == f"{tmp_path}/adapters/revisions"
    store.close()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that other users can reach: pytest's own are closed to them."""
    path = Path(tempfile.mkdtemp(prefix="lora-sidecar-test-"))
    path.chmod(0o755)
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


@needs_root
@pytest.mark.parametrize("part", ["", "revisions", "state/revisions"])
def test_an_unwritable_directory_is_said_with_uid_owner_and_the_way_out(public: Path, part: str) -> None:
    root = public / "adapters"
    AdapterStore.open(str(root)).close()
    for path in (root, *root.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.chown(root / part, 0, 0)
    if not part:
        (root / "state/revisions").rmdir()
        os.chown(root / "state", 0, 0)
    said = output_as_nobody(TRY, str(root))
    assert f"can't be written by uid {NOBODY}, gid {NOBODY}" in said
    assert "belongs to uid 0, gid 0, mode 0755" in said
    assert "fsGroup" in said


@needs_root
def test_a_directory_below_one_that_is_closed_is_said(public: Path) -> None:
    closed = public / "closed"
    (closed / "adapters").mkdir(parents=True)
    closed.chmod(0o700)
    said = output_as_nobody(TRY, str(closed / "adapters"))
    assert "Permission denied" in said
    assert f"{closed} belongs to uid 0" in said


@needs_root
def test_an_unwritable_parent_is_said(public: Path) -> None:
    said = output_as_nobody(TRY, str(public / "adapters"))
    assert f"can't be written by uid {NOBODY}" in said
    assert f"{public} belongs to uid 0" in said


@needs_root
def test_revisions_can_be_published_repaired_and_evicted_without_being_root(public: Path) -> None:
    os.chown(public, NOBODY, NOBODY)
    script = """
root = sys.argv[1]
store = AdapterStore.open(root, quota=1500)
name, path = publish(store, content("a"))
(path / "sub").chmod(0o755)
(path / "sub/adapter_model.safetensors").unlink()
(path / "sub").chmod(0o555)
store.close()
store = AdapterStore.open(root, quota=1500)
assert not store.revisions()
publish(store, content("a"))
assert read(path) == content("a")
publish(store, content("b"))
assert store.evict(frozenset()) == (name,)
store.close()
store = AdapterStore.open(root)
print(len(store.revisions()), os.geteuid())
"""
    assert output_as_nobody(script, str(public / "adapters")).endswith(f"\n1 {NOBODY}\n")


@needs_root
def test_a_read_only_volume_is_said(public: Path) -> None:
    AdapterStore.open(str(public)).close()
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", public, public], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting isn't permitted here")
    try:
        with pytest.raises(StoreUnusable, match=r"Read-only file system.*mount it writable"):
            AdapterStore.open(str(public))
    finally:
        subprocess.run(["umount", public], check=True)


@needs_root
def test_a_volume_mounted_into_the_middle_is_said(public: Path) -> None:
    AdapterStore.open(str(public)).close()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", public / "blobs/sha256"], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting isn't permitted here")
    try:
        with pytest.raises(StoreUnusable, match=r"no hard link from tmp/ to blobs/sha256/ .*one file system"):
            AdapterStore.open(str(public))
    finally:
        subprocess.run(["umount", public / "blobs/sha256"], check=True)
