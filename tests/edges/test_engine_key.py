"""Where the engine's API key comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.edges.engine_key import EngineKey
from sidecar.ports import EngineRefused


def test_a_key_from_the_containers_arguments_serves_where_no_file_is_named(tmp_path: Path) -> None:
    assert EngineKey("").header() == {}
    assert EngineKey("", "sk-known").header() == {"Authorization": "Bearer sk-known"}
    file = tmp_path / "key"
    file.write_text("sk-file\n")
    assert EngineKey(str(file), "sk-known").header() == {"Authorization": "Bearer sk-file"}


def test_a_named_file_that_is_missing_is_no_reason_to_send_another_key(tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match="can't be read"):
        EngineKey(str(tmp_path / "none"), "sk-known").header()


def test_it_is_kept_out_of_what_is_told() -> None:
    assert EngineKey("", "sk-known-key").redact("you sent sk-known-key") == "you sent ***"
