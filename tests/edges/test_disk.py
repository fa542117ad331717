"""Publishing: content-addressed, immutable, whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.edges.disk import AdapterStore
from sidecar.edges.filesystem import StoreFailed
from sidecar.model import StoredFile
from tests.edges.stored import content, publish, read, revision, stored, write


@pytest.fixture
def store(memory_path: Path) -> Iterator[AdapterStore]:
    store = AdapterStore.open(str(memory_path / "adapters"))
    yield store
    store.close()


def reopened(store: AdapterStore) -> AdapterStore:
    store.close()
    return AdapterStore.open(str(Path(store.revisions_dir).parent))


def damage(path: Path, data: bytes) -> None:
    """Change a published file behind the store's back, as a broken disk would."""
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_published_revision_is_the_tree_that_was_staged_under_its_own_hash(store: AdapterStore) -> None:
    tree = content("a")
    name, path = publish(store, tree)
    assert name == revision(tree)
    assert path == Path(store.revisions_dir) / name.removeprefix("sha256:")
    assert dict(store.revisions()) == {name: str(path)}
    assert read(path) == tree
    assert store.files(name) == tuple(sorted(stored(tree), key=lambda file: file.path))


def test_published_files_are_read_only_and_readable_by_the_engine_s_user(store: AdapterStore) -> None:
    _, path = publish(store, content("a"))
    for directory, _, files in os.walk(path):
        assert os.stat(directory).st_mode & 0o777 == 0o555
        assert {os.stat(Path(directory) / file).st_mode & 0o777 for file in files} == {0o444}
    for parent in (path.parent, path.parent.parent):
        assert parent.stat().st_mode & 0o055 == 0o055


def test_equal_files_of_two_revisions_are_one_file_on_the_disk(store: AdapterStore) -> None:
    _, one = publish(store, content("a"))
    _, two = publish(store, content("b"))
    assert os.path.samefile(one / "adapter_config.json", two / "adapter_config.json")
    assert store.usage() == len(b'{"r": 8}') + 1000 + 1000


def test_equal_files_within_one_revision_are_one_file_too(store: AdapterStore) -> None:
    _, path = publish(store, {"a": b"same", "b/c": b"same"})
    assert os.path.samefile(path / "a", path / "b/c")
    assert store.usage() == 4


def test_a_blob_is_found_by_its_hash_and_nothing_else_is(store: AdapterStore) -> None:
    tree = content("a")
    publish(store, tree)
    for file in stored(tree):
        found = store.blob(file.sha256)
        assert found is not None
        assert found.read_bytes() == tree[file.path]
    assert store.blob("0" * 64) is None
    assert store.blob("../../state/lock") is None
    assert store.blob("") is None


def test_publishing_again_changes_nothing_and_drops_the_download(store: AdapterStore) -> None:
    name, path = publish(store, content("a"), "one")
    before = path.stat().st_ino
    assert publish(store, content("a"), "two") == (name, path)
    assert path.stat().st_ino == before
    assert list((path.parent.parent / "tmp/staging").iterdir()) == []


def test_what_is_published_is_there_after_a_restart(store: AdapterStore) -> None:
    trees = [content("a"), content("b")]
    paths = {revision(tree): str(publish(store, tree)[1]) for tree in trees}
    again = reopened(store)
    assert dict(again.revisions()) == paths
    assert again.usage() == store.usage()
    assert again.files(revision(trees[0])) == store.files(revision(trees[0]))
    again.close()


def test_a_mapping_of_revisions_once_read_does_not_change(store: AdapterStore) -> None:
    before = store.revisions()
    publish(store, content("a"))
    assert len(before) == 0
    assert len(store.revisions()) == 1


def test_a_blob_can_take_the_place_of_a_file_that_is_staged(store: AdapterStore) -> None:
    publish(store, content("a"))
    tree = content("b")
    config = next(file for file in stored(tree) if file.path == "adapter_config.json")
    staged = write(
        store.staging("b") / "files", {"sub/adapter_model.safetensors": tree["sub/adapter_model.safetensors"]}
    )
    assert store.reuse(config.sha256, staged / config.path)
    assert not store.reuse("0" * 64, staged / "other")
    _, path = store.publish(staged, stored(tree))
    assert read(path) == tree


def test_a_file_that_is_only_a_blob_need_not_be_staged_at_all(store: AdapterStore) -> None:
    publish(store, content("a"))
    tree = content("b")
    staged = write(store.staging("b"), {"sub/adapter_model.safetensors": tree["sub/adapter_model.safetensors"]})
    assert read(store.publish(staged, stored(tree))[1]) == tree


