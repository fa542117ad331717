"""Check of a PEFT LoRA adapter before the engine sees it, from its list of files and a few of their bytes.

The engine accepts some files that it then serves wrongly, and can end itself over others; what can be told beforehand
is told here. A refusal (`Refused`) names the file, the value, the limit and the way out; a warning is served.
"""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.core.paths import contained_path, contained_paths
from sidecar.core.peft import FILE as CONFIG_FILE
from sidecar.core.peft import Config, check_config, check_rank
from sidecar.core.refusal import Limits, Refused, show
from sidecar.core.safetensors import FILE as WEIGHTS_FILE
from sidecar.core.safetensors import Tensor, header_end, parse_safetensors_header

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "Config",
    "Limits",
    "Refused",
    "check_adapter",
    "check_config",
    "check_files",
    "check_tensors",
    "contained_path",
    "contained_paths",
    "header_end",
    "parse_safetensors_header",
]

PREFIX = "base_model.model."
# In the order in which the engine looks for them. It reads no other file of weights.
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_SIDES = {
    ".lora_A.weight": "lora_A",
    ".lora_B.weight": "lora_B",
    ".lora_embedding_A": "lora_A",
    ".lora_embedding_B": "lora_B",
}
# Base weights that PEFT saves along with a changed vocabulary; the engine skips them.
_SKIPPED = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
# PEFT folds all experts of a layer into one pair of matrices: their inner dimension is rank times experts.
_FOLDED = (".experts", ".experts.base_layer")


def check_files(files: Mapping[str, int], limits: Limits) -> str:
    """The name of the weights file that the engine will read, from all files' sizes by path. Raises Refused."""
    contained_paths(files)
    if len(files) > limits.max_files:
        raise Refused(
            "the adapter", f"has {len(files)} files", f"at most {limits.max_files}", "point the URI at one adapter"
        )
    total = sum(files.values())
    if total > limits.max_bytes:
        raise Refused(
            "the adapter", f"has {total} bytes", f"at most {limits.max_bytes}", "point the URI at one adapter"
        )
    if CONFIG_FILE not in files:
        raise _missing(CONFIG_FILE, files, CONFIG_FILE)
    if WEIGHTS_FILE in files:
        return WEIGHTS_FILE
    pickle = next((name for name in _PICKLES if name in files), None)
    if pickle is None:
        raise _missing(WEIGHTS_FILE, files, WEIGHTS_FILE)
    if not limits.allow_pickle:
        raise Refused(
            pickle,
            "holds the weights as a Python pickle, which can run code when it is read",
            f"{WEIGHTS_FILE} is needed",
            "save it with safetensors, or start the agent with --allow-pickle if you trust the origin",
        )
    return pickle


def check_adapter(files: Mapping[str, int], config: bytes, header: bytes, limits: Limits) -> tuple[str, ...]:
    """All checks together; returns the warnings.

    `files` has all sizes by relative path, `config` the content of adapter_config.json, `header` the first `header_end`
    bytes of adapter_model.safetensors (empty if the weights are a pickle). Raises Refused.
    """
    weights = check_files(files, limits)
    parsed = check_config(config, limits)
    if weights != WEIGHTS_FILE:
        return (*parsed.warnings, f"{weights}: a pickle, its tensors were not checked")
    tensors = parse_safetensors_header(header, files[weights], limits)
    return (*parsed.warnings, *check_tensors(parsed, tensors, limits))


def check_tensors(config: Config, tensors: Mapping[str, Tensor], limits: Limits) -> tuple[str, ...]:
    """Whether the tensors are what the configuration says; returns the warnings. Raises Refused."""
    modules: dict[str, dict[str, Tensor]] = {}
    strange: list[str] = []
    for name, tensor in tensors.items():
        split = _split(name)
        if split is not None:
            modules.setdefault(split[0], {})[split[1]] = tensor
        elif not _known(name):
            strange.append(name)
    if not modules:
        raise Refused(
            WEIGHTS_FILE,
            f"has no lora_A and lora_B among its {len(tensors)} tensors{_example(list(tensors))}",
            "a LoRA has a pair of them for each module",
            "upload the adapter's weights, as PEFT's save_pretrained writes them",
        )
    ranks = {module: _check_pair(module, sides, limits) for module, sides in modules.items()}
    return (
        *_warn_names(tensors, strange),
        *_warn_targets(config, modules),
        *_warn_ranks(config, ranks),
    )


