"""The file of recorded results keeps every benchmark's section apart."""

from __future__ import annotations

from pathlib import Path

from tests.bench.results import record, table


def test_recording_replaces_its_own_section_only(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    for heading, body in [("One", "first"), ("Two", "second"), ("One", "again")]:
        record(heading, "python -m bench", body, path)
    text = path.read_text()
    assert text.count("# Recorded results") == text.count("## One") == text.count("## Two") == 1
    assert "first" not in text
    assert text.index("again") < text.index("second")


def test_a_table_lines_up() -> None:
    lines = table(["what", "s"], [["a", 1], ["longer", 20]]).splitlines()
    assert lines == ["| what   | s  |", "|--------|----|", "| a      | 1  |", "| longer | 20 |"]
