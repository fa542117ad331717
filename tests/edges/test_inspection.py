"""The preflight of real directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.core.preflight import Limits
from sidecar.edges.filesystem import StoreFailed
from sidecar.edges.inspection import inspect_adapter
from sidecar.ports import AdapterRejected
from tests.core.adapter_bytes import Q, config, pair, safetensors
from tests.edges.stored import write

SIXTEEN = Limits(max_lora_rank=16)
GOOD = {"adapter_config.json": config(), "adapter_model.safetensors": safetensors(), "README.md": b"x"}


def test_a_good_adapter_passes(tmp_path: Path) -> None:
    assert inspect_adapter(write(tmp_path, GOOD), SIXTEEN) == ()


def test_only_the_beginning_of_the_weights_is_read(tmp_path: Path) -> None:
    """A file with a hole of 100 GiB behind a good header: reading it all would take minutes."""
    write(tmp_path, GOOD)
    with (tmp_path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100 * 1024**3)
    with pytest.raises(AdapterRejected, match=r"adapter_model.safetensors: holds 107374181[0-9]+ bytes of data"):
        inspect_adapter(tmp_path, Limits(max_bytes=2**40))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"adapter_config.json": b"{"}, "adapter_config.json: is not JSON"),
        ({"adapter_config.json": b" " * 2_000_000}, "adapter_config.json: has 1048577 bytes; at most 1048576"),
        ({"adapter_config.json": config(r=64)}, "adapter_config.json: r is 64; the engine's --max-lora-rank is 16"),
        ({"adapter_config.json": config(use_dora=True)}, "use_dora is true"),
        ({"adapter_model.safetensors": b""}, "adapter_model.safetensors: has 0 bytes"),
        ({"adapter_model.safetensors": safetensors()[:-100]}, "holds 8092 bytes of data; its header describes 8192"),
        ({"adapter_model.safetensors": b"x" * 4096}, "announce a header of"),
        ({"adapter_model.safetensors": safetensors(pair(Q, rank=32))}, "has rank 32"),
    ],
)
def test_a_bad_one_is_rejected_with_file_value_and_limit(tmp_path: Path, changes: dict[str, bytes], why: str) -> None:
    with pytest.raises(AdapterRejected, match=why):
        inspect_adapter(write(tmp_path, {**GOOD, **changes}), SIXTEEN)


def test_warnings_come_through(tmp_path: Path) -> None:
    tree = {**GOOD, "adapter_config.json": config(target_modules=["q_proj", "v_proj", "nonexistent"])}
    assert "nonexistent" in inspect_adapter(write(tmp_path, tree), SIXTEEN)[0]


def test_a_pickle_is_rejected_and_can_be_allowed(tmp_path: Path) -> None:
    write(tmp_path, {"adapter_config.json": config(), "adapter_model.bin": b"x", "training_args.bin": b"x"})
    with pytest.raises(AdapterRejected, match=r"adapter_model.bin: .*--allow-pickle"):
        inspect_adapter(tmp_path, SIXTEEN)
    assert "not checked" in inspect_adapter(tmp_path, Limits(allow_pickle=True))[0]


def test_a_link_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    (tmp_path / "extra").symlink_to("/etc/passwd")
    with pytest.raises(AdapterRejected, match="extra: is no regular file"):
        inspect_adapter(tmp_path, SIXTEEN)


def test_an_empty_directory_is_rejected_and_a_missing_one_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected, match=r"adapter_config.json: is missing.*nothing is there"):
        inspect_adapter(tmp_path, SIXTEEN)
    with pytest.raises(StoreFailed, match="No such file"):
        inspect_adapter(tmp_path / "missing", SIXTEEN)
