"""What the stub engine does with an adapter's files: the checks of vLLM, in its order and in its words.

Part of the stub engine (`stub_engine`), which stands in for vLLM in the demo and in tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
_MAX_HEADER = 100_000_000


class LoraError(Exception):
    """The adapter can't be loaded; the text is vLLM's."""


class LoraNotFound(LoraError):
    """There is no adapter at the path."""


def read_adapter(path: str, max_rank: int, hidden: int | None) -> str:
    """Check the adapter at `path` and return the identity of its weights. Raises LoraError, LoraNotFound.

    With `hidden` the tensors must fit a model of that hidden size.
    """
    config = _read_config(path)
    missing = {key for key in ("r", "lora_alpha", "target_modules") if key not in config}
    if missing:
        raise LoraError(f"Missing required configuration fields: {missing}")
    if config.get("use_dora"):
        raise LoraError("vLLM does not yet support DoRA.")
    rank = config["r"]
    if isinstance(rank, int) and rank > max_rank:
        raise LoraError(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}.")
    safetensors = os.path.join(path, "adapter_model.safetensors")
    if os.path.isfile(safetensors):
        weights = _read(safetensors)
        _check_tensors(weights, hidden)
        return hashlib.sha256(weights).hexdigest()
    for name in ("adapter_model.bin", "adapter_model.pt"):
        if os.path.isfile(os.path.join(path, name)):
            return hashlib.sha256(_read(os.path.join(path, name))).hexdigest()
    raise LoraError("<path> doesn't contain tensors")


def _read_config(path: str) -> dict[str, object]:
    try:
        text = _read(os.path.join(path, "adapter_config.json"))
    except FileNotFoundError:
        raise LoraNotFound from None
    except OSError as error:
        raise LoraError(f"[Errno {error.errno}] {error.strerror}: '<path>'") from None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise LoraError(str(error)) from None
    if not isinstance(config, dict):
        raise LoraError(f"argument of type '{type(config).__name__}' is not iterable")
    return config


def _check_tensors(weights: bytes, hidden: int | None) -> None:
    header = _header(weights)
    unexpected = []
    for name in header:
        module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        if module.rpartition(".")[2] not in MODULES:
            unexpected.append(module)
    if unexpected:
        raise LoraError(
            f"While loading <path>, expected target modules in {set(MODULES)} but received {unexpected}. "
            "Please verify that the loaded LoRA module is correct"
        )
    for name, shape in header.items():
        if hidden and name.endswith("q_proj.lora_A.weight") and shape[-1:] != [hidden]:
            raise LoraError(
                f"The size of tensor a ({hidden}) must match the size of tensor b ({shape[-1]}) at non-singleton "
                "dimension 1"
            )


def _header(weights: bytes) -> dict[str, list[int]]:
    """Tensor name -> shape. Raises LoraError with the words of the safetensors library."""
    if len(weights) < 8:
        raise LoraError("Error while deserializing header: header too small")
    (length,) = struct.unpack("<Q", weights[:8])
    if length > _MAX_HEADER:
        raise LoraError("Error while deserializing header: header too large")
    if length + 8 > len(weights):
        raise LoraError("Error while deserializing header: invalid header length")
    try:
        document = json.loads(weights[8 : 8 + length])
        tensors = {k: v for k, v in document.items() if k != "__metadata__"}
        end = max((v["data_offsets"][1] for v in tensors.values()), default=0)
        shapes = {name: list(tensor["shape"]) for name, tensor in tensors.items()}
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise LoraError(f"Error while deserializing header: invalid JSON in header: {error}") from None
    if end != len(weights) - 8 - length:
        raise LoraError("Error while deserializing header: incomplete metadata, file not fully covered")
    return shapes


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
