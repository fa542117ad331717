"""The header of a safetensors file: an 8-byte little-endian length, JSON, then the tensors' bytes without gaps.

The rules are those of the format's own reader, which vLLM uses: data offsets start at 0, follow each other without
hole or overlap, agree with dtype and shape, and end where the file ends.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sidecar.core.refusal import Limits, Refused, show

FILE = "adapter_model.safetensors"
MAX_DIMENSIONS = 16

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_LFS_POINTER = b"version "  # of "version https://git-lfs.github.com/spec/v1"

Natural = Annotated[int, msgspec.Meta(ge=0)]


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor: element type, shape, and [begin, end) of its bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


_tensor = msgspec.json.Decoder(Tensor)
_entries = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata = msgspec.json.Decoder(dict[str, str] | None)


def header_end(prefix: bytes, file_size: int, limits: Limits, file: str = FILE) -> int:
    """How many bytes from the file's start `parse_safetensors_header` needs, told by the first 8. Raises Refused."""
    if file_size < 8 or len(prefix) < 8:
        raise Refused(
            file, f"has {file_size} bytes", "a safetensors file has at least 8 and a header", "upload it again"
        )
    length = int.from_bytes(prefix[:8], "little")
    if prefix[:8] == _LFS_POINTER:
        raise Refused(
            file,
            f"is a Git LFS pointer of {file_size} bytes",
            "the weights themselves are needed",
            "run `git lfs pull` before uploading",
        )
    if length + 8 > file_size:
        raise Refused(
            file,
            f"its first 8 bytes announce a header of {length} bytes",
            f"the file has {file_size}",
            "it is cut off or not a safetensors file: upload it again",
        )
    if length > limits.max_header_bytes:
        raise Refused(
            file,
            f"the header has {length} bytes",
            f"at most {limits.max_header_bytes} are read",
            "merge its tensors, or split the adapter",
        )
    return 8 + length


def parse_safetensors_header(
    prefix: bytes, file_size: int, limits: Limits | None = None, file: str = FILE
) -> dict[str, Tensor]:
    """The tensors of a file of `file_size` bytes that begins with `prefix` (at least `header_end` bytes of it).

    Raises Refused for anything that the format's own reader would refuse, and for nothing else.
    """
    end = header_end(prefix, file_size, limits or Limits(), file)
    try:
        tensors = _decode(prefix[8:end])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(
            file,
            f"the header can't be read ({_cause(error)})",
            "a header is a JSON object of dtype, shape and data_offsets by tensor name",
            "it is damaged or not a safetensors file: upload it again",
        ) from None
    _check_layout(tensors, file_size - end, file)
    return tensors


def _decode(header: bytes) -> dict[str, Tensor]:
    # Eager: the error belongs to this header, and bytes that aren't UTF-8 must not wait in a string that nobody reads.
    header.decode()
    entries = _entries.decode(header)
    raw = entries.pop("__metadata__", None)
    if raw is not None:
        _metadata.decode(raw)
    return {name: _tensor.decode(raw) for name, raw in entries.items()}


def _cause(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else show(str(error))[1:-1]


def _check_layout(tensors: dict[str, Tensor], data_size: int, file: str) -> None:
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if begin != at or end < begin:
            raise _broken(file, name, f"has data_offsets [{begin}, {end}]", f"its data must begin at {at}")
        size = _size(tensor, name, file)
        if end - begin != size:
            described = f"{tensor.dtype} of shape {show(list(tensor.shape))}"
            raise _broken(file, name, f"has {end - begin} bytes of data", f"{described} has {size}")
        at = end
    if at != data_size:
        raise Refused(
            file,
            f"holds {data_size} bytes of data",
            f"its header describes {at}",
            "it is cut off or damaged: upload it again",
        )


def _size(tensor: Tensor, name: str, file: str) -> int:
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        raise _broken(file, name, f"has dtype {show(tensor.dtype)}", f"known are {', '.join(sorted(_BITS))}")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise _broken(file, name, f"has {len(tensor.shape)} dimensions", f"at most {MAX_DIMENSIONS} are read")
    for length in tensor.shape:
        bits *= length
    if bits % 8:
        raise _broken(file, name, f"has {bits} bits", "a tensor ends with a whole byte")
    return bits // 8


def _broken(file: str, name: str, found: str, limit: str) -> Refused:
    return Refused(file, f"tensor {show(name)} {found}", limit, "the file is damaged: upload it again")
