"""Names from outside stay inside."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.preflight import Refused, contained_path, contained_paths

GOOD = [
    "adapter_config.json",
    "a/b/c.json",
    "..data",
    "a..b/c",
    "...",
    ".hidden/x",
    "ünï/文件",
    "a b",
    "x" * 255,
    "-rf",
]
BAD = {
    "": "empty",
    "/abs": "absolute",
    "//abs": "absolute",
    "..": "'..'",
    "../../etc/passwd": "'..'",
    "p/../../x": "'..'",
    "a/..": "'..'",
    ".": "'.'",
    "./a": "'.'",
    "a/./b": "'.'",
    "a//b": "empty segment",
    "a/": "empty segment",
    "a\0b": "control",
    "a\nb": "control",
    "a\x7fb": "control",
    "..\\..\\x": "backslash",
    "C:\\x": "backslash",
    "x" * 256: "256 bytes",
    "ü" * 200: "400 bytes",
    "/".join(["abc"] * 200): "799 characters",
    "a\udcff": "Unicode",
}


@pytest.mark.parametrize("path", GOOD)
def test_a_plain_relative_path_is_returned_as_it_is(path: str) -> None:
    assert contained_path(path) == path


@pytest.mark.parametrize(("path", "why"), BAD.items())
def test_a_path_that_could_leave_the_adapter_is_refused_with_its_reason(path: str, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        contained_path(path)
    assert "at most 512 characters" in refused.value.limit
    assert str(refused.value).isprintable()


@given(st.text(st.characters(codec=None), max_size=40) | st.text("./\\a\0", max_size=12))
def test_whatever_is_accepted_stays_below_the_directory_it_is_joined_to(path: str) -> None:
    try:
        contained_path(path)
    except Refused:
        return
    joined = posixpath.normpath(posixpath.join("/adapter", path))
    assert joined == "/adapter/" + path


@pytest.mark.parametrize(
    ("paths", "why"), [(["a", "b", "a"], "twice"), (["a/b", "a"], "both a file and a folder"), (["a", "../b"], "'..'")]
)
def test_paths_that_contradict_each_other_are_refused(paths: list[str], why: str) -> None:
    with pytest.raises(Refused, match=why):
        contained_paths(paths)


def test_paths_side_by_side_are_fine() -> None:
    assert sorted(contained_paths(["a/b", "a/c", "ab"])) == ["a/b", "a/c", "ab"]
