"""One decoded document -> `Adapter`, with every rule of the resource checked and every fault named at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from sidecar.core import selector as labels
from sidecar.core.fields import Fields, kind_of, show
from sidecar.core.sources import KNOWN, InvalidSource, parse_source
from sidecar.model import Adapter, Distribution, Requirement, Selector, Source

API_VERSION = "lora-sidecar.io/v1alpha1"
KIND = "Adapter"
MAX_NAME = 63
MAX_MODEL_NAME = 512
INT32 = 2**31

_STRATEGIES: tuple[Literal["all", "fixed", "percentage"], ...] = ("all", "fixed", "percentage")
_SPREADS: tuple[Literal["zone", "none"], ...] = ("zone", "none")
_OPERATORS: tuple[Literal["In", "NotIn", "Exists", "DoesNotExist"], ...] = ("In", "NotIn", "Exists", "DoesNotExist")
_TOP = ("apiVersion", "kind", "metadata", "spec", "status")
_METADATA = (
    *("name", "namespace", "uid", "generation", "creationTimestamp", "labels", "annotations", "resourceVersion"),
    *("finalizers", "ownerReferences", "managedFields", "selfLink", "generateName"),
    *("deletionTimestamp", "deletionGracePeriodSeconds"),
)
_SPEC = (
    *("baseModel", "servedName", "source", "workers", "distribution", "priority", "drainSeconds"),
    "onStalePrefixCache",
)
_SOURCE = ("uri", "digest", "secretRef", "refreshInterval")
_WORKERS = ("matchLabels", "matchExpressions")
_DISTRIBUTION = ("strategy", "replicas", "percentage", "spread")
# Where a known field belongs, for those who put it one level too high or too low.
_ELSEWHERE = (
    {name: f"metadata.{name}" for name in _METADATA}
    | {name: f"spec.{name}" for name in _SPEC}
    | {name: f"spec.source.{name}" for name in _SOURCE}
    | {name: f"spec.workers.{name}" for name in _WORKERS}
    | {name: f"spec.distribution.{name}" for name in _DISTRIBUTION}
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BLANKS = re.compile(r"\s")


class InvalidManifest(ValueError):
    """The document is no valid Adapter. `faults` names each field with value, limit and way out; `key` is the
    `namespace/name` that the document has all the same, "" if that can't be told."""

    def __init__(self, faults: tuple[str, ...], key: str = "") -> None:
        super().__init__("; ".join(faults))
        self.faults = faults
        self.key = key


def parse_adapter(document: object, *, strict: bool = True, allow_http: bool = True) -> Adapter:
    """The adapter that a decoded document describes, with all defaults.

    With `strict` unknown fields are faults (files); without they are ignored (the API server has pruned them).
    Without `allow_http` a plain http:// source is a fault. Raises InvalidManifest with all faults.
    """
    if not isinstance(document, Mapping):
        raise InvalidManifest((f"the document is {kind_of(document)}, not an {KIND} ({API_VERSION})",))
    faults: list[str] = []
    top = Fields(document, "", faults, strict)
    if _foreign(top):
        raise InvalidManifest(tuple(faults), key_of(document))
    top.only(_TOP, _ELSEWHERE)
    named = _metadata(top)
    spec = top.mapping("spec")
    if spec is None and not top.has("spec"):
        top.fault("spec", "is required; it holds baseModel and source")
    described = _spec(spec, str(named["name"]), allow_http) if spec is not None else {}
    if faults:
        raise InvalidManifest(tuple(faults), key_of(document))
    revision = _told_revision(top, named.get("generation"))
    return Adapter(**named, **described, status_revision=revision)  # type: ignore[arg-type]  # checked above


def _told_revision(top: Fields, generation: object) -> str | None:
    """The revision in the status, if the status is about this spec: after an edit it may be of another source."""
    status = Fields({"status": top.raw("status")}, "", [], False).mapping("status")
    if status is None or status.whole("observedGeneration", 0, 0, 2**63 - 1) != generation:
        return None
    return status.text("revision") or None


