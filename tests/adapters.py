"""Adapters as they lie at an origin: relative path -> content, valid PEFT, of any size."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import tarfile

from sidecar.model import StoredFile, revision_of

Files = dict[str, bytes]


def adapter(seed: str = "a", *, rank: int = 8, weights_bytes: int = 0, **config: object) -> Files:
    """adapter_config.json and adapter_model.safetensors; with `weights_bytes` of about that size, random."""
    columns = max(16, weights_bytes // (4 * rank))
    shapes = {"lora_A": (rank, columns), "lora_B": (16, rank)}
    header: dict[str, object] = {}
    offset = 0
    for side, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        name = f"base_model.model.model.layers.0.self_attn.q_proj.{side}.weight"
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    tensors = os.urandom(offset) if weights_bytes else hashlib.shake_256(seed.encode()).digest(offset)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base-model",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj"],
        **config,
    }
    return {
        "adapter_config.json": json.dumps(settings).encode(),
        "adapter_model.safetensors": struct.pack("<Q", len(raw)) + raw + tensors,
    }


def revision(files: Files) -> str:
    """The identity of this content."""
    return revision_of(
        [StoredFile(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest()) for path, data in files.items()]
    )


def tar_gz(files: Files) -> bytes:
    """The files as a .tar.gz."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()
