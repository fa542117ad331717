"""RESULTS.md: one section for each benchmark, replaced by `--record`."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
TITLE = """# Recorded results

Each section is what its benchmark printed when it was run with `--record`. Absolute times depend on the machine and on
who else uses it; ratios were measured in one run and travel better.
"""


def machine() -> str:
    """One line about what this runs on."""
    cpu = re.search(r"model name\s*: (.*)", _read("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+) kB", _read("/proc/meminfo"))
    gib = f"{int(memory[1]) / 2**20:.0f} GiB" if memory else "memory unknown"
    name = cpu[1].strip() if cpu else platform.machine()
    return f"{os.cpu_count()} cores ({name}), {gib}, {platform.system()}, Python {platform.python_version()}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, its columns aligned so that it reads well in a terminal too."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def record(heading: str, command: str, body: str, path: Path = RESULTS) -> None:
    """Replace the section `heading` of the results, or add it at the end."""
    section = f"## {heading}\n\n`{command}` on {machine()}; load average {os.getloadavg()[0]:.1f}.\n\n{body.strip()}\n"
    sections = re.split(r"(?m)^(?=## )", path.read_text())[1:] if path.exists() else []
    kept = {s.partition("\n")[0]: s.strip() + "\n" for s in sections}
    kept[f"## {heading}"] = section
    path.write_text("\n".join([TITLE, *kept.values()]))