@pytest.mark.parametrize("wrong", [b"", b"short", b"x" * 2000])
def test_a_staged_file_of_another_size_is_not_published(store: AdapterStore, wrong: bytes) -> None:
    tree = content("a")
    staged = write(store.staging("k"), {**tree, "sub/adapter_model.safetensors": wrong})
    with pytest.raises(StoreFailed, match=f"{len(wrong)} bytes, not 1000"):
        store.publish(staged, stored(tree))
    assert dict(store.revisions()) == {}
    assert store.usage() == len(wrong) + len(tree["adapter_config.json"])


def test_a_missing_staged_file_is_not_published(store: AdapterStore) -> None:
    with pytest.raises(StoreFailed, match="None bytes, not 1000"):
        store.publish(write(store.staging("k"), {"adapter_config.json": b'{"r": 8}'}), stored(content("a")))


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../out", "a\\b"])
def test_a_path_that_leaves_the_revision_is_refused(store: AdapterStore, path: str) -> None:
    with pytest.raises(StoreFailed, match="stay inside"):
        store.publish(store.staging("k"), [StoredFile(path=path, size=1, sha256="0" * 64)])


def test_a_hash_that_is_none_is_refused(store: AdapterStore) -> None:
    with pytest.raises(StoreFailed, match="64 hex digits"):
        store.publish(store.staging("k"), [StoredFile(path="a", size=1, sha256="../../x")])


