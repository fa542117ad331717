"""File names that come from outside (object keys, archive members, a peer's list): inside the adapter, or refused."""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.core.refusal import Refused, show

MAX_PATH_CHARACTERS = 512
MAX_SEGMENT_BYTES = 255


def contained_path(path: str) -> str:
    """`path` itself if it is a plain relative path that stays inside the directory it is joined to.

    Accepted are at most 512 characters of segments separated by single `/`, each at most 255 bytes of UTF-8, none of
    them `.` or `..`, without backslashes and control characters. Nothing is normalised: what can be read in two ways
    is refused. Raises Refused.
    """
    fault = _fault(path)
    if fault:
        raise Refused(
            show(path),
            fault,
            f"allowed are relative paths of at most {MAX_PATH_CHARACTERS} characters that stay inside the adapter",
            "rename the file at its origin",
        )
    return path


def contained_paths(paths: Iterable[str]) -> tuple[str, ...]:
    """All of `paths`, each contained, none twice, none both a file and a folder of another. Raises Refused."""
    seen: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        contained_path(path)
        if path in seen:
            raise Refused(show(path), "is there twice", "each path may occur once", "remove one of the two")
        seen.add(path)
        folders.update(path[:at] for at, character in enumerate(path) if character == "/")
    both = seen & folders
    if both:
        raise Refused(show(min(both)), "is both a file and a folder", "a path can be one of the two", "rename the file")
    return tuple(seen)


def _fault(path: str) -> str:
    if not path:
        return "the path is empty"
    if len(path) > MAX_PATH_CHARACTERS:
        return f"the path has {len(path)} characters"
    if "\\" in path:
        return "the path holds a backslash"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "the path holds a control character"
    if path.startswith("/"):
        return "the path is absolute"
    return _segment_fault(path.split("/"))


def _segment_fault(segments: list[str]) -> str:
    for segment in segments:
        if segment == "":
            return "the path has an empty segment"
        if segment in (".", ".."):
            return f"the path has the segment {segment!r}"
        try:
            length = len(segment.encode())
        except UnicodeEncodeError:
            return "the path is not valid Unicode"
        if length > MAX_SEGMENT_BYTES:
            return f"a name in the path has {length} bytes, more than {MAX_SEGMENT_BYTES}"
    return ""
