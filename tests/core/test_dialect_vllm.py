"""What vLLM's answers mean, in each dialect it has spoken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.dialect_vllm import (
    MAX_MESSAGE,
    Answer,
    Limits,
    Verdict,
    clean,
    parse_limits,
    parse_models,
    parse_version,
    read_load,
    read_unload,
    stale_prefix_cache,
)
from sidecar.model import MAX_ENTRIES, BaseModel

ALREADY = (
    "The lora adapter 'a1' has already been loaded. "
    "If you want to load the adapter in place, set 'load_inplace' to True."
)
WORKER = (
    "Call to add_lora method failed: Worker failed with error '{}', "
    "please check the stack trace above for the root cause"
)


def nested(message: str, kind: str = "InternalServerError", code: int = 500) -> bytes:
    """An error as vLLM writes it today."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def flat(message: str, kind: str = "BadRequestError", code: int = 400) -> bytes:
    """An error as vLLM wrote it before."""
    return json.dumps({"object": "error", "message": message, "type": kind, "param": None, "code": code}).encode()


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (200, b"Success: LoRA adapter 'a1' added successfully.", Verdict.OK),
        (200, b"", Verdict.OK),
        (200, b'"Success"', Verdict.OK),
        (200, nested("it failed after all"), Verdict.REFUSED),
        (400, nested(ALREADY, "InvalidUserInput", 400), Verdict.ALREADY_LOADED),
        (400, flat("The lora adapter 'a1' has already been loaded.", "InvalidUserInput"), Verdict.ALREADY_LOADED),
        (400, nested("The lora adapter 'tiny' conflicts with a served base model."), Verdict.BASE_MODEL),
        (404, nested("Loading lora a1 failed: No adapter found for <path>", "NotFoundError", 404), Verdict.NO_FILES),
        (400, flat("Loading lora a1 failed: No adapter found for /x"), Verdict.NO_FILES),
        (500, nested(WORKER.format("Loading lora a1 failed: No adapter found for /x")), Verdict.NO_FILES),
        (404, b'{"detail":"Not Found"}', Verdict.RUNTIME_DISABLED),
        (405, b'{"detail":"Method Not Allowed"}', Verdict.REFUSED),
        (401, b'{"error":"Unauthorized"}', Verdict.UNAUTHORIZED),
        (403, b"<html>Forbidden</html>", Verdict.UNAUTHORIZED),
        (400, nested("CUDA out of memory. Tried to allocate 2.00 GiB"), Verdict.OUT_OF_MEMORY),
        (500, nested(WORKER.format("torch.OutOfMemoryError: HIP out of memory")), Verdict.OUT_OF_MEMORY),
        (500, flat("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), Verdict.OUT_OF_MEMORY),
        (
            500,
            nested("EngineCore encountered an issue. See stack trace (above) for the root cause."),
            Verdict.UNAVAILABLE,
        ),
        (503, b"upstream connect error", Verdict.UNAVAILABLE),
        (502, b"", Verdict.UNAVAILABLE),
        (504, nested("timeout"), Verdict.UNAVAILABLE),
        (500, nested(WORKER.format("vLLM does not yet support DoRA.")), Verdict.REFUSED),
        (400, flat("LoRA rank 32 is greater than max_lora_rank 16."), Verdict.REFUSED),
        (500, b"Internal Server Error", Verdict.REFUSED),
        (307, b"", Verdict.REFUSED),
        (400, b"\xff\xfe\x00", Verdict.REFUSED),
        (400, b'{"error":{"message":5}}', Verdict.REFUSED),
    ],
)
def test_load(status: int, body: bytes, verdict: Verdict) -> None:
    assert read_load(status, body).verdict is verdict


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (200, b"Success: LoRA adapter 'a1' removed successfully.", Verdict.OK),
        (404, nested("The lora adapter 'a1' cannot be found.", "NotFoundError", 404), Verdict.ABSENT),
        (400, flat("The lora adapter 'a1' cannot be found.", "InvalidUserInput"), Verdict.ABSENT),
        (404, nested("no such thing", "NotFoundError", 404), Verdict.ABSENT),
        (404, b'{"detail":"Not Found"}', Verdict.RUNTIME_DISABLED),
        (404, b"404 page not found", Verdict.REFUSED),
        (404, b"", Verdict.REFUSED),
        (401, b'{"error":"Unauthorized"}', Verdict.UNAUTHORIZED),
        (500, nested("EngineCore encountered an issue."), Verdict.UNAVAILABLE),
        (
            400,
            nested("'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput"),
            Verdict.REFUSED,
        ),
    ],
)
def test_unload(status: int, body: bytes, verdict: Verdict) -> None:
    assert read_unload(status, body).verdict is verdict


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (nested(WORKER.format("vLLM does not yet support DoRA.")), "vLLM does not yet support DoRA."),
        (
            nested(WORKER.format("Missing required configuration fields: {'r'}")),
            "Missing required configuration fields: {'r'}",
        ),
        (nested("1 validation error:\n  {'type': 'missing'}"), "1 validation error: {'type': 'missing'}"),
        (b"Internal Server Error", "HTTP 500: Internal Server Error"),
        (b"", "HTTP 500"),
        (b'{"error":"Busy"}', "HTTP 500: Busy"),
        (b'{"detail":[{"loc":["body"]}]}', 'HTTP 500: {"detail":[{"loc":["body"]}]}'),
        (nested("a\x1b[31m\x00b\u2028c"), "a [31m b c"),
    ],
)
def test_the_message_is_the_engines_own_reason_in_one_line(body: bytes, message: str) -> None:
    assert read_load(500, body) == Answer(Verdict.REFUSED, message)


