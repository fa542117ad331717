"""Small PEFT LoRA adapters out of nothing but the standard library: what the demo serves and the tests load.

The safetensors file is written by hand: 8 bytes of header length, little endian, a JSON header, the raw tensors. Same
seed, same bytes.
"""

from __future__ import annotations

import array
import json
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Tensor = tuple[tuple[int, ...], "array.array[float]"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = {"gate_proj": (1, 2), "up_proj": (1, 2), "down_proj": (2, 1)}


def write_adapter(
    directory: str | Path,
    seed: int | str,
    rank: int = 8,
    *,
    modules: Sequence[str] = ATTENTION,
    hidden: int = 64,
    layers: int = 2,
    base: str = "base-model",
    config: Mapping[str, object] | None = None,
) -> Path:
    """Write a valid adapter into `directory` (made if missing) and return it: adapter_config.json and the weights.

    For a Llama-shaped model of that hidden size whose attention is square and whose MLP is twice as wide; 34 KB by
    default. B isn't zero, so the adapter changes what the model says. `config` overrides keys of the configuration.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    settings: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(modules),
        "inference_mode": True,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        **(config or {}),
    }
    write_json(target / "adapter_config.json", settings)
    rng = random.Random(f"adapter-{seed}")
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        for name in modules:
            wide_in, wide_out = _MLP.get(name, (1, 1))
            inputs, outputs = hidden * wide_in, hidden * wide_out
            block = "mlp" if name in _MLP else "self_attn"
            prefix = f"base_model.model.model.layers.{layer}.{block}.{name}."
            tensors[prefix + "lora_A.weight"] = gauss(rng, (rank, inputs), inputs**-0.5)
            tensors[prefix + "lora_B.weight"] = gauss(rng, (outputs, rank), rank**-0.5)
    write_safetensors(target / "adapter_model.safetensors", tensors)
    return target


def write_json(path: Path, value: object) -> None:
    """`value` as indented JSON with sorted keys."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def gauss(rng: random.Random, shape: tuple[int, ...], deviation: float) -> Tensor:
    """A tensor of normally distributed 32-bit floats."""
    count = 1
    for size in shape:
        count *= size
    return shape, array.array("f", (rng.gauss(0.0, deviation) for _ in range(count)))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write name -> (shape, values) as a safetensors file of type F32."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name, (shape, values) in sorted(tensors.items()):
        if sys.byteorder != "little":
            values = values[:]
            values.byteswap()
        blob = values.tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.writelines(blobs)
