"""What vLLM's answers mean: pure functions from status and bytes to a verdict, for every shape that it has used.

vLLM speaks several dialects. Success is plain text without a content type. An error is `{"error": {"message",
"type", "param", "code"}}` today, was the same keys at the top level with `"object": "error"` before, is
`{"error": "..."}` for a wrong API key and `{"detail": "..."}` where no route answers. Neither 400 nor 500 says whether
trying again helps: the same broken file is a 400 on one version and a 500 on another, so only the text decides.

Nothing here raises on any input: what can't be understood is None, or a refusal that shows the text.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import msgspec

from sidecar.model import MAX_ENTRIES, BaseModel, Frozen

MAX_MESSAGE = 400
MAX_NAME = 512
MAX_ROOT = 4096
# What vLLM accepts as --max-lora-rank.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class Verdict(StrEnum):
    """What an answer to a load or an unload amounts to."""

    OK = "ok"
    ALREADY_LOADED = "already loaded"
    # An unload of a name that isn't served.
    ABSENT = "absent"
    # The engine finds no adapter at the path of a load.
    NO_FILES = "no files"
    RUNTIME_DISABLED = "runtime updating disabled"
    UNAUTHORIZED = "unauthorized"
    OUT_OF_MEMORY = "out of memory"
    BASE_MODEL = "name of a base model"
    # The engine behind the API server is gone, or a proxy answers for it.
    UNAVAILABLE = "unavailable"
    REFUSED = "refused"


class Answer(Frozen, frozen=True):
    """A verdict, and one line for people: no control characters, at most `MAX_MESSAGE` characters."""

    verdict: Verdict
    message: str = ""


class Models(Frozen, frozen=True):
    """What /v1/models lists: base models in order, and adapters as name -> root (the path as it was sent)."""

    base_models: tuple[BaseModel, ...]
    adapters: dict[str, str]


class Limits(Frozen, frozen=True):
    """The engine's LoRA limits. `max_cpu_loras` is `max_loras` where vLLM leaves it unset."""

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int


def read_load(status: int, body: bytes) -> Answer:
    """The meaning of an answer to POST /v1/load_lora_adapter."""
    common = _common(status, body)
    if common is not None:
        return common
    message = _message(status, body)
    text = message.lower()
    for verdict, pattern in _LOAD_TEXTS:
        if pattern.search(text):
            return Answer(verdict, message)
    return Answer(Verdict.REFUSED, message + _rank_hint(text))


def read_unload(status: int, body: bytes) -> Answer:
    """The meaning of an answer to POST /v1/unload_lora_adapter.

    A name that isn't there was 400 InvalidUserInput on older versions and is 404 NotFoundError on newer ones.
    """
    common = _common(status, body)
    if common is not None:
        return common
    message = _message(status, body)
    error = _error_object(body)
    if "cannot be found" in message.lower() or (status == 404 and error is not None and "type" in error):
        return Answer(Verdict.ABSENT, message)
    return Answer(Verdict.REFUSED, message)


_LOAD_TEXTS = (
    (Verdict.ALREADY_LOADED, re.compile(r"already been loaded|already loaded")),
    (Verdict.BASE_MODEL, re.compile(r"conflicts with a served base model")),
    (
        Verdict.OUT_OF_MEMORY,
        re.compile(r"out of memory|outofmemory|not enough memory|cannot allocate memory|\bmemoryerror"),
    ),
    (Verdict.NO_FILES, re.compile(r"no adapter found")),
)
_ENGINE_DEAD = re.compile(r"enginecore encountered an issue|enginedeaderror|engine ?core .{0,40}died", re.IGNORECASE)
_GATEWAY_STATUSES = frozenset({429, 502, 503, 504})


def engine_died(message: str) -> bool:
    """Whether an answer's text says that the engine behind the API server has died."""
    return _ENGINE_DEAD.search(message) is not None


def _common(status: int, body: bytes) -> Answer | None:
    """Verdicts that loads and unloads share; None if the text has to decide."""
    message = _message(status, body)
    if 200 <= status < 300 and not _is_error(body):
        return Answer(Verdict.OK, message)
    if status in (401, 403):
        return Answer(Verdict.UNAUTHORIZED, message)
    if status in _GATEWAY_STATUSES or engine_died(message):
        return Answer(Verdict.UNAVAILABLE, message)
    if status == 404 and _detail(body) == "Not Found":
        return Answer(Verdict.RUNTIME_DISABLED, message)
    return None


