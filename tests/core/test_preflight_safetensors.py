"""The safetensors header: as strict as the format's own reader, and nothing but a refusal comes of bad bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.preflight import Limits, Refused, header_end, parse_safetensors_header
from tests.core.adapter_bytes import SHAPES, Q, entries, framed, safetensors

GOOD, SIZE = entries({"a": (2, 3), "b": (5,), "empty": (0, 7), "scalar": ()})


def parse(header: bytes | dict[str, Any], data: int) -> Any:
    raw = framed(header)
    return parse_safetensors_header(raw, len(raw) + data)


def changed(tensor: str, **fields: Any) -> dict[str, Any]:
    header = copy.deepcopy(GOOD)
    header[tensor].update(fields)
    return header


def test_a_real_file_is_parsed_from_its_beginning_alone() -> None:
    raw = safetensors()
    end = header_end(raw[:8], len(raw), Limits())
    tensors = parse_safetensors_header(raw[:end], len(raw))
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
    assert tensors[f"{Q}.lora_A.weight"].dtype == "F32"
    assert parse_safetensors_header(raw, len(raw)) == tensors


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (GOOD, SIZE),
        ({}, 0),
        ({"__metadata__": {}}, 0),
        (json.dumps(GOOD).encode() + b"   ", SIZE),
        ({name: GOOD[name] for name in reversed(GOOD)}, SIZE),
        ({"f4": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, 2),
        ({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "more": None}}, 1),
    ],
)
def test_what_the_format_permits_passes(header: Any, data: int) -> None:
    assert len(parse(header, data)) == len(
        [
            name
            for name in json.loads(json.dumps(header) if isinstance(header, dict) else header)
            if name != "__metadata__"
        ]
    )


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (GOOD, SIZE - 1, f"holds {SIZE - 1} bytes of data"),
        (GOOD, SIZE + 1, f"holds {SIZE + 1} bytes of data"),
        (GOOD, 0, "holds 0 bytes of data"),
        (changed("b", data_offsets=[25, 45]), SIZE, "must begin at 24"),
        (changed("b", data_offsets=[20, 40]), SIZE, "must begin at 24"),
        (changed("b", data_offsets=[24, 20]), SIZE, "must begin at"),
        (changed("b", data_offsets=[24, 48]), SIZE, "has 24 bytes of data; F32 of shape .5. has 20"),
        (changed("a", shape=[2, 4]), SIZE, "has 24 bytes of data; F32 of shape .2, 4. has 32"),
        (changed("a", dtype="F16"), SIZE, "F16 of shape .2, 3. has 12"),
        (changed("a", dtype="F31"), SIZE, 'dtype "F31"; known are BF16'),
        (changed("a", shape=[1] * 17), SIZE, "17 dimensions"),
        (changed("a", shape=[2**62] * 16), SIZE, "has 24 bytes of data"),
        (changed("a", shape=[-2, -3]), SIZE, "can't be read"),
        (changed("a", shape=[2.0, 3]), SIZE, "can't be read"),
        (changed("a", shape=None), SIZE, "can't be read"),
        (changed("a", data_offsets=[0]), SIZE, "can't be read"),
        (changed("a", data_offsets=[0, 24, 24]), SIZE, "can't be read"),
        (changed("a", data_offsets=[-1, 24]), SIZE, "can't be read"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "can't be read"),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, 2, "has 12 bits"),
        ({"__metadata__": {"format": 1}}, 0, "can't be read"),
        ({"__metadata__": ["x"]}, 0, "can't be read"),
        (b"[]", 0, "can't be read"),
        (b"", 0, "can't be read"),
        (b"{}{}", 0, "can't be read"),
        (b'{"\xff": 1}', 0, "can't be read"),
        (b"{" + b'"a":{' * 100_000, 0, "can't be read"),
    ],
)
def test_a_header_that_disagrees_with_itself_or_the_file_is_refused(header: Any, data: int, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        parse(header, data)
    assert refused.value.file == "adapter_model.safetensors"
    assert refused.value.way_out


@pytest.mark.parametrize(
    ("prefix", "size", "why"),
    [
        (b"", 0, "has 0 bytes"),
        (b"1234567", 7, "has 7 bytes"),
        (b"\xff" * 8 + b"garbage", 4096, "announce a header of 18446744073709551615 bytes; the file has 4096"),
        ((101).to_bytes(8, "little"), 108, "announce a header of 101 bytes; the file has 108"),
        ((2**26).to_bytes(8, "little"), 2**27, "has 67108864 bytes; at most 33554432"),
        (b"version https://git-lfs.github.com/spec/v1\n", 130, "Git LFS pointer of 130 bytes"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_first_bytes(prefix: bytes, size: int, why: str) -> None:
    with pytest.raises(Refused, match=why):
        header_end(prefix, size, Limits())


@given(st.binary(max_size=300), st.integers(0, 400))
def test_random_bytes_are_parsed_or_refused(raw: bytes, size: int) -> None:
    try:
        parse_safetensors_header(raw, size)
    except Refused:
        return
    assert size >= 8


@given(st.data())
def test_a_good_file_with_any_change_is_parsed_or_refused(data: st.DataObject) -> None:
    raw = bytearray(safetensors())
    end = header_end(raw[:8], len(raw), Limits())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    prefix = bytes(raw[: data.draw(st.sampled_from([end, end - 1, 100, 8]))])
    try:
        tensors = parse_safetensors_header(prefix, len(raw))
    except Refused:
        return
    assert sum(t.data_offsets[1] - t.data_offsets[0] for t in tensors.values()) + end == len(raw)


@given(st.integers(0, len(safetensors()) - 1))
def test_a_file_cut_off_anywhere_is_refused(length: int) -> None:
    with pytest.raises(Refused):
        parse_safetensors_header(safetensors()[:length], length)