def key_of(document: object) -> str:
    """`namespace/name` of a document that may be wrong elsewhere; "" if it has no usable name."""
    if not isinstance(document, Mapping) or not isinstance(document.get("metadata"), Mapping):
        return ""
    metadata = document["metadata"]
    name, namespace = metadata.get("name"), metadata.get("namespace") or "default"
    if not isinstance(name, str) or not isinstance(namespace, str) or not labels.is_subdomain(name):
        return ""
    return f"{namespace}/{name}"


def _foreign(top: Fields) -> bool:
    """Notes and returns whether this is another kind of document, whose other fields say nothing to us."""
    wanted = {"apiVersion": API_VERSION, "kind": KIND}
    for key, expected in wanted.items():
        value = top.raw(key)
        if value == expected:
            continue
        if value is None:
            top.fault(key, f"is required; write {key}: {expected}")
        else:
            top.fault(key, f"{show(value)} is not known here; only {KIND} of {API_VERSION} is, so write {expected}")
    return any(top.raw(key) != expected for key, expected in wanted.items())


def _metadata(top: Fields) -> dict[str, object]:
    metadata = top.mapping("metadata")
    if metadata is None:
        if not top.has("metadata"):
            top.fault("metadata", "is required; it holds the name")
        return {"name": ""}
    metadata.only(_METADATA, _ELSEWHERE)
    return {
        "name": metadata.text("name", required="give the adapter a name", check=_name_fault),
        "namespace": metadata.text("namespace", "default", check=_namespace_fault),
        "uid": metadata.text("uid", check=lambda v: "" if len(v) <= 253 else "at most 253 characters are allowed"),
        "generation": metadata.whole("generation", 0, 0, 2**63 - 1),
        "created": metadata.moment("creationTimestamp"),
    }


def _spec(spec: Fields, name: str, allow_http: bool) -> dict[str, object]:
    spec.only(_SPEC, _ELSEWHERE)
    return {
        "base_model": spec.text(
            "baseModel", required="name the base model, as the engine's /v1/models does", check=_model_name_fault
        ),
        "served_name": spec.text("servedName", name, check=_model_name_fault),
        "source": _source(spec, allow_http),
        "selector": _selector(spec),
        "distribution": _distribution(spec),
        "priority": spec.whole("priority", 0, -INT32, INT32 - 1),
        "drain_seconds": spec.whole("drainSeconds", 5, 0, 3600),
        "on_stale_prefix_cache": spec.choice("onStalePrefixCache", ("Hold", "Replace"), "Hold"),
    }


def _source(spec: Fields, allow_http: bool) -> Source:
    source = spec.mapping("source")
    if source is None:
        if not spec.has("source"):
            spec.fault("source", f"is required; write source: {{uri: …}} with one of {KNOWN}")
        return Source(uri="")
    source.only(_SOURCE, _ELSEWHERE)
    secret = source.mapping("secretRef")
    if secret is not None:
        secret.only(("name",))
    return Source(
        uri=source.text("uri", required=f"write one of {KNOWN}", check=lambda uri: _uri_fault(uri, allow_http)),
        digest=source.text("digest", check=_digest_fault) or None,
        secret=secret.text("name", required="name the Secret", check=_secret_fault) if secret is not None else None,
        refresh_seconds=source.seconds("refreshInterval", 1, 8760 * 3600),
    )


def _selector(spec: Fields) -> Selector:
    workers = spec.mapping("workers")
    if workers is None:
        return Selector()
    workers.only(_WORKERS, _ELSEWHERE)
    match_labels = workers.pairs("matchLabels")
    inner = workers.mapping("matchLabels")
    for key, value in match_labels.items():
        for wrong in filter(None, (labels.key_fault(key) and f"the key {labels.key_fault(key)}", _value_fault(value))):
            if inner is not None:
                inner.fault(key, wrong)
    expressions = tuple(_requirement(item) for item in workers.items("matchExpressions"))
    for key, size in (("matchLabels", len(match_labels)), ("matchExpressions", len(expressions))):
        if size > 64:
            workers.fault(key, f"{size} entries; at most 64 are allowed")
    return Selector(labels=match_labels, expressions=expressions)


def _value_fault(value: str) -> str:
    wrong = labels.value_fault(value)
    return f"{show(value)} {wrong}" if wrong else ""


