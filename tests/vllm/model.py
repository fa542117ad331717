"""A Llama of 480 KB, its byte-level tokenizer, and adapters for it, good and broken: the same bytes each time.

Standard library only. Nothing comes from a model hub.
"""

from __future__ import annotations

import array
import json
import random
from pathlib import Path

from sidecar.edges.sample_adapter import ATTENTION, Tensor, gauss, write_adapter, write_json, write_safetensors

HIDDEN, INNER, LAYERS, HEADS, HEAD = 64, 128, 2, 2, 32
# It writes 500 tokens a second on a quiet machine: a request of some thousands lasts long enough to be looked at.
CONTEXT = 4096
SPECIALS = ["<unk>", "<s>", "</s>"]
# (inputs, outputs) of every projection.
SHAPES = {
    "q_proj": (HIDDEN, HEADS * HEAD),
    "k_proj": (HIDDEN, HEADS * HEAD),
    "v_proj": (HIDDEN, HEADS * HEAD),
    "o_proj": (HEADS * HEAD, HIDDEN),
    "gate_proj": (HIDDEN, INNER),
    "up_proj": (HIDDEN, INNER),
    "down_proj": (INNER, HIDDEN),
}
# Broken adapters that vLLM loads all the same: only who checks before can refuse them.
LOADED_ALL_THE_SAME = frozenset({"weights-flipped", "rank-mismatch", "wrong-base"})


def write_model(target: Path, seed: int = 0) -> Path:
    """Write the base model and its tokenizer into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(target)
    write_json(
        target / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": vocabulary,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        },
    )
    write_json(target / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    rng = random.Random(f"model-{seed}")
    tensors = {
        "model.embed_tokens.weight": gauss(rng, (vocabulary, HIDDEN), 1.0),
        "model.norm.weight": _ones(HIDDEN),
        "lm_head.weight": gauss(rng, (vocabulary, HIDDEN), 0.3),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = _ones(HIDDEN)
        tensors[prefix + "post_attention_layernorm.weight"] = _ones(HIDDEN)
        for name, (inputs, outputs) in SHAPES.items():
            block = "self_attn." if name in ATTENTION else "mlp."
            tensors[prefix + block + name + ".weight"] = gauss(rng, (outputs, inputs), inputs**-0.5)
    write_safetensors(target / "model.safetensors", tensors)
    return target


def write_broken(target: Path, seed: int = 0) -> dict[str, Path]:
    """Write one folder for each way in which an adapter can be bad: kind -> path."""
    plain = (
        "config-not-json config-no-r config-missing weights-missing weights-truncated weights-garbage weights-empty "
        "weights-flipped"
    )
    paths = {kind: write_adapter(target / kind, f"{seed}-{kind}") for kind in plain.split()}
    (paths["config-not-json"] / "adapter_config.json").write_text('{"r": 8, "lora_al')
    config = json.loads((paths["config-no-r"] / "adapter_config.json").read_text())
    del config["r"]
    write_json(paths["config-no-r"] / "adapter_config.json", config)
    (paths["config-missing"] / "adapter_config.json").unlink()
    (paths["weights-missing"] / "adapter_model.safetensors").unlink()
    for kind, change in (
        ("weights-truncated", lambda raw: raw[: len(raw) // 2]),
        ("weights-garbage", lambda raw: random.Random(seed).randbytes(4096)),
        ("weights-empty", lambda raw: b""),
        ("weights-flipped", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])),
    ):
        weights = paths[kind] / "adapter_model.safetensors"
        weights.write_bytes(change(weights.read_bytes()))
    paths["rank-too-high"] = write_adapter(target / "rank-too-high", seed, rank=32)
    paths["wrong-modules"] = write_adapter(target / "wrong-modules", seed, modules=("nonesuch_proj",))
    paths["wrong-hidden"] = write_adapter(target / "wrong-hidden", seed, hidden=2 * HIDDEN)
    paths["wrong-base"] = write_adapter(target / "wrong-base", seed, base="some-other/model")
    paths["dora"] = write_adapter(target / "dora", seed, config={"use_dora": True})
    paths["rank-mismatch"] = write_adapter(target / "rank-mismatch", seed, config={"r": 16, "lora_alpha": 32})
    paths["empty-dir"] = target / "empty-dir"
    paths["empty-dir"].mkdir(parents=True, exist_ok=True)
    return paths


def _write_tokenizer(target: Path) -> int:
    """Byte-level, no merges: token = byte + 3. Returns the size of the vocabulary."""
    vocabulary = {token: number for number, token in enumerate(SPECIALS + _byte_alphabet())}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    write_json(
        target / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": number, "content": token, **special} for number, token in enumerate(SPECIALS)],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": [],
            },
        },
    )
    write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "clean_up_tokenization_spaces": False,
        },
    )
    return len(vocabulary)


def _byte_alphabet() -> list[str]:
    """The printable stand-ins that byte-level BPE uses for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def _ones(count: int) -> Tensor:
    return (count,), array.array("f", [1.0]) * count
