"""Whatever happens at whatever step, no half of a revision is ever seen, and the next start goes on."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sidecar.edges.disk import AdapterStore
from sidecar.edges.filesystem import FileSystem, StoreFailed
from sidecar.ports import DiskFull, EdgeError
from tests.edges.disk_faults import FailingFileSystem, KilledFileSystem, PowerCut, PowerFileSystem, StepFileSystem
from tests.edges.stored import content, publish, read, revision, stored, write

ROOT = Path(__file__).parents[2]
OLD, NEW = content("old"), content("new")
BOTH = {revision(OLD): OLD, revision(NEW): NEW}
QUOTA = 1500


def prepare(root: Path, fs: FileSystem) -> AdapterStore:
    """A store with the old revision, and the new one staged."""
    store = AdapterStore.open(str(root), quota=QUOTA, fs=fs)
    publish(store, OLD)
    write(store.staging("new") / "files", NEW)
    return store


def do_publish(store: AdapterStore) -> None:
    store.publish(store.staging("new") / "files", stored(NEW))


def do_evict(store: AdapterStore) -> None:
    store.evict(frozenset({revision(NEW)}))


def do_save(store: AdapterStore) -> None:
    store.save("memory.json", b"new state")


def do_repair(store: AdapterStore) -> None:
    publish(store, OLD, "repair")


def do_condemn(store: AdapterStore) -> None:
    assert not store.verify(revision(OLD))


def do_discard(store: AdapterStore) -> None:
    store.discard("new")


def cut_short(store: AdapterStore) -> None:
    """Truncate a published file, as only a broken disk can."""
    path = Path(store.revisions_dir) / revision(OLD).removeprefix("sha256:") / "sub/adapter_model.safetensors"
    path.chmod(0o644)
    path.write_bytes(b"cut")


def flip_and_find(store: AdapterStore) -> None:
    """Damage that only reading all of it finds."""
    path = Path(store.revisions_dir) / revision(OLD).removeprefix("sha256:") / "sub/adapter_model.safetensors"
    path.chmod(0o644)
    path.write_bytes(bytes(1000))
    assert not store.verify(revision(OLD))


def also_new(store: AdapterStore) -> None:
    do_publish(store)
    # Over the quota, so that the old one has to go.
    write(store.staging("third"), {"x": bytes(1000)})


def save_old(store: AdapterStore) -> None:
    store.save("memory.json", b"old state")


def nothing(store: AdapterStore) -> None:
    """Only the steps of opening it again."""


STORIES: dict[str, tuple[Callable[[AdapterStore], None], bool, Callable[[AdapterStore], None]]] = {
    # name: (before, whether it is opened again then, what is interrupted)
    "publish": (nothing, False, do_publish),
    "evict": (also_new, False, do_evict),
    "save": (save_old, False, do_save),
    "repair": (cut_short, True, do_repair),
    "repair what was found": (flip_and_find, False, do_repair),
    "condemn": (cut_short, False, do_condemn),
    "discard": (nothing, False, do_discard),
    "recover": (cut_short, True, nothing),
}


def interrupted(story: str, root: Path, fs: StepFileSystem, at: int) -> AdapterStore:
    """Play a story whose step number `at` is struck; returns the store if there was no such step."""
    before, again, do = STORIES[story]
    store = prepare(root, fs)
    before(store)
    if again:
        store.close()
        if story == "recover":
            fs.arm(at)
        store = AdapterStore.open(str(root), quota=QUOTA, fs=fs)
    if story != "recover":
        fs.arm(at)
    try:
        do(store)
    except BaseException:
        store.close()
        raise
    return store


def check_laws(root: Path, story: str) -> None:
    """What must hold after any crash: in what is visible before the next start, and after it."""
    damaged = story in ("repair", "repair what was found", "condemn", "recover")
    for path in (root / "revisions").glob("?" * 64):
        tree = BOTH[f"sha256:{path.name}"]
        found = read(path)
        assert set(found) == set(tree)
        assert found == tree or (damaged and found["sub/adapter_model.safetensors"] in (b"cut", bytes(1000)))
    store = AdapterStore.open(str(root), quota=QUOTA)
    for name, directory in store.revisions().items():
        assert read(directory) == BOTH[name]
        assert store.verify(name)
    for blob in (root / "blobs/sha256").iterdir():
        assert blob.name in {file.sha256 for tree in BOTH.values() for file in stored(tree)}
        assert blob.name == stored({"x": blob.read_bytes()})[0].sha256
    assert [path.name for path in (root / "tmp").iterdir()] == ["staging"]
    assert sorted(path.name for path in (root / "state").iterdir() if path.suffix != ".json") == ["lock", "revisions"]
    if story == "publish":
        assert revision(OLD) in store.revisions()
        assert revision(NEW) in store.revisions() or (root / "tmp/staging/new").exists()
    if story in ("evict", "discard"):
        assert {revision(NEW) if story == "evict" else revision(OLD)} <= set(store.revisions())
    if story == "save":
        assert store.read("memory.json") in (b"old state", b"new state")
    # And it goes on: the same end is reached.
    publish(store, OLD, "again")
    publish(store, NEW, "new")
    assert {name: read(path) for name, path in store.revisions().items()} == BOTH
    assert all(store.verify(name) for name in BOTH)
    for left in (root / "tmp/staging").iterdir():
        store.discard(left.name)
    assert store.usage() == 1000 + 1000 + len(OLD["adapter_config.json"])
    store.close()


# -- killed -----------------------------------------------------------------------------------------------------------


def sweep_kills(root: Path, story: str) -> int:
    """In a process without threads: a child for each step, killed there; returns how many steps there are."""
    for at in range(10_000):
        child = os.fork()
        if child == 0:
            interrupted(story, root / str(at), KilledFileSystem(), at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return at
    raise AssertionError("endless")


def swept(stories: Iterable[str]) -> list[Any]:
    """The two stories that matter most in the inner loop, the others as well in the whole suite."""
    return [pytest.param(story, marks=() if story in ("publish", "evict") else pytest.mark.slow) for story in stories]


@pytest.mark.parametrize("story", swept(STORIES))
def test_killed_at_any_step_the_store_is_whole(memory_path: Path, story: str) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.edges.test_disk_crash import sweep_kills;"
        " print('steps', sweep_kills(Path(sys.argv[1]), sys.argv[2]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, memory_path, story], capture_output=True, text=True, check=True, env=environment
    )
    steps = int(done.stdout.rpartition("steps ")[2])
    assert steps >= 2
    for at in range(steps + 1):
        check_laws(memory_path / str(at), story)


# -- a disk that is full, or broken -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "code", "kind"),
    [
        *((story, errno.ENOSPC, DiskFull) for story in STORIES if story != "recover"),
        ("publish", errno.EDQUOT, DiskFull),
        ("publish", errno.EIO, StoreFailed),
    ],
)
def test_after_a_step_that_fails_the_same_call_works_once_the_disk_does(
    memory_path: Path, story: str, code: int, kind: type[EdgeError]
) -> None:
    _, again, do = STORIES[story]
    for at in range(10_000):
        fs, root = FailingFileSystem(code), memory_path / str(at)
        store = prepare(root, fs)
        STORIES[story][0](store)
        if again:
            store.close()
            store = AdapterStore.open(str(root), quota=QUOTA, fs=fs)
        fs.arm(at)
        try:
            do(store)
        except kind:
            fs.armed = False
            for name, directory in store.revisions().items():
                if story != "condemn":
                    assert read(directory) == BOTH[name]
            if story == "publish":
                assert [path.name for path in (root / "tmp").iterdir()] == ["staging"]
            if story != "condemn" or revision(OLD) in store.revisions():
                do(store)
            assert [path.name for path in (root / "tmp").iterdir()] == ["staging"]
        struck = fs.steps > at
        store.close()
        check_laws(root, story)
        shutil.rmtree(root)
        if not struck:
            assert at >= 2
            return


# -- without power ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("story", swept(["publish", "evict", "save", "repair", "repair what was found", "condemn"]))
def test_without_power_at_any_step_nothing_wrong_is_ever_offered(memory_path: Path, story: str, lost: float) -> None:
    for at in range(10_000):
        root, graveyard = memory_path / str(at), memory_path / f"graves-{at}"
        graveyard.mkdir()
        fs = PowerFileSystem(graveyard)
        try:
            interrupted(story, root, fs, at).close()
            finished = True
        except PowerCut:
            finished = False
        # Bytes that nobody synced: of the download, or, had they been published without a sync, of the revision.
        fs.cut(lost, root / ("revisions" if finished else "tmp/staging"))
        after = AdapterStore.open(str(root), quota=QUOTA)
        for name, directory in after.revisions().items():
            assert read(directory) == BOTH[name], (at, name)
        if story in ("publish", "save"):
            assert revision(OLD) in after.revisions()
        if finished:
            assert not (story == "publish" and revision(NEW) not in after.revisions())
            assert not (story == "save" and after.read("memory.json") != b"new state")
        publish(after, OLD, "again")
        publish(after, NEW, "again")
        assert all(after.verify(name) for name in BOTH)
        after.close()
        if finished:
            assert at >= 2
            return
