"""Bytes of small PEFT LoRA adapters, made by hand, good and broken."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

GOOD: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "base",
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
    "inference_mode": True,
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "loftq_config": {},
}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
V = "base_model.model.model.layers.0.self_attn.v_proj"


def config(without: str = "", **changes: Any) -> bytes:
    fields = {**GOOD, **changes}
    fields.pop(without, None)
    return json.dumps(fields).encode()


def pair(module: str, rank: int = 8, width: int = 64) -> dict[str, tuple[int, ...]]:
    return {f"{module}.lora_A.weight": (rank, width), f"{module}.lora_B.weight": (width, rank)}


SHAPES = {**pair(Q), **pair(V)}


def entries(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Any], int]:
    """The header's entries for float32 tensors of these shapes, and how many bytes of data they have."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header, at


def framed(header: bytes | dict[str, Any]) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw


def safetensors(shapes: Mapping[str, tuple[int, ...]] = SHAPES, seed: int = 0) -> bytes:
    header, size = entries(shapes)
    return framed(header) + bytes((seed + at) % 251 for at in range(256)) * (size // 256) + bytes(size % 256)