def parse_models(body: bytes) -> Models | None:
    """The body of a 200 from /v1/models; None if it isn't such a list, or longer than can be believed.

    An entry without a usable id is left out; a list is never cut, since a missing name means an unloaded adapter.
    """
    document = _decode(body)
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
        return None
    bases: list[BaseModel] = []
    adapters: dict[str, str] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        name, root, parent = entry.get("id"), entry.get("root"), entry.get("parent")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            continue
        root = root if isinstance(root, str) and len(root) <= MAX_ROOT else ""
        if parent is None:
            bases.append(BaseModel(id=name, root=root))
        else:
            adapters.setdefault(name, root)
    return Models(tuple(bases), adapters)


def parse_version(body: bytes) -> str:
    """The version in a 200 from /version, "" if there is none."""
    document = _decode(body)
    version = document.get("version") if isinstance(document, dict) else None
    return clean(version, 64) if isinstance(version, str) else ""


def parse_success(body: bytes) -> bool | None:
    """What `{"success": bool}` says; None for any other body."""
    document = _decode(body)
    said = document.get("success") if isinstance(document, dict) else None
    return said if isinstance(said, bool) else None


def parse_limits(body: bytes) -> Limits | None:
    """The LoRA limits in a 200 from /server_info?config_format=json; None without LoRA or in another format."""
    at: Any = _decode(body)
    for key in ("vllm_config", "lora_config"):
        at = at.get(key) if isinstance(at, dict) else None
    if not isinstance(at, dict):
        return None
    loras, rank = _count(at.get("max_loras")), _count(at.get("max_lora_rank"))
    if loras is None or rank is None:
        return None
    return Limits(loras, _count(at.get("max_cpu_loras")) or loras, rank)


def stale_prefix_cache(version: str) -> bool:
    """Whether new content under a served name may be mixed with cached blocks of the old, even from a new path.

    From 0.12 to 0.30 vLLM keys its prefix cache by the adapter's name alone; before that by a number that is new at
    each load, and from 0.31 on by name and path. A version that can't be told, and a build between releases, count as
    affected.
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        return True
    release = (int(match["major"]), int(match["minor"]))
    if match["dev"]:
        return release < (0, 32)
    if match["pre"] and release == (0, 31):
        return True
    return (0, 12) <= release < (0, 31)


_VERSION = re.compile(
    r"v?(?P<major>\d{1,6})\.(?P<minor>\d{1,6})(\.\d{1,6}){0,2}(?P<pre>(a|b|rc)\d{1,6})?(\.?post\d{1,6})?"
    r"(?P<dev>\.?dev\d{0,9})?(\+[A-Za-z0-9.]{1,64})?",
    re.ASCII,
)


def clean(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text` in one line, without control characters, at most `limit` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _message(status: int, body: bytes) -> str:
    error = _error_object(body)
    if error is not None and isinstance(error.get("message"), str):
        text = error["message"]
    else:
        document = _decode(body)
        plain = document.get("error", document.get("detail")) if isinstance(document, dict) else None
        text = plain if isinstance(plain, str) else body[: 4 * MAX_MESSAGE].decode("utf-8", "replace")
        text = f"HTTP {status}: {text}" if text.strip() else f"HTTP {status}"
        if 200 <= status < 300:
            text = text.partition(": ")[2]
    return clean(_unwrap(text))


_WRAPPED = re.compile(
    r"Call to \w+ method failed: (?:Worker failed with error )?(?P<quote>['\"]?)(?P<inner>.+?)(?P=quote)"
    r"(?:, please check the stack trace above for the root cause)?",
    re.DOTALL,
)


def _unwrap(text: str) -> str:
    """The worker's own words, out of what each layer above wrapped around them."""
    match = _WRAPPED.fullmatch(text[: 8 * MAX_MESSAGE].strip())
    return match["inner"] if match else text


def _rank_hint(text: str) -> str:
    match = re.search(r"lora rank (\d{1,6}) is greater than max_lora_rank", text, re.ASCII)
    fitting = [r for r in LORA_RANKS if match and r >= int(match[1])]
    return f" Start vLLM with --max-lora-rank {fitting[0]}." if fitting else ""


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _error_object(body: bytes) -> dict[str, Any] | None:
    document = _decode(body)
    if not isinstance(document, dict):
        return None
    nested: Any = document.get("error")
    if isinstance(nested, dict):
        return nested
    return document if document.get("object") == "error" else None


def _is_error(body: bytes) -> bool:
    document = _decode(body)
    return isinstance(document, dict) and ("error" in document or document.get("object") == "error")


def _detail(body: bytes) -> Any:
    document = _decode(body)
    return document.get("detail") if isinstance(document, dict) else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 < value < 1_000_000 else None