def _requirement(item: Fields) -> Requirement:
    item.only(("key", "operator", "values"))

    def key_fault(key: str) -> str:
        wrong = labels.key_fault(key)
        return f"{show(key)} {wrong}" if wrong else ""

    key = item.text("key", required="name the label", check=key_fault)
    if not item.has("operator"):
        item.fault("operator", "is required; write In, NotIn, Exists or DoesNotExist")
    operator = item.choice("operator", _OPERATORS, "Exists")
    values = item.texts("values")
    for value in values:
        if labels.value_fault(value):
            item.fault("values", _value_fault(value))
    if len(values) > 256:
        item.fault("values", f"{len(values)} values; at most 256 are allowed")
    # A wrong operator is said already, and says nothing about values.
    good = item.raw("operator") == operator
    if good and operator in ("In", "NotIn") and not item.raw("values"):
        item.fault("values", f"is required with the operator {operator}; list at least one value")
    if good and operator in ("Exists", "DoesNotExist") and item.raw("values"):
        item.fault("values", f"{show(item.raw('values'))} goes with In or NotIn only; leave it out with {operator}")
    return Requirement(key=key, operator=operator, values=values)


def _distribution(spec: Fields) -> Distribution:
    given = spec.mapping("distribution")
    if given is None:
        return Distribution()
    given.only(_DISTRIBUTION, _ELSEWHERE)
    strategy = given.choice("strategy", _STRATEGIES, "all")
    known = not given.has("strategy") or given.raw("strategy") == strategy
    for field, owner in (("replicas", "fixed"), ("percentage", "percentage")) if known else ():
        if strategy == owner and not given.has(field):
            given.fault(field, f"is required with strategy {owner}; write {field}: {1 if field == 'replicas' else 50}")
        elif strategy != owner and given.has(field):
            given.fault(
                field,
                f"{show(given.raw(field))} goes with strategy {owner} only, and this is strategy {strategy};"
                f" write strategy: {owner}, or leave {field} out",
            )
    return Distribution(
        strategy=strategy,
        replicas=given.whole("replicas", 0, 0, 100_000),
        percentage=given.whole("percentage", 0, 0, 100),
        spread=given.choice("spread", _SPREADS, "zone"),
    )


def _name_fault(name: str) -> str:
    if len(name) > MAX_NAME:
        return (
            f"{show(name)} has {len(name)} characters; at most {MAX_NAME} fit into the label that routes to it,"
            " so take a shorter one and put the long one into spec.servedName"
        )
    if labels.is_subdomain(name):
        return ""
    return (
        f"{show(name)} is no Kubernetes name: lower-case letters, digits, '-' and '.', beginning and ending with a"
        " letter or digit; names with '/' or upper case go into spec.servedName"
    )


def _namespace_fault(namespace: str) -> str:
    if labels.is_namespace(namespace):
        return ""
    return f"{show(namespace)} is no namespace: at most 63 lower-case letters, digits and '-'"


def _model_name_fault(name: str) -> str:
    if not name:
        return "is empty; at least one character is needed"
    if len(name) > MAX_MODEL_NAME:
        return f"{show(name)} has {len(name)} characters; at most {MAX_MODEL_NAME} are allowed"
    if _BLANKS.match(name[0]) or _BLANKS.match(name[-1]):
        return f"{show(name)} begins or ends with a space; clients would have to send it as well, so take it out"
    if any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u2028\u2029" or "\ud800" <= c <= "\udfff" for c in name):
        return f"{show(name)} holds a control character; take it out"
    return ""


def _uri_fault(uri: str, allow_http: bool) -> str:
    try:
        parse_source(uri, allow_http=allow_http)
    except InvalidSource as error:
        return str(error)
    return ""


def _digest_fault(digest: str) -> str:
    if _DIGEST.fullmatch(digest):
        return ""
    return f"{show(digest)} is no revision; it is sha256: and 64 lower-case hex digits, as status.revision shows it"


def _secret_fault(name: str) -> str:
    return "" if labels.is_subdomain(name) else f"{show(name)} is no name of a Secret"
