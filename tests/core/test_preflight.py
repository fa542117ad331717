"""The whole check: files, configuration and tensors together."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.preflight import Limits, Refused, check_adapter, check_files, header_end
from tests.core.adapter_bytes import SHAPES, Q, V, config, pair, safetensors

SIXTEEN = Limits(max_lora_rank=16)
FILES = {"adapter_config.json": 1000, "adapter_model.safetensors": 40_000, "README.md": 10}
EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def check(
    shapes: dict[str, tuple[int, ...]] = SHAPES, raw: bytes = config(), limits: Limits = SIXTEEN
) -> tuple[str, ...]:
    weights = safetensors(shapes)
    files = {"adapter_config.json": len(raw), "adapter_model.safetensors": len(weights)}
    return check_adapter(files, raw, weights[: header_end(weights[:8], len(weights), limits)], limits)


def test_a_good_adapter_passes_without_a_warning() -> None:
    assert check() == ()


@pytest.mark.parametrize("extra", ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "sub/x.bin"])
def test_files_that_the_engine_does_not_read_do_not_matter(extra: str) -> None:
    assert check_files({**FILES, extra: 5}, Limits()) == "adapter_model.safetensors"


def test_safetensors_beside_a_pickle_are_what_the_engine_reads() -> None:
    assert check_files({**FILES, "adapter_model.bin": 5}, Limits()) == "adapter_model.safetensors"


@pytest.mark.parametrize("pickle", ["adapter_model.bin", "adapter_model.pt"])
def test_a_pickle_alone_is_refused_unless_it_is_allowed(pickle: str) -> None:
    files = {"adapter_config.json": 10, pickle: 5}
    with pytest.raises(Refused, match="--allow-pickle") as refused:
        check_files(files, Limits())
    assert refused.value.file == pickle
    allowed = Limits(allow_pickle=True)
    assert check_files(files, allowed) == pickle
    assert "not checked" in check_adapter(files, config(), b"", allowed)[0]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "adapter_config.json: is missing; .*; nothing is there"),
        ({"x/adapter_config.json": 1}, 'adapter_config.json: is missing; .* the folder "x"'),
        ({"model.safetensors": 1}, r'adapter_config.json: is missing; .*there are \["model.safetensors"\]'),
        ({"adapter_config.json": 1, "training_args.bin": 1}, "adapter_model.safetensors: is missing"),
        ({**FILES, "../x": 1}, "'..'"),
        ({**FILES, **{f"f{n}": 1 for n in range(300)}}, "has 303 files; at most 256"),
        ({**FILES, "big": 33 * 1024**3}, "has 35433521202 bytes; at most 34359738368"),
    ],
)
def test_what_is_no_adapter_is_refused_by_its_list_of_files(files: dict[str, int], why: str) -> None:
    with pytest.raises(Refused, match=why):
        check_files(files, Limits())


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({}, "has no lora_A and lora_B among its 0 tensors"),
        ({"model.layers.0.self_attn.q_proj.weight": (4, 4)}, r"no lora_A .*\(such as .model.layers.0"),
        ({f"{Q}.lora_A.default.weight": (8, 4)}, "has no lora_A"),
        ({f"{Q}.lora_A.weight": (8, 64)}, "has no lora_B"),
        ({f"{Q}.lora_B.weight": (64, 8)}, "has no lora_A"),
        ({f"{Q}.lora_A.weight": (8, 64), f"{Q}.lora_B.weight": (64, 4)}, "rank 8 and lora_B of rank 4"),
        ({f"{Q}.lora_A.weight": (0,), f"{Q}.lora_B.weight": (0,)}, "shape .0.; .*ZeRO-3"),
        ({f"{Q}.lora_A.weight": (8, 0), f"{Q}.lora_B.weight": (4, 8)}, "shape .8, 0."),
        (pair(Q, rank=32), "q_proj. has rank 32; the engine's --max-lora-rank is 16"),
    ],
)
def test_tensors_that_are_no_lora_are_refused(shapes: dict[str, tuple[int, ...]], why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        check(shapes)
    assert refused.value.file == "adapter_model.safetensors"


def test_the_rank_of_folded_experts_is_not_mistaken_for_a_large_one() -> None:
    shapes = {**pair(EXPERTS, rank=8 * 32), **pair(f"{EXPERTS}.base_layer", rank=8 * 32)}
    assert check(shapes, config(target_modules=None, target_parameters=["experts.down_proj"])) == ()


def test_a_known_classification_head_and_base_embeddings_pass_without_a_warning() -> None:
    shapes = {
        **SHAPES,
        "base_model.model.score.weight": (2, 64),
        "base_model.model.model.embed_tokens.base_layer.weight": (100, 64),
        "base_model.model.model.embed_tokens.lora_embedding_A": (8, 100),
        "base_model.model.model.embed_tokens.lora_embedding_B": (64, 8),
        "base_model.model.conv.lora_A.weight": (8, 4, 3, 3),
        "base_model.model.conv.lora_B.weight": (4, 8, 1, 1),
    }
    assert check(shapes, config(target_modules=["q_proj", "v_proj", "embed_tokens"])) == ()


@pytest.mark.parametrize(
    ("shapes", "raw", "warning"),
    [
        (pair("model.layers.0.self_attn.q_proj"), config(target_modules=["q_proj"]), "2 of 2 tensors lack the prefix"),
        ({**pair(Q), **pair("v_proj")}, config(), "2 of 4 tensors lack the prefix"),
        (SHAPES, config(target_modules=["q_proj", "v_proj", "nonexistent"]), '.*"nonexistent"., for which'),
        (SHAPES, config(target_modules=["nonexistent"]), '"nonexistent"'),
        (pair(Q), config(), '"v_proj"'),
        ({**SHAPES, f"{Q}.lora_magnitude_vector": (64,)}, config(), "1 tensors are neither"),
        (SHAPES, config(r=16), "has rank 8, but adapter_config.json says 16"),
    ],
)
def test_what_may_silently_do_nothing_is_a_warning(
    shapes: dict[str, tuple[int, ...]], raw: bytes, warning: str
) -> None:
    warnings = check(shapes, raw)
    assert len(warnings) == 1
    assert re.search(warning, warnings[0])


@pytest.mark.parametrize(
    "raw",
    [
        config(target_modules=["self_attn.q_proj", "layers.0.self_attn.v_proj"]),
        config(target_modules=[Q.removeprefix("base_model.model."), "v_proj"]),
        config(target_modules="all-linear"),
        config(r=4, rank_pattern={"(a+)+$": 8}),
    ],
)
def test_modules_and_ranks_given_in_peft_s_other_ways_give_no_warning(raw: bytes) -> None:
    assert check(SHAPES, raw) == ()


names = st.sampled_from([Q, V, EXPERTS, "x"]).flatmap(
    lambda m: st.sampled_from([f"{m}.lora_A.weight", f"{m}.lora_B.weight", f"{m}.lora_embedding_A", m])
)


@given(st.dictionaries(names, st.lists(st.integers(0, 20), max_size=3).map(tuple), max_size=5))
def test_any_tensors_pass_or_are_refused_and_no_rank_beyond_the_limit_passes(
    shapes: dict[str, tuple[int, ...]],
) -> None:
    try:
        check(shapes)
    except Refused:
        return
    assert all(s[0] <= 16 or "experts" in n for n, s in shapes.items() if "lora_A" in n and len(s) == 2)