def test_a_symbolic_link_in_the_download_is_not_followed(store: AdapterStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/f").write_bytes(b"secret")
    staged = store.staging("k")
    (staged / "link").symlink_to(tmp_path / "secret")
    (staged / "sub").symlink_to(tmp_path / "folder")
    for path in ("link", "sub/f"):
        with pytest.raises(StoreFailed):
            store.publish(staged, stored({path: b"secret"}))
    assert dict(store.revisions()) == {}


def test_only_a_staging_directory_can_be_published(store: AdapterStore, tmp_path: Path) -> None:
    for path in (tmp_path, Path(store.revisions_dir), Path(store.revisions_dir).parent / "tmp/staging"):
        with pytest.raises(ValueError, match="is not below"):
            store.publish(path, stored({"a": b""}))


@pytest.mark.parametrize("key", ["abc", "sha256:" + "0" * 64, "ns/name@3", "../../x", "", "x" * 500, ".."])
def test_any_key_has_a_staging_directory_of_its_own_that_outlives_the_process(store: AdapterStore, key: str) -> None:
    path = store.staging(key)
    write(path, {"part": b"half"})
    assert path.parent == Path(store.revisions_dir).parent / "tmp/staging"
    assert store.staging(key) == path
    assert store.staging("another") != path
    again = reopened(store)
    assert read(again.staging(key)) == {"part": b"half"}
    again.discard(key)
    assert not path.exists()
    again.close()


def test_debris_and_old_downloads_are_gone_after_a_restart(store: AdapterStore) -> None:
    tmp = Path(store.revisions_dir).parent / "tmp"
    write(tmp / "new-1", {"a/b": b"x"})
    write(tmp, {"fix-2": b"x"})
    (tmp / "new-1/a").chmod(0o555)
    (tmp.parent / "state/.memory.json.new").write_bytes(b"half")
    old = write(store.staging("old"), {"part": b"x"}) / "part"
    os.utime(old, (1e9, 1e9))
    write(store.staging("fresh"), {"part": b"x"})
    again = reopened(store)
    assert sorted(str(path.relative_to(tmp)) for path in tmp.rglob("*")) == [
        "staging",
        "staging/fresh",
        "staging/fresh/part",
    ]
    assert not (tmp.parent / "state/.memory.json.new").exists()
    again.close()


def test_blobs_that_no_revision_has_are_collected_after_a_restart(store: AdapterStore) -> None:
    _, path = publish(store, content("a"))
    blobs = path.parent.parent / "blobs/sha256"
    (blobs / ("0" * 64)).write_bytes(b"left by a crash")
    missing = next(blobs.glob("[!0]*"))
    missing.unlink()
    again = reopened(store)
    assert {blob.name for blob in blobs.iterdir()} == {file.sha256 for file in stored(content("a"))}
    assert again.blob(missing.name) is not None
    again.close()


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_revision_with_a_truncated_file_is_not_offered_after_a_restart_and_stays_for_the_engine(
    store: AdapterStore,
) -> None:
    name, path = publish(store, content("a"))
    damage(path / "sub/adapter_model.safetensors", b"cut")
    again = reopened(store)
    assert dict(again.revisions()) == {}
    assert (path / "sub/adapter_model.safetensors").exists()
    assert again.files(name) == ()
    assert again.blob(stored(content("a"))[1].sha256) is None
    again.close()


def harm_remove(path: Path) -> None:
    path.chmod(0o755)
    (path / "adapter_config.json").unlink()


def harm_add(path: Path) -> None:
    path.chmod(0o755)
    (path / "adapter_model.bin").write_bytes(b"evil")


def harm_link(path: Path) -> None:
    harm_remove(path)
    (path / "adapter_config.json").symlink_to("/etc/hostname")


def harm_list(path: Path) -> None:
    (path.parent.parent / f"state/revisions/{path.name}.json").unlink()


def harm_list_content(path: Path) -> None:
    evil = b'{"files":[{"path":"../../../x","size":1,"sha256":"../../../x"}]}'
    (path.parent.parent / f"state/revisions/{path.name}.json").write_bytes(evil)


def harm_folder(path: Path) -> None:
    harm_remove(path)
    (path / "adapter_config.json").mkdir()
    (path / "adapter_config.json/x").write_bytes(b"x")


def harm_replace_folder(path: Path) -> None:
    path.chmod(0o755)
    (path / "sub").chmod(0o755)
    (path / "sub/adapter_model.safetensors").unlink()
    (path / "sub").rmdir()
    (path / "sub").write_bytes(b"x")


def harm_all(path: Path) -> None:
    path.chmod(0o755)
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


HARMS = [
    harm_remove,
    harm_add,
    harm_link,
    harm_list,
    harm_list_content,
    harm_folder,
    harm_replace_folder,
    harm_all,
]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_revision_is_not_offered_until_it_is_published_again_at_the_same_path(
    store: AdapterStore, harm: object
) -> None:
    tree = content("a")
    name, path = publish(store, tree)
    assert callable(harm)
    harm(path)
    again = reopened(store)
    assert dict(again.revisions()) == {}
    assert publish(again, tree) == (name, path)
    assert read(path) == tree
    assert not path.is_symlink()
    once_more = reopened(again)
    assert dict(once_more.revisions()) == {name: str(path)}
    assert once_more.verify(name)
    once_more.close()


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_revision_can_be_evicted(store: AdapterStore, harm: object) -> None:
    name, path = publish(store, content("a"))
    assert callable(harm)
    harm(path)
    store.close()
    small = AdapterStore.open(str(path.parent.parent), quota=1)
    assert small.evict(frozenset()) == (name,)
    assert not os.path.lexists(path)
    assert small.usage() == 0
    small.close()


def test_one_flipped_bit_is_found_by_verifying_and_stays_found_after_a_restart(store: AdapterStore) -> None:
    tree = content("a")
    name, path = publish(store, tree)
    assert store.verify(name)
    weights = tree["sub/adapter_model.safetensors"]
    damage(path / "sub/adapter_model.safetensors", bytes([weights[0] ^ 1]) + weights[1:])
    assert not store.verify(name)
    assert dict(store.revisions()) == {}
    assert store.blob(stored(tree)[1].sha256) is None
    assert store.blob(stored(tree)[0].sha256) is not None
    again = reopened(store)
    assert dict(again.revisions()) == {}
    publish(again, tree)
    assert again.verify(name)
    again.close()


def test_repairing_never_changes_a_file_that_the_engine_has_open(store: AdapterStore) -> None:
    tree = content("a")
    _, path = publish(store, tree)
    damage(path / "sub/adapter_model.safetensors", b"cut")
    with (path / "sub/adapter_model.safetensors").open("rb") as engine:
        again = reopened(store)
        publish(again, tree)
        assert engine.read() == b"cut"
        again.close()
    assert read(path) == tree


def test_verifying_what_is_not_there_is_no(store: AdapterStore) -> None:
    assert not store.verify("sha256:" + "0" * 64)


# -- what the agent remembers -----------------------------------------------------------------------------------------


def test_saved_state_is_read_back_after_a_restart(store: AdapterStore) -> None:
    assert store.read("memory.json") is None
    store.save("memory.json", b"one")
    store.save("memory.json", b"two")
    again = reopened(store)
    assert again.read("memory.json") == b"two"
    again.close()


@pytest.mark.parametrize("name", ["", "../x", "/x", "a/b", ".x", "lock", "revisions", "x" * 200, "a\0"])
def test_a_state_name_that_is_none_is_a_bug_of_the_caller(store: AdapterStore, name: str) -> None:
    with pytest.raises(ValueError, match="no name for a state file"):
        store.save(name, b"")
    with pytest.raises(ValueError, match="no name for a state file"):
        store.read(name)
