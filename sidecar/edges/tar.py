"""A reader of tar archives for input that nobody vouches for.

The standard library's `tarfile` reads extension headers of any announced size into memory, seeks back in compressed
streams, and follows sparse maps. This reader goes forward once, holds 64 KiB, and knows regular files and directories:
ustar, GNU long names, and pax headers as far as path and size. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

BLOCK = 512
MAX_EXTENSION_BYTES = 64 * 1024
_CHUNK = 1024**2

_REGULAR = (b"0", b"\0", b"7")
_UNSERVED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
    b"S": "a sparse file",
}


class TarError(Exception):
    """Not a tar archive, a damaged one, or a member that isn't unpacked. The text says which."""


class Stream(Protocol):
    """What is read from: at most `size` bytes, fewer only at the end."""

    def read(self, size: int, /) -> bytes:
        """As of a binary file."""


class Member(NamedTuple):
    """One file or directory. `chunks` yields its content, and must be used up before the next member is asked for."""

    name: str
    size: int
    directory: bool
    chunks: Callable[[], Iterator[bytes]]


def members(stream: Stream, max_headers: int) -> Iterator[Member]:
    """The members in their order. Raises TarError, and what `stream` raises."""
    path: str | None = None
    size: int | None = None
    for count in range(max_headers + 1):
        header = _read(stream, BLOCK, at_end=count > 0)
        if not header.strip(b"\0"):
            return
        if count == max_headers:
            raise TarError(f"has more than {max_headers} headers")
        name, kind, length = _parse(header)
        if kind in (b"x", b"g", b"L", b"K"):
            found_path, found_size = _extension(stream, kind, length)
            path, size = found_path or path, size if found_size is None else found_size
            continue
        yield from _member(stream, path or name, kind, length if size is None else size)
        path, size = None, None


def _member(stream: Stream, name: str, kind: bytes, size: int) -> Iterator[Member]:
    if kind == b"5" or (kind in _REGULAR and name.endswith("/")):
        yield Member(name, 0, True, lambda: iter(()))
        return
    if kind not in _REGULAR:
        raise TarError(f"{name!r} is {_UNSERVED.get(kind, f'of the unknown type {kind!r}')}")
    left = size

    def chunks() -> Iterator[bytes]:
        nonlocal left
        while left:
            chunk = _read(stream, min(left, _CHUNK))
            left -= len(chunk)
            yield chunk

    yield Member(name, size, False, chunks)
    for _ in chunks():
        pass
    _read(stream, -size % BLOCK)


def _parse(header: bytes) -> tuple[str, bytes, int]:
    """Name, type and size of a header block."""
    given = _number(header[148:156])
    if given != sum(header) - sum(header[148:156]) + 8 * 32:
        raise TarError("is not a tar archive, or is damaged (a header's checksum is wrong)")
    name = _text(header[:100])
    if header[257:265] == b"ustar\x0000" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    return name, header[156:157], _number(header[124:136])


def _extension(stream: Stream, kind: bytes, size: int) -> tuple[str | None, int | None]:
    """Path and size that an extension header gives to the next member."""
    if size > MAX_EXTENSION_BYTES:
        raise TarError(f"has an extension header of {size} bytes, more than {MAX_EXTENSION_BYTES}")
    data = _read(stream, size)
    _read(stream, -size % BLOCK)
    if kind == b"L":
        return _text(data), None
    if kind != b"x":
        # Global pax headers hold comments (git writes the commit), "K" the target of a link: neither concerns a file.
        return None, None
    fields = _pax(data)
    if any(key.startswith("GNU.sparse.") for key in fields):
        raise TarError(f"{fields.get('path', '')!r} is a sparse file")
    size_field = fields.get("size")
    if size_field is not None and not (size_field.isascii() and size_field.isdigit() and len(size_field) < 20):
        raise TarError(f"has a damaged extension header (size {size_field!r})")
    return fields.get("path"), None if size_field is None else int(size_field)


def _pax(data: bytes) -> dict[str, str]:
    """Records `<length> <key>=<value>\\n`, where the length counts the whole record."""
    fields: dict[str, str] = {}
    while data.strip(b"\0"):
        digits, space, _ = data.partition(b" ")
        length = int(digits) if space and digits.isdigit() and len(digits) < 8 else 0
        record = data[:length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if length > len(data) or not equals or not record.endswith(b"\n"):
            raise TarError("has a damaged extension header")
        fields[_text(key)] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    return fields


def _number(field: bytes) -> int:
    """Octal digits, or the GNU form for large numbers: a first byte of 0x80 and big-endian binary."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits:
        return 0
    if digits.strip(b"01234567"):
        raise TarError("is not a tar archive, or is damaged (a header's number is none)")
    return int(digits, 8)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _read(stream: Stream, size: int, *, at_end: bool = False) -> bytes:
    """Exactly `size` bytes; with `at_end` the end of the stream reads as the end marker."""
    data = stream.read(size) if size else b""
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            if at_end and not data:
                return bytes(size)
            raise TarError("is cut off")
        data += more
    return data
