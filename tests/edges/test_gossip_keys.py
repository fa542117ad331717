"""The key file: what is refused at the start, and what a change does while the agent runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.core.keyring import Keyring, make_key
from sidecar.edges.gossip_keys import MAX_KEY_FILE, KeyFile, KeyFileUnusable

ONE, TWO = "the first key of this test", "the second key of this test"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no key"),
        (b"short\n", "at least 16"),
        (b"\xff\xfe\x00 not text at all", "no text"),
        (b"k" * (MAX_KEY_FILE + 1), "larger than"),
        (None, "No such file"),
    ],
)
def test_a_file_without_keys_is_refused_by_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeyFileUnusable, match=message) as caught:
        KeyFile(str(path)).load()
    assert str(path) in str(caught.value)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileUnusable, match="directory"):
        KeyFile(str(tmp_path)).load()


def test_changes_are_seen_once_and_bad_ones_keep_the_old_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(ONE)
    file = KeyFile(str(path))
    assert file.load() == Keyring((make_key(ONE),))
    assert file.changed() is None
    path.write_text("")
    assert file.changed() is None
    assert "no key" in file.reason
    path.unlink()
    assert file.changed() is None
    assert "No such file" in file.reason
    path.write_text(f"{TWO}\n{ONE}\n")
    assert file.changed() == Keyring((make_key(TWO), make_key(ONE)))
    assert file.reason == ""
    assert file.changed() is None


def test_a_mounted_secret_is_replaced_through_a_link(tmp_path: Path) -> None:
    """The kubelet swaps a symbolic link to a new directory; the file's own path never changes."""
    for name, key in (("first", ONE), ("second", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(key)
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "key").symlink_to("..data/key")
    file = KeyFile(str(tmp_path / "key"))
    file.load()
    (tmp_path / "new").symlink_to("second")
    os.replace(tmp_path / "new", tmp_path / "..data")
    assert file.changed() == Keyring((make_key(TWO),))
