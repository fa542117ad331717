"""adapter_config.json: what the engine would refuse or serve wrongly is refused before it, in words that help."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.preflight import Limits, Refused, check_config
from tests.core.adapter_bytes import GOOD, config

SIXTEEN = Limits(max_lora_rank=16)


def test_a_config_as_peft_writes_it_passes() -> None:
    parsed = check_config(config(), SIXTEEN)
    assert (parsed.rank, parsed.alpha, parsed.target_modules) == (8, 16, ("q_proj", "v_proj"))
    assert parsed.base_model == "base"
    assert parsed.warnings == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 16},
        {"rank_pattern": {"q_proj": 16}},
        {"rank_pattern": None},
        {"lora_alpha": 0.5},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": None, "target_parameters": ["mlp.experts.down_proj"]},
        {"modules_to_save": ["score"]},
        {"modules_to_save": []},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva"},
        {"init_lora_weights": False},
        {"bias": None},
        {"peft_type": "lora"},
        {"use_rslora": True},
        {"loftq_config": {"loftq_bits": 4}},
        {"an_option_of_the_future": {"x": 1}},
    ],
    ids=str,
)
def test_what_the_engine_serves_passes(changes: dict[str, Any]) -> None:
    assert check_config(config(**changes), SIXTEEN).warnings == ()


def test_a_config_written_by_hand_without_a_type_is_served_with_a_warning() -> None:
    assert "peft_type is missing" in check_config(config(without="peft_type"), SIXTEEN).warnings[0]


@pytest.mark.parametrize(
    ("changes", "found", "limit"),
    [
        ({"peft_type": "IA3"}, 'peft_type is "IA3"', "only LORA"),
        ({"peft_type": 7}, "peft_type is 7", "only LORA"),
        ({"r": 64}, "r is 64", "--max-lora-rank is 16"),
        ({"r": 17}, "r is 17", "--max-lora-rank is 16"),
        ({"rank_pattern": {"q_proj": 32}}, 'rank_pattern["q_proj"] is 32', "--max-lora-rank is 16"),
        ({"r": 0}, "r is 0", "at least 1"),
        ({"r": -8}, "r is -8", "at least 1"),
        ({"r": "8"}, 'r is "8"', "integer"),
        ({"r": True}, "r is true", "integer"),
        ({"r": 8.5}, "r is 8.5", "integer"),
        ({"r": None}, "r is null", "integer"),
        ({"rank_pattern": {"q_proj": "x"}}, 'rank_pattern["q_proj"] is "x"', "integer"),
        ({"rank_pattern": [8]}, "rank_pattern is [8]", "object"),
        ({"lora_alpha": None}, "lora_alpha is null", "number"),
        ({"lora_alpha": True}, "lora_alpha is true", "number"),
        ({"target_modules": None}, "target_modules is null", "names of the modules"),
        ({"target_modules": []}, "target_modules is []", "names of the modules"),
        ({"target_modules": ""}, 'target_modules is ""', "names of the modules"),
        ({"target_modules": [1]}, "target_modules is [1]", "names of the modules"),
        ({"use_dora": True}, "use_dora is true", "DoRA"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save has ["lm_head"]', "classifier and score"),
        ({"modules_to_save": ["score", "embed_tokens"]}, '["embed_tokens"]', "classifier and score"),
        ({"modules_to_save": "lm_head"}, '["lm_head"]', "classifier and score"),
        ({"lora_bias": True}, "lora_bias is true", "biases"),
        ({"bias": "all"}, 'bias is "all"', '"none"'),
        ({"bias": "lora_only"}, 'bias is "lora_only"', '"none"'),
        ({"init_lora_weights": "pissa"}, '"pissa"', "base model's weights"),
        ({"init_lora_weights": "pissa_niter_16"}, '"pissa_niter_16"', "base model's weights"),
        ({"init_lora_weights": "olora"}, '"olora"', "base model's weights"),
        ({"init_lora_weights": "loftq"}, '"loftq"', "base model's weights"),
        ({"init_lora_weights": "corda"}, '"corda"', "base model's weights"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is [1, 2]", "aLoRA"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication is a list of 2", "replicated"),
        ({"use_bdlora": {"x": 1}}, "use_bdlora is an object", "block-diagonal"),
        ({"use_qalora": True}, "use_qalora is true", "QALoRA"),
    ],
    ids=str,
)
def test_a_refusal_names_the_file_the_value_and_the_limit(changes: dict[str, Any], found: str, limit: str) -> None:
    with pytest.raises(Refused) as refused:
        check_config(config(**changes), SIXTEEN)
    message = str(refused.value)
    assert message.startswith("adapter_config.json: ")
    assert found in refused.value.found
    assert limit in refused.value.limit
    assert refused.value.way_out in message


@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules"])
def test_a_required_field_that_is_missing_is_named(field: str) -> None:
    with pytest.raises(Refused, match=f"{field} is missing"):
        check_config(config(without=field), SIXTEEN)


def test_an_unknown_limit_refuses_no_rank() -> None:
    assert check_config(config(r=4096), Limits()).rank == 4096


@pytest.mark.parametrize(("rank", "flag"), [(17, "--max-lora-rank 32"), (64, "--max-lora-rank 64"), (300, "320")])
def test_the_way_out_of_a_rank_too_large_is_a_value_that_the_engine_takes(rank: int, flag: str) -> None:
    with pytest.raises(Refused, match=flag):
        check_config(config(r=rank), SIXTEEN)


def test_no_flag_is_promised_for_a_rank_that_no_engine_takes() -> None:
    with pytest.raises(Refused, match="train a smaller rank") as refused:
        check_config(config(r=1000), SIXTEEN)
    assert "start the engine" not in refused.value.way_out


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"", "is not JSON"),
        (b'{"r": 8, "lora_al', "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "is []"),
        (b'"x"', 'is "x"'),
        (b"null", "is null"),
        (b'{"r": NaN}', "is not JSON"),
        (b" " * (1024**2 + 1), "has 1048577 bytes"),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes, found: str) -> None:
    with pytest.raises(Refused) as refused:
        check_config(raw, SIXTEEN)
    assert found in refused.value.found


def test_a_huge_or_hostile_value_makes_a_short_printable_message() -> None:
    for value in ("x" * 500_000, "a\nb\x1b[31m\u202e", {"a": 1}, ["y" * 10_000] * 1_000):
        with pytest.raises(Refused) as refused:
            check_config(config(peft_type=value), SIXTEEN)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 600


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*GOOD, "lora_bias", "use_qalora", "target_parameters"]), json_values))
def test_any_values_in_the_fields_pass_or_are_refused(changes: dict[str, Any]) -> None:
    try:
        parsed = check_config(json.dumps({**GOOD, **changes}).encode(), SIXTEEN)
    except Refused:
        return
    assert 1 <= max(parsed.ranks) <= 16


@given(st.binary(max_size=200) | st.binary(max_size=20).map(lambda noise: config()[: -len(noise) or None] + noise))
def test_any_bytes_pass_or_are_refused(raw: bytes) -> None:
    try:
        parsed = check_config(raw, SIXTEEN)
    except Refused:
        return
    assert 1 <= parsed.rank <= 16
