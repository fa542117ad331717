"""Why an adapter is refused, in words for people: the file, what it holds, the limit, the way out."""

from __future__ import annotations

import json

from sidecar.model import MAX_FILES, Frozen

SHOWN_CHARACTERS = 80


class Limits(Frozen, frozen=True, kw_only=True):
    """What this worker accepts. Sizes are bytes."""

    # The engine's --max-lora-rank; 0: not known here, the engine says no by itself.
    max_lora_rank: int = 0
    # Whether adapter_model.bin and .pt (Python pickles, which can run code when they are read) may be served.
    allow_pickle: bool = False
    max_files: int = MAX_FILES
    max_bytes: int = 32 * 1024**3
    # A real configuration has 1 to 4 KiB.
    max_config_bytes: int = 1024**2
    # 90,000 tensors (a large mixture of experts) have 15 MiB of header; the format itself permits 100 MB.
    max_header_bytes: int = 32 * 1024**2


class Refused(Exception):
    """The content can't be served as it is. Permanent until the content or the limit changes."""

    def __init__(self, file: str, found: str, limit: str, way_out: str) -> None:
        super().__init__(f"{file}: {found}; {limit}; {way_out}")
        self.file = file
        self.found = found
        self.limit = limit
        self.way_out = way_out


def show(value: object) -> str:
    """A value of someone else's file for a message: one line, printable, bounded."""
    if isinstance(value, dict):
        return f"an object of {len(value)} entries"
    if isinstance(value, list | tuple):
        if not all(item is None or isinstance(item, str | int | float) for item in value[:5]):
            return f"a list of {len(value)} entries"
        shown = [show(item) for item in value[:5]]
        return _cut(f"[{', '.join(shown)}{', …' if len(value) > 5 else ''}]")
    if isinstance(value, str):
        # Cut before it is quoted: quoting a megabyte to show 80 characters of it costs more than the check.
        value = _cut(value)
    text = json.dumps(value, ensure_ascii=False)
    return _cut(text if text.isprintable() else json.dumps(value), slack=6 * SHOWN_CHARACTERS)


def _cut(text: str, slack: int = 2) -> str:
    return text if len(text) <= SHOWN_CHARACTERS + slack else text[:SHOWN_CHARACTERS] + "…"
