"""Manifest text is read as Kubernetes reads it, and no text costs more than its size suggests."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.documents import MAX_BYTES, MAX_VALUES, Unreadable, decode


def values(text: str) -> list[Any]:
    return [document.value for document in decode(text.encode())]


def fault(data: str | bytes, *, is_json: bool = False) -> str:
    with pytest.raises(Unreadable) as caught:
        decode(data.encode() if isinstance(data, str) else data, is_json=is_json)
    return str(caught.value)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        *(("yes", True), ("Off", False), ("TRUE", True), ("tRue", "tRue"), ("y", "y")),
        *(("", None), ("~", None), ("Null", None), ("''", ""), ("'yes'", "yes"), ('"12"', "12")),
        *(("12", 12), ("+12", 12), ("-3", -3), ("012", 10), ("0o12", 10), ("0x1F", 31), ("0b11", 3)),
        *(("1.5", 1.5), ("1.", 1.0), (".5", 0.5), ("1e3", 1000.0), ("-.inf", float("-inf")), ("1.2.3", "1.2.3")),
        # Base 60 and times are text, as they are for Kubernetes.
        *(("12:30", "12:30"), ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00Z"), ("2026-13-45", "2026-13-45")),
        *(("!!str 12", "12"), ("! 12", "12"), ("!!int 12", 12), ("a#b", "a#b"), ("sha256:ab", "sha256:ab")),
    ],
)
def test_scalars(scalar: str, value: object) -> None:
    (found,) = values(f"a: {scalar}\n")
    assert found == {"a": value}
    assert type(found["a"]) is type(value)


def test_documents_are_counted_and_empty_ones_left_out() -> None:
    found = decode(b"# nothing here\n---\na: 1\n---\n# empty\n---\nb: 2\n...\n---\n")
    assert [(d.number, d.value) for d in found] == [(1, {"a": 1}), (3, {"b": 2})]
    assert decode(b"") == decode(b"# only this\n") == decode(b"", is_json=True) == ()


def test_the_items_of_a_list_stand_for_themselves() -> None:
    found = decode(b"a: 1\n---\nkind: AdapterList\nitems: [{b: 1}, {c: 2}]\n")
    assert [d.where for d in found] == ["document 1", "document 2, item 1", "document 2, item 2"]
    assert [d.value for d in found] == [{"a": 1}, {"b": 1}, {"c": 2}]


def test_aliases_and_merges() -> None:
    text = "base: &b {x: 1, y: 2}\nsame: *b\nmerged: {<<: *b, y: 3}\nmany: {<<: [{x: 7}, *b]}\n"
    (found,) = values(text)
    assert found == {
        "base": {"x": 1, "y": 2},
        "same": {"x": 1, "y": 2},
        "merged": {"x": 1, "y": 3},
        "many": {"x": 7, "y": 2},
    }


def test_anchors_end_with_their_document() -> None:
    assert "*b" in fault("a: &b 1\n---\nc: *b\n")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: [1,\n2\nb: 3", ["line 3, column 2"]),
        ("a: b: c", ["line 1, column 5"]),
        ("a: 1\nb: 2\na: 3", ["line 3", "'a'", "twice"]),
        ("a: {b: 1}\na: {c: 1}", ["line 2", "'a'", "twice"]),
        ("a: &a [*a]", ["*a"]),
        ("? [a]\n: b", ["key must be plain text"]),
        ("x: &x y\n*x : b", ["key must be plain text"]),
        ("a: {<<: text}", ["'<<'", "mappings"]),
        ("!!python/object/apply:os.system ['ls']", ["tag", "python/object"]),
        ("a: !mine x", ["tag", "'!mine'"]),
        ("a: \x00\x00", ["control characters"]),
        ("%YAML 9.9\n---\na", ["line 1"]),
        ("a: \t- b\n\t- c", ["line"]),
    ],
)
def test_faults_say_where(text: str, parts: list[str]) -> None:
    found = fault(text)
    for part in parts:
        assert part in found
    assert "\n" not in found


def test_a_torn_file_is_a_fault_though_its_first_documents_are_whole() -> None:
    assert "line 5" in fault("a: 1\n---\nb: 2\nc: [3")


def test_not_utf8() -> None:
    assert "byte 3 is not UTF-8" in fault(b"a: \xff")
    assert decode("\ufeffa: ü".encode())[0].value == {"a": "ü"}


LAUGHS = "a0: &a0 [" + ",".join("x" * 10) + "]\n"
LAUGHS += "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (LAUGHS, str(MAX_VALUES)),
        ("a: &a [" + "x," * 50_000 + "]\nb: *a\n", str(MAX_VALUES)),
        ("[" + "a," * 110_000 + "]", str(MAX_VALUES)),
        ("[" * 65, "64 levels"),
        ("- " * 500_000, "64 levels"),
        ("[" * 500_000, "maximum nesting depth"),
        ("a: " + "x" * MAX_BYTES, str(MAX_BYTES)),
    ],
    ids=["laughs", "expanded", "values", "depth", "blocks", "brackets", "bytes"],
)
def test_bombs_are_refused_with_the_limit(text: str, limit: str) -> None:
    assert limit in fault(text)


def test_merges_count_as_well() -> None:
    text = "a: &a {" + ",".join(f"k{i}: 1" for i in range(40_000)) + "}\nb: {<<: [*a, *a]}\n"
    assert str(MAX_VALUES) in fault(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice"),
        ('{"a": ', "line 1"),
        ('{"a": 1} {"b": 2}', "Extra data"),
        ("[" * 500_000, "nested"),
        ("9" * 10_000, "digit"),
    ],
)
def test_json_faults(text: str, part: str) -> None:
    assert part in fault(text, is_json=True)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_what_yaml_writes_is_read_back(value: object) -> None:
    # Quoted throughout, with tags where needed: PyYAML's own idea of what is a number is another one.
    text = yaml.safe_dump(value, default_style='"')
    assert [d.value for d in decode(text.encode())] == ([] if value is None else [value])


@given(st.dictionaries(st.text(), PLAIN, max_size=4))
def test_what_json_writes_is_read_back(value: dict[str, Any]) -> None:
    if not str(value.get("kind")).endswith("List"):
        (found,) = decode(json.dumps(value).encode(), is_json=True)
        assert found.value == value


@given(st.text(alphabet="a:{}[]&*!<> \n-'\"#|%1,?x~\t", max_size=40))
def test_any_text_is_documents_or_a_fault(text: str) -> None:
    try:
        decode(text.encode())
    except Unreadable as error:
        message = str(error)
    else:
        message = "fine"
    assert message
