"""One document in, one adapter or every fault at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.fields import seconds_of
from sidecar.core.manifest import InvalidManifest, key_of, parse_adapter
from sidecar.model import Adapter, Distribution, Requirement, Selector, Source

DIGEST = "sha256:" + "ab" * 32

MINIMAL: dict[str, Any] = {
    "apiVersion": "lora-sidecar.io/v1alpha1",
    "kind": "Adapter",
    "metadata": {"name": "sql"},
    "spec": {"baseModel": "qwen", "source": {"uri": "s3://bucket/sql"}},
}


def document(**spec: object) -> dict[str, Any]:
    made = copy.deepcopy(MINIMAL)
    made["spec"].update(spec)
    return made


def named(**metadata: object) -> dict[str, Any]:
    made = copy.deepcopy(MINIMAL)
    made["metadata"].update(metadata)
    return made


def sourced(**source: object) -> dict[str, Any]:
    made = copy.deepcopy(MINIMAL)
    made["spec"]["source"].update(source)
    return made


def faults(value: object, **options: bool) -> tuple[str, ...]:
    with pytest.raises(InvalidManifest) as caught:
        parse_adapter(value, **options)
    return caught.value.faults


def test_defaults() -> None:
    assert parse_adapter(MINIMAL) == Adapter(
        namespace="default",
        name="sql",
        base_model="qwen",
        served_name="sql",
        source=Source(uri="s3://bucket/sql"),
        drain_seconds=5,
        on_stale_prefix_cache="Hold",
        distribution=Distribution(strategy="all", spread="zone"),
    )


def test_every_field() -> None:
    made = {
        "apiVersion": "lora-sidecar.io/v1alpha1",
        "kind": "Adapter",
        "metadata": {
            "name": "sql-v3",
            "namespace": "team-a",
            "uid": "8a4f",
            "generation": 4,
            "creationTimestamp": "2026-01-31T12:00:00Z",
            "labels": {"app": "x"},
            "annotations": {"a": "b"},
            "resourceVersion": "17",
            "managedFields": [{}],
        },
        "spec": {
            "baseModel": "Qwen/Qwen3-8B",
            "servedName": "Team/SQL.v3",
            "source": {"uri": "hf://org/repo@v1/sub", "secretRef": {"name": "hf-token"}, "refreshInterval": "1h30m"},
            "workers": {
                "matchLabels": {"gpu": "a100"},
                "matchExpressions": [
                    {"key": "example.com/tier", "operator": "In", "values": ["gold", "silver"]},
                    {"key": "spot", "operator": "DoesNotExist"},
                ],
            },
            "distribution": {"strategy": "fixed", "replicas": 2, "spread": "none"},
            "priority": -5,
            "drainSeconds": 0,
            "onStalePrefixCache": "Replace",
        },
        "status": {"revision": DIGEST, "observedGeneration": 4, "anything": ["else"]},
    }
    assert parse_adapter(made) == Adapter(
        namespace="team-a",
        name="sql-v3",
        uid="8a4f",
        generation=4,
        created=1769860800,
        base_model="Qwen/Qwen3-8B",
        served_name="Team/SQL.v3",
        source=Source(uri="hf://org/repo@v1/sub", secret="hf-token", refresh_seconds=5400.0),
        selector=Selector(
            labels={"gpu": "a100"},
            expressions=(
                Requirement(key="example.com/tier", operator="In", values=("gold", "silver")),
                Requirement(key="spot", operator="DoesNotExist"),
            ),
        ),
        distribution=Distribution(strategy="fixed", replicas=2, spread="none"),
        priority=-5,
        drain_seconds=0,
        on_stale_prefix_cache="Replace",
        status_revision=DIGEST,
    )


@pytest.mark.parametrize("observed", [None, 3, 5, "4", -1])
def test_a_status_about_another_spec_tells_no_revision(observed: object) -> None:
    made = named(generation=4)
    made["status"] = {"revision": DIGEST} | ({} if observed is None else {"observedGeneration": observed})
    assert parse_adapter(made).status_revision is None
    made["status"]["observedGeneration"] = 4
    assert parse_adapter(made).status_revision == DIGEST


@pytest.mark.parametrize("distribution", [None, {}, {"strategy": "all"}, {"spread": "none"}])
def test_all_is_the_default_strategy(distribution: object) -> None:
    assert parse_adapter(document(distribution=distribution)).distribution.strategy == "all"


@pytest.mark.parametrize("percentage", [0, 34, 100])
def test_percentage(percentage: int) -> None:
    found = parse_adapter(document(distribution={"strategy": "percentage", "percentage": percentage})).distribution
    assert (found.strategy, found.percentage) == ("percentage", percentage)


def test_nulls_are_absent() -> None:
    made = document(workers=None, distribution=None, priority=None, servedName=None)
    made["status"] = None
    assert parse_adapter(made) == parse_adapter(MINIMAL)


# Each: the document, and what the one fault must say: field, value, limit, way out.
BAD: list[tuple[Any, list[str]]] = [
    ("text", ["text", "not an Adapter"]),
    ([1], ["a list", "not an Adapter"]),
    (None, ["null", "not an Adapter"]),
    (named(name="a" * 64), ["metadata.name", "64 characters", "63", "spec.servedName"]),
    (named(name="Sql"), ["metadata.name", "'Sql'", "lower-case", "spec.servedName"]),
    (named(name="a/b"), ["metadata.name", "'a/b'"]),
    (named(name='["x'), ["metadata.name"]),
    (named(name="../../etc"), ["metadata.name"]),
    (named(name=7), ["metadata.name", "7 is a number", '"7"']),
    (named(name=None), ["metadata.name", "required"]),
    (named(namespace="a.b"), ["metadata.namespace", "'a.b'"]),
    (named(generation=-1), ["metadata.generation", "-1"]),
    (named(creationTimestamp="yesterday"), ["metadata.creationTimestamp", "'yesterday'", "2026-01-31T12:00:00Z"]),
    (named(creationTimestamp="2026-01-31T12:00:00"), ["metadata.creationTimestamp"]),
    (document(baseModel=None), ["spec.baseModel", "required", "/v1/models"]),
    (document(baseModel=" qwen"), ["spec.baseModel", "' qwen'", "space"]),
    (document(baseModel=["qwen"]), ["spec.baseModel", "a list of 1", "text is needed"]),
    (document(servedName=""), ["spec.servedName", "empty"]),
    (document(servedName="x" * 513), ["spec.servedName", "513 characters", "512"]),
    (document(servedName="a\x1bb"), ["spec.servedName", "control character"]),
    (document(servedName="sql "), ["spec.servedName", "'sql '", "space"]),
    (document(servedName=True), ["spec.servedName", "true is a boolean", '"true"']),
    (document(source=None), ["spec.source", "required", "s3://bucket/prefix"]),
    (document(source="s3://bucket/x"), ["spec.source", "is text", "mapping"]),
    (sourced(uri=None), ["spec.source.uri", "required", "s3://bucket/prefix"]),
    (sourced(uri="ftp://host/x"), ["spec.source.uri", "ftp", "s3://bucket/prefix"]),
    (sourced(uri="s3://bucket/../x"), ["spec.source.uri", "'..'"]),
    (sourced(digest="sha256:abc"), ["spec.source.digest", "'sha256:abc'", "64"]),
    (sourced(digest=DIGEST.upper()), ["spec.source.digest", "lower-case"]),
    (sourced(secretRef={}), ["spec.source.secretRef.name", "required"]),
    (sourced(secretRef={"name": "A B"}), ["spec.source.secretRef.name", "'A B'"]),
    (sourced(secretRef={"name": "a", "key": "b"}), ["spec.source.secretRef.key", "unknown field"]),
    (sourced(refreshInterval="10 minutes"), ["spec.source.refreshInterval", "'10 minutes'", "10m"]),
    (sourced(refreshInterval=600), ["spec.source.refreshInterval", "600", "unit"]),
    (sourced(refreshInterval="0s"), ["spec.source.refreshInterval", "'0s'", "1s"]),
    (sourced(refreshInterval="9000h"), ["spec.source.refreshInterval", "8760h"]),
    (document(distribution="all"), ["spec.distribution", "mapping"]),
    (document(distribution={"strategy": "Fixed", "replicas": 1}), ["strategy", "'Fixed'", "mean fixed?"]),
    (document(distribution={"strategy": "some"}), ["spec.distribution.strategy", "'some'", "all, fixed, percentage"]),
    (document(distribution={"strategy": "fixed"}), ["spec.distribution.replicas", "required", "fixed"]),
    (document(distribution={"strategy": "percentage"}), ["spec.distribution.percentage", "required"]),
    (document(distribution={"replicas": 2}), ["spec.distribution.replicas", "strategy: fixed", "leave replicas out"]),
    (document(distribution={"strategy": "fixed", "replicas": 1, "percentage": 5}), ["spec.distribution.percentage"]),
    (document(distribution={"strategy": "percentage", "percentage": 1, "replicas": 5}), ["spec.distribution.replicas"]),
    (document(distribution={"strategy": "fixed", "replicas": -1}), ["spec.distribution.replicas", "-1", "0 to"]),
    (document(distribution={"strategy": "fixed", "replicas": 1.5}), ["replicas", "1.5", "whole number"]),
    (document(distribution={"strategy": "fixed", "replicas": "2"}), ["replicas", "'2' is text", "whole number"]),
    (document(distribution={"strategy": "fixed", "replicas": True}), ["replicas", "true is a boolean"]),
    (document(distribution={"strategy": "percentage", "percentage": 101}), ["percentage", "101", "0 to 100"]),
    (document(distribution={"spread": "rack"}), ["spec.distribution.spread", "'rack'", "zone, none"]),
    (document(priority=2**31), ["spec.priority", "2147483648", "2147483647"]),
    (document(priority=10**9999), ["spec.priority", "a huge number"]),
    (document(priority=float("nan")), ["spec.priority", "nan"]),
    (document(drainSeconds=-1), ["spec.drainSeconds", "-1"]),
    (document(drainSeconds=86400), ["spec.drainSeconds", "86400", "3600"]),
    (document(onStalePrefixCache="hold"), ["spec.onStalePrefixCache", "'hold'", "mean Hold?"]),
    (
        document(workers={"matchLabels": {"a b": "c"}}),
        ['spec.workers.matchLabels["a b"]'.replace('"', "'"), "label key"],
    ),
    (document(workers={"matchLabels": {"gpu": "a/b"}}), ["spec.workers.matchLabels.gpu", "'a/b'", "label value"]),
    (document(workers={"matchLabels": {"gpu": True}}), ["spec.workers.matchLabels.gpu", "true", '"true"']),
    (document(workers={"matchExpressions": {}}), ["spec.workers.matchExpressions", "a list is needed"]),
    (document(workers={"matchExpressions": ["gpu"]}), ["spec.workers.matchExpressions[0]", "mapping"]),
    (
        document(workers={"matchExpressions": [{"key": "a", "operator": "In"}]}),
        ["spec.workers.matchExpressions[0].values", "required", "In"],
    ),
    (
        document(workers={"matchExpressions": [{"key": "a", "operator": "NotIn", "values": []}]}),
        ["spec.workers.matchExpressions[0].values", "required", "NotIn"],
    ),
    (
        document(workers={"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}),
        ["spec.workers.matchExpressions[0].values", "leave it out"],
    ),
    (
        document(workers={"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}),
        ["spec.workers.matchExpressions[0].operator", "'Gt'", "In, NotIn, Exists, DoesNotExist"],
    ),
    (
        document(workers={"matchExpressions": [{"key": "a", "operator": "In", "values": [1]}]}),
        ["spec.workers.matchExpressions[0].values[0]", "1 is a number", '"1"'],
    ),
    (
        document(workers={"matchExpressions": [{"operator": "Exists"}]}),
        ["spec.workers.matchExpressions[0].key", "required"],
    ),
    (document(workers={"matchLabels": {f"k{i}": "v" for i in range(65)}}), ["matchLabels", "65", "64"]),
]


@pytest.mark.parametrize(("made", "parts"), BAD, ids=[" ".join(parts)[:50] for _, parts in BAD])
def test_one_fault_says_field_value_limit_and_way_out(made: object, parts: list[str]) -> None:
    found = faults(made)
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0]
    assert len(found[0]) < 600


# What people type, and where it should have gone.
UNKNOWN = [
    (document(basemodel="x"), "spec.basemodel", "spec.baseModel"),
    (document(base_model="x"), "spec.base_model", "spec.baseModel"),
    (document(servdName="x"), "spec.servdName", "spec.servedName"),
    (document(replicas=2), "spec.replicas", "spec.distribution.replicas"),
    (document(uri="s3://bucket/x"), "spec.uri", "spec.source.uri"),
    (document(matchLabels={"a": "b"}), "spec.matchLabels", "spec.workers.matchLabels"),
    (document(distribution={"replica": 1}), "spec.distribution.replica", "spec.distribution.replicas"),
    (sourced(url="s3://bucket/x"), "spec.source.url", "spec.source.uri"),
    (named(baseModel="x"), "metadata.baseModel", "spec.baseModel"),
    (MINIMAL | {"sepc": {}}, "sepc", "spec"),
    (MINIMAL | {"baseModel": "x"}, "baseModel", "spec.baseModel"),
]


@pytest.mark.parametrize(("made", "field", "meant"), UNKNOWN, ids=[field for _, field, _ in UNKNOWN])
def test_unknown_fields_are_refused_with_a_suggestion(made: dict[str, Any], field: str, meant: str) -> None:
    (found,) = faults(made)
    assert found == f"{field}: unknown field; did you mean {meant}?"


def test_an_unknown_field_like_nothing_else_lists_what_is_known() -> None:
    (found,) = faults(sourced(zebra=1))
    assert found == "spec.source.zebra: unknown field; known here are uri, digest, secretRef, refreshInterval"


def test_without_strict_unknown_fields_are_ignored_and_wrong_types_are_not() -> None:
    made = document(zebra=1, source={"uri": "s3://bucket/sql", "new": {}}, priority="high")
    (found,) = faults(made, strict=False)
    assert found.startswith("spec.priority")
    del made["spec"]["priority"]
    assert parse_adapter(made, strict=False) == parse_adapter(MINIMAL)


def test_every_fault_is_named_at_once() -> None:
    made = document(priority="x", drainSeconds=-1, distribution={"strategy": "fixed"}, source={"uri": "nope"}, extra=1)
    made["metadata"]["name"] = "A"
    found = faults(made)
    paths = [fault.partition(":")[0] for fault in found]
    assert paths == [
        *("metadata.name", "spec.extra", "spec.source.uri", "spec.distribution.replicas"),
        *("spec.priority", "spec.drainSeconds"),
    ]


def test_missing_sections_are_named_together() -> None:
    found = faults({"apiVersion": "lora-sidecar.io/v1alpha1", "kind": "Adapter"})
    assert [fault.partition(":")[0] for fault in found] == ["metadata", "spec"]


def test_another_kind_is_named_and_nothing_else_of_it() -> None:
    found = faults({"apiVersion": "v1", "kind": "ConfigMap", "data": {}})
    assert [fault.partition(":")[0] for fault in found] == ["apiVersion", "kind"]
    assert "'ConfigMap'" in found[1]
    assert "write Adapter" in found[1]
    assert "apiVersion: is required; write apiVersion: lora-sidecar.io/v1alpha1" in faults({"kind": "Adapter"})


def test_plain_http_is_the_callers_to_refuse() -> None:
    made = sourced(uri="http://host/a.tar.gz")
    assert parse_adapter(made).source.uri == "http://host/a.tar.gz"
    (found,) = faults(made, allow_http=False)
    assert "--allow-http" in found


def test_a_password_in_a_uri_is_not_repeated() -> None:
    (found,) = faults(sourced(uri="https://user:hunter2@host/a.tar.gz"))
    assert "hunter2" not in found


def test_the_key_of_a_wrong_document() -> None:
    with pytest.raises(InvalidManifest) as caught:
        parse_adapter(document(priority="x"))
    assert caught.value.key == "default/sql"
    assert key_of(named(namespace="team")) == "team/sql"
    for made in (None, [], {}, {"metadata": None}, named(name=3), named(name="A/B")):
        assert key_of(made) == ""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("10m", 600),
        ("1h30m", 5400),
        ("1.5h", 5400),
        (".5m", 30),
        ("1h0m0s", 3600),
        ("2000ms", 2),
        ("", None),
        ("10", None),
        ("m", None),
        ("1d", None),
        ("-5m", None),
        ("5 m", None),
        ("5m!", None),
        ("٣s", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
PLACES = [
    ("metadata",),
    ("spec",),
    *(("metadata", key) for key in ("name", "namespace", "uid", "generation", "creationTimestamp")),
    *(
        ("spec", key)
        for key in ("baseModel", "servedName", "source", "workers", "distribution", "priority", "onStalePrefixCache")
    ),
    *(("spec", "source", key) for key in ("uri", "digest", "secretRef", "refreshInterval")),
    ("status",),
]


@given(st.sampled_from(PLACES), JUNK, st.booleans())
def test_whatever_stands_there_gives_an_adapter_or_faults(path: tuple[str, ...], value: object, strict: bool) -> None:
    made = copy.deepcopy(MINIMAL)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    found: tuple[str, ...] = ()
    adapter = None
    try:
        adapter = parse_adapter(made, strict=strict)
    except InvalidManifest as error:
        found = error.faults
    if adapter is None:
        assert found
        assert all(fault and len(fault) < 1000 for fault in found)
    else:
        assert 0 < len(adapter.name) <= 63
        assert adapter.served_name
