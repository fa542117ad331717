"""`adapter_config.json` as PEFT writes it, and what of it the engine can serve.

Which features are refused follows `vllm/lora/peft_helper.py` of vLLM 0.32. Earlier versions know fewer of these fields
and would serve wrong answers without a word, so they are refused for every version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sidecar.core.refusal import Limits, Refused, show
from sidecar.model import Frozen

FILE = "adapter_config.json"

# Inits that only choose the first values of the adapter's own matrices. All others (PiSSA, OLoRA, CorDA, LoftQ) change
# the base weights as well, which the engine does not do.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
_SERVED_MODULES_TO_SAVE = frozenset({"classifier", "score"})
# Values that vLLM's --max-lora-rank takes.
_ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

_REMEDY_PLAIN = "train or export it as a plain LoRA"


class Config(Frozen, frozen=True, kw_only=True):
    """What the later checks need. `target_modules` is empty if the modules are given by a pattern or by parameters."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = ()
    rank_pattern: dict[str, int] = {}
    base_model: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def ranks(self) -> frozenset[int]:
        """Every rank that a module may have."""
        return frozenset((self.rank, *self.rank_pattern.values()))


def check_config(raw: bytes, limits: Limits) -> Config:
    """The configuration, if the engine can serve an adapter that has it. Raises Refused."""
    fields = _decode(raw, limits)
    warnings = _check_type(fields)
    for name in ("r", "lora_alpha", "target_modules"):
        if name not in fields:
            raise _refused(f"{name} is missing", "r, lora_alpha and target_modules are required", "save it with PEFT")
    config = Config(
        rank=_rank("r", fields["r"]),
        alpha=_alpha(fields["lora_alpha"]),
        target_modules=_target_modules(fields),
        rank_pattern=_rank_pattern(fields.get("rank_pattern")),
        base_model=_text(fields.get("base_model_name_or_path")),
        warnings=warnings,
    )
    for found, rank in (("r", config.rank), *((f"rank_pattern[{show(k)}]", v) for k, v in config.rank_pattern.items())):
        check_rank(FILE, f"{found} is {rank}", rank, limits)
    for check in _FEATURES:
        check(fields)
    return config


def check_rank(file: str, found: str, rank: int, limits: Limits) -> None:
    """Raises Refused if `rank` is more than the engine takes."""
    if not 0 < limits.max_lora_rank < rank:
        return
    enough = next((allowed for allowed in _ENGINE_RANKS if allowed >= rank), None)
    way_out = f"start the engine with --max-lora-rank {enough}, or " if enough else ""
    raise Refused(
        file, found, f"the engine's --max-lora-rank is {limits.max_lora_rank}", way_out + "train a smaller rank"
    )


def _decode(raw: bytes, limits: Limits) -> dict[str, Any]:
    if len(raw) > limits.max_config_bytes:
        raise _refused(f"has {len(raw)} bytes", f"at most {limits.max_config_bytes} are read", "save it with PEFT")
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else show(str(error))[1:-1]
        raise _refused(f"is not JSON ({cause})", "a JSON object is needed", "upload it again") from None
    if not isinstance(fields, dict):
        raise _refused(f"is {show(fields)}", "a JSON object is needed", "save it with PEFT")
    return fields


def _check_type(fields: dict[str, Any]) -> tuple[str, ...]:
    kind = fields.get("peft_type")
    if kind is None:
        # The engine does not read it, so an adapter written by hand is served all the same.
        return (f"{FILE}: peft_type is missing, taken for LORA",)
    if not isinstance(kind, str) or kind.upper() != "LORA":
        raise _refused(f"peft_type is {show(kind)}", "only LORA can be served", _REMEDY_PLAIN)
    return ()


def _rank(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refused(f"{name} is {show(value)}", "a rank is an integer of at least 1", "save it with PEFT")
    return value


def _alpha(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(f"lora_alpha is {show(value)}", "a number is needed", "save it with PEFT")
    return value


def _rank_pattern(value: object) -> dict[str, int]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _refused(f"rank_pattern is {show(value)}", "an object of ranks by module is needed", "save it with PEFT")
    return {str(key): _rank(f"rank_pattern[{show(key)}]", rank) for key, rank in value.items()}


def _target_modules(fields: dict[str, Any]) -> tuple[str, ...]:
    value = fields["target_modules"]
    if isinstance(value, str) and value:
        # A regular expression, or "all-linear": only its author's library can say what it matches.
        return ()
    if isinstance(value, list) and value and all(isinstance(module, str) and module for module in value):
        return tuple(value)
    if value in (None, []) and fields.get("target_parameters"):
        return ()
    raise _refused(
        f"target_modules is {show(value)}", "the names of the modules that it changes are needed", "save it with PEFT"
    )


def _check_modules_to_save(fields: dict[str, Any]) -> None:
    value = fields.get("modules_to_save")
    names = value if isinstance(value, list) else [value]
    unserved = [name for name in names if not (isinstance(name, str) and name in _SERVED_MODULES_TO_SAVE)]
    if value and unserved:
        raise _refused(
            f"modules_to_save has {show(unserved)}",
            "the engine serves only classifier and score as whole modules",
            "train it without modules_to_save (for new tokens, merge them into the base model)",
        )


def _check_bias(fields: dict[str, Any]) -> None:
    value = fields.get("bias")
    if value not in (None, "none"):
        raise _refused(f"bias is {show(value)}", 'the engine serves only "none"', 'train it with bias="none"')


def _check_init(fields: dict[str, Any]) -> None:
    value = fields.get("init_lora_weights")
    if isinstance(value, str) and value.lower() not in _PLAIN_INITS:
        raise _refused(
            f"init_lora_weights is {show(value)}",
            "such inits change the base model's weights, which the engine does not",
            "convert it with PEFT's path_initial_model_for_weight_conversion",
        )


def _switch(field: str, feature: str) -> Callable[[dict[str, Any]], None]:
    def check(fields: dict[str, Any]) -> None:
        if fields.get(field):
            limit = f"the engine does not serve {feature}"
            raise _refused(f"{field} is {show(fields[field])}", limit, _REMEDY_PLAIN)

    return check


_FEATURES: tuple[Callable[[dict[str, Any]], None], ...] = (
    _switch("use_dora", "DoRA"),
    _check_modules_to_save,
    _switch("lora_bias", "biases of LoRA matrices"),
    _check_bias,
    _check_init,
    _switch("alora_invocation_tokens", "activated LoRA (aLoRA)"),
    _switch("layer_replication", "replicated layers"),
    _switch("use_bdlora", "block-diagonal LoRA"),
    _switch("use_qalora", "QALoRA"),
)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _refused(found: str, limit: str, way_out: str) -> Refused:
    return Refused(FILE, found, limit, way_out)