def test_a_rank_that_is_too_high_comes_with_the_flag_to_change() -> None:
    answer = read_load(500, nested(WORKER.format("LoRA rank 100 is greater than max_lora_rank 16.")))
    assert answer.message == ("LoRA rank 100 is greater than max_lora_rank 16. Start vLLM with --max-lora-rank 128.")
    assert "Start" not in read_load(500, nested("LoRA rank 9999 is greater than max_lora_rank 16.")).message


def test_models() -> None:
    body = {
        "object": "list",
        "data": [
            {"id": "tiny", "root": "/m/tiny", "parent": None, "permission": [{}]},
            {"id": "alias", "root": "/m/tiny", "parent": None},
            {"id": "org/a:1 @x", "root": "/adapters/1", "parent": "tiny"},
            {"id": "bare", "parent": "tiny"},
            {"id": "odd root", "root": 5, "parent": "tiny"},
            {"id": "", "root": "/x", "parent": "tiny"},
            {"id": 7, "root": "/x", "parent": "tiny"},
            {"root": "/x"},
            "text",
        ],
    }
    models = parse_models(json.dumps(body).encode())
    assert models is not None
    assert models.base_models == (BaseModel(id="tiny", root="/m/tiny"), BaseModel(id="alias", root="/m/tiny"))
    assert models.adapters == {"org/a:1 @x": "/adapters/1", "bare": "", "odd root": ""}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"data":null}',
        b'{"data":{}}',
        b'{"error":{"message":"x"}}',
        b'{"data":[{"id":"a","parent":"b"}]',
        b"[" * 100_000,
        json.dumps({"data": [{"id": "a"}] * (MAX_ENTRIES + 1)}).encode(),
    ],
)
def test_what_is_no_list_of_models_is_unknown_and_not_empty(body: bytes) -> None:
    assert parse_models(body) is None


def test_an_empty_list_is_empty() -> None:
    models = parse_models(b'{"object":"list","data":[]}')
    assert models is not None
    assert (models.base_models, models.adapters) == ((), {})


def test_limits() -> None:
    def info(**lora: object) -> bytes:
        return json.dumps({"vllm_config": {"lora_config": lora}}).encode()

    assert parse_limits(info(max_loras=2, max_cpu_loras=3, max_lora_rank=16)) == Limits(2, 3, 16)
    assert parse_limits(info(max_loras=2, max_cpu_loras=None, max_lora_rank=16)) == Limits(2, 2, 16)
    assert parse_limits(info(max_loras=True, max_cpu_loras=3, max_lora_rank=16)) is None
    assert parse_limits(info(max_loras=2)) is None
    for body in (b'{"vllm_config":{"lora_config":null}}', b'{"vllm_config":"model=..."}', b"[]", b"text"):
        assert parse_limits(body) is None


def test_version() -> None:
    assert parse_version(b'{"version":"0.32.0"}') == "0.32.0"
    assert parse_version(b'{"version":5}') == ""
    assert parse_version(b"<html>") == ""
    assert len(parse_version(json.dumps({"version": "1" * 500}).encode())) == 64


@pytest.mark.parametrize(
    ("version", "stale"),
    [
        ("0.9.2", False),
        ("0.10.2", False),
        ("0.11.2", False),
        ("0.12.0rc1", True),
        ("0.12.0", True),
        ("0.16.0", True),
        ("0.30.0", True),
        ("v0.30.1.post1", True),
        ("0.30.0+cpu", True),
        ("0.31.0rc1", True),
        ("0.31.0", False),
        ("0.31.1rc1", True),
        ("0.32.0", False),
        ("0.32.0+cu129", False),
        ("0.32.1rc1", False),
        ("1.0.0", False),
        # Builds between releases: the number is that of the last tag, or of none at all.
        ("0.1.dev1+g1234567", True),
        ("0.11.1.dev20+g1234567", True),
        ("0.31.0.dev5+g1234567", True),
        ("0.32.1.dev5+g1234567.d20261101", False),
        # Not to be told.
        ("", True),
        ("dev", True),
        ("0.32", False),
        ("32", True),
        ("0.x.1", True),
        ("0.32.0 (custom)", True),
        ("\u0660.\u0663\u0662.\u0660", True),  # digits, but not these
    ],
)
def test_stale_prefix_cache(version: str, stale: bool) -> None:
    assert stale_prefix_cache(version) is stale


def test_clean() -> None:
    assert clean("  a\n\tb\x7f c ") == "a b c"
    assert clean("x" * 1000, 10) == "xxxxxxxxx…"


BODIES = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=300).map(str.encode),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["error", "message", "type", "object", "detail", "data", "id", "root", "parent", "code"]
                )
                | st.text(max_size=5),
                inner | st.just("error"),
                max_size=4,
            )
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode()),
)


@given(st.integers(100, 599), BODIES)
def test_no_answer_raises_and_every_message_is_one_bounded_line(status: int, body: bytes) -> None:
    for read in (read_load, read_unload):
        answer = read(status, body)
        assert len(answer.message) <= MAX_MESSAGE + 60
        assert answer.message.isprintable()
        assert answer.verdict is not Verdict.OK or status // 100 == 2
    models = parse_models(body)
    assert models is None or len(models.adapters) + len(models.base_models) <= MAX_ENTRIES
    parse_limits(body)
    assert len(parse_version(body)) <= 64


@given(st.text(max_size=40) | st.from_regex(r"v?\d{1,3}\.\d{1,3}(\.\d+)?(rc\d)?(\.dev\d+)?", fullmatch=True))
def test_no_version_raises(version: str) -> None:
    assert stale_prefix_cache(version) in (True, False)