def _split(name: str) -> tuple[str, str] | None:
    for suffix, side in _SIDES.items():
        if name.endswith(suffix):
            return name[: -len(suffix)], side
    return None


def _known(name: str) -> bool:
    parts = name.split(".")
    head = len(parts) >= 2 and parts[-2] in ("score", "classifier") and parts[-1] in ("weight", "bias")
    return head or name.endswith(_SKIPPED)


def _check_pair(module: str, sides: Mapping[str, Tensor], limits: Limits) -> int | None:
    """The module's rank, None if its shape doesn't tell."""
    for side, tensor in sides.items():
        if len(tensor.shape) < 2 or 0 in tensor.shape:
            raise _odd(
                module, f"has {side} of shape {show(list(tensor.shape))}", "a LoRA matrix has two dimensions, none 0"
            )
    for side in ("lora_A", "lora_B"):
        if side not in sides:
            raise _odd(module, f"has no {side}", "lora_A and lora_B come in pairs")
    a, b = sides["lora_A"].shape, sides["lora_B"].shape
    if len(a) != 2 or len(b) != 2:
        return None
    if a[0] != b[1]:
        raise _odd(module, f"has lora_A of rank {a[0]} and lora_B of rank {b[1]}", "the two must agree")
    if module.endswith(_FOLDED):
        return None
    check_rank(WEIGHTS_FILE, f"module {show(module)} has rank {a[0]}", a[0], limits)
    return a[0]


def _warn_names(tensors: Mapping[str, Tensor], strange: list[str]) -> list[str]:
    warnings = []
    bare = [name for name in tensors if not name.startswith(PREFIX)]
    if bare:
        warnings.append(
            f"{WEIGHTS_FILE}: {len(bare)} of {len(tensors)} tensors lack the prefix {PREFIX}{_example(bare)}:"
            " the engine may not find their modules, and then serves the base model's answers"
        )
    if strange:
        warnings.append(
            f"{WEIGHTS_FILE}: {len(strange)} tensors are neither lora_A nor lora_B{_example(strange)}:"
            " the engine may refuse them"
        )
    return warnings


def _warn_targets(config: Config, modules: Mapping[str, object]) -> list[str]:
    # Every ending of a module's name that begins after a dot: PEFT matches target_modules that way.
    endings = {ending for module in modules for ending in _endings(module.removesuffix(".base_layer"))}
    missing = [target for target in config.target_modules if target not in endings]
    if not missing:
        return []
    return [
        f"{CONFIG_FILE}: target_modules has {show(missing)}, for which {WEIGHTS_FILE} has no tensors:"
        " they stay as in the base model"
    ]


def _endings(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[at:]) for at in range(len(parts))]


def _warn_ranks(config: Config, ranks: Mapping[str, int | None]) -> list[str]:
    # rank_pattern's keys are regular expressions of someone else: only the set of ranks is compared, none is run.
    other = {module: rank for module, rank in ranks.items() if rank is not None and rank not in config.ranks}
    if not other:
        return []
    module, rank = next(iter(other.items()))
    return [
        f"{WEIGHTS_FILE}: module {show(module)} has rank {rank}, but {CONFIG_FILE} says {config.rank}:"
        " the engine scales by the latter"
    ]


def _missing(file: str, files: Mapping[str, int], wanted: str) -> Refused:
    inner = min((path for path in files if path.endswith("/" + wanted)), default=None)
    if inner is not None:
        way_out = f"point the URI at the folder {show(inner.rpartition('/')[0])}"
    elif files:
        way_out = f"there are {show(sorted(files))}: point the URI at the folder that PEFT's save_pretrained wrote"
    else:
        way_out = "nothing is there: check the URI"
    return Refused(file, "is missing", "an adapter has adapter_config.json and adapter_model.safetensors", way_out)


def _odd(module: str, found: str, limit: str) -> Refused:
    way_out = "save it again with PEFT (under DeepSpeed ZeRO-3, gather the parameters first)"
    return Refused(WEIGHTS_FILE, f"module {show(module)} {found}", limit, way_out)


def _example(names: list[str]) -> str:
    return f" (such as {show(names[0])})" if names else ""
