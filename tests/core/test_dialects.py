"""Other systems' resources become Adapters that say what is different."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.core.manifest import parse_adapter
from sidecar.dialects import convert, is_foreign
from sidecar.dialects.draft import Converted
from sidecar.model import Adapter, Distribution, Requirement, Selector

LABELS = {"app": "x", "helm.sh/chart": "y"}


def dynamo(**spec: Any) -> dict[str, Any]:
    base = {"modelName": "team/SQL", "baseModelName": "Qwen/Qwen3-8B", "modelType": "lora"}
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoModel",
        "metadata": {"name": "sql", "namespace": "ml", "labels": LABELS, "finalizers": ["nvidia.com/finalizer"]},
        "spec": base | {"source": {"uri": "s3://bucket/sql"}} | spec,
        "status": {"readyEndpoints": 2},
    }


def aibrix(**spec: Any) -> dict[str, Any]:
    base = {
        "baseModel": "qwen",
        "podSelector": {"matchLabels": {"model.aibrix.ai/name": "qwen"}},
        "artifactURL": "huggingface://org/repo",
    }
    return {
        "apiVersion": "model.aibrix.ai/v1alpha1",
        "kind": "ModelAdapter",
        "metadata": {"name": "sql"},
        "spec": base | spec,
    }


def production_stack(source: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    base_source = {"type": "huggingface", "adapterName": "sql-v1", "repository": "org/repo"}
    return {
        "apiVersion": "production-stack.vllm.ai/v1alpha1",
        "kind": "LoraAdapter",
        "metadata": {"name": "sql"},
        "spec": {"baseModel": "qwen", "adapterSource": base_source | (source or {})} | spec,
    }


def converted(document: dict[str, Any]) -> Converted:
    made = convert(document)
    assert made is not None
    return made


def adapter(document: dict[str, Any]) -> Adapter:
    made = converted(document)
    assert made.faults == ()
    return parse_adapter(made.document)


def noted(document: dict[str, Any], *parts: str) -> bool:
    return any(all(part in note for part in parts) for note in converted(document).notes)


def test_dynamo() -> None:
    made = adapter(dynamo())
    assert (made.key, made.served_name, made.base_model) == ("ml/sql", "team/SQL", "Qwen/Qwen3-8B")
    assert made.source.uri == "s3://bucket/sql"
    assert made.distribution.strategy == "all"
    document = converted(dynamo()).document
    assert document is not None
    assert document["metadata"] == {"name": "sql", "namespace": "ml", "labels": {"app": "x"}}
    assert noted(dynamo(), "/v1/models", "--base-model")
    assert noted(dynamo(), "credentials", "agent's own container")


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"strategy": "all"}, Distribution()),
        ({"strategy": "fixed", "replicas": 3}, Distribution(strategy="fixed", replicas=3)),
        ({"strategy": "percentage", "percentage": 34}, Distribution(strategy="percentage", percentage=34)),
    ],
)
def test_dynamos_distribution(given: dict[str, Any], made: Distribution) -> None:
    assert adapter(dynamo(distribution=given)).distribution == made


def test_dynamos_percentage_0_meant_something_else() -> None:
    assert noted(dynamo(distribution={"strategy": "percentage", "percentage": 0}), "percentage 0", "none")


@pytest.mark.parametrize("kind", ["base", "adapter", None])
def test_dynamo_loads_only_loras(kind: str | None) -> None:
    made = converted(dynamo(modelType=kind))
    assert (made.document, made.faults) == (None, ())
    assert "modelType" in made.notes[-1]


def test_dynamo_without_a_source() -> None:
    assert converted(dynamo(source=None)).faults == ("spec.source: is required to load a LoRA",)


def test_aibrix() -> None:
    made = adapter(aibrix(replicas=1, schedulerName="default"))
    assert (made.key, made.served_name, made.base_model) == ("default/sql", "sql", "qwen")
    assert made.source.uri == "hf://org/repo"
    assert made.selector == Selector(labels={"model.aibrix.ai/name": "qwen"})
    assert made.distribution == Distribution(strategy="fixed", replicas=1)
    assert adapter(aibrix()).distribution.strategy == "all"
    assert noted(aibrix(schedulerName="default"), "schedulerName", "left out")


@pytest.mark.parametrize(
    ("url", "uri", "note"),
    [
        ("hf://org/repo", "hf://org/repo", ""),
        ("/models/sql", "file:///models/sql", "mount the volume"),
        ("s3://bucket/sql", "s3://bucket/sql", "as a prefix"),
        ("s3://bucket/sql/", "s3://bucket/sql/", ""),
        ("gcs://bucket/sql", "s3://bucket/sql", "storage.googleapis.com"),
        ("tos://bucket/sql", "s3://bucket/sql", "AWS_ENDPOINT_URL_S3"),
    ],
)
def test_aibrix_urls(url: str, uri: str, note: str) -> None:
    assert adapter(aibrix(artifactURL=url)).source.uri == uri
    assert not note or noted(aibrix(artifactURL=url), note)


def test_aibrix_secrets_are_named_and_never_shown() -> None:
    document = aibrix(credentialsSecretRef={"name": "creds"}, additionalConfig={"api-key": "sk-hunter2", "x": "y"})
    assert adapter(document).source.secret == "creds"
    assert noted(document, "'creds'", "HF_TOKEN")
    assert noted(document, "api-key", "--engine-api-key-file")
    assert "hunter2" not in str(converted(document))


def test_aibrix_expressions_count_now() -> None:
    expressions = [{"key": "gpu", "operator": "In", "values": ["a100"]}, {"key": "spot", "operator": "DoesNotExist"}]
    document = aibrix(podSelector={"matchExpressions": expressions})
    assert adapter(document).selector.expressions == (
        Requirement(key="gpu", operator="In", values=("a100",)),
        Requirement(key="spot", operator="DoesNotExist"),
    )
    assert noted(document, "matchExpressions", "here they count")


def test_aibrix_without_a_base_model_has_to_be_repaired() -> None:
    (fault,) = converted(aibrix(baseModel=None)).faults
    assert "spec.baseModel" in fault
    assert "REPLACE-ME" in fault


def test_production_stack() -> None:
    config = {"algorithm": "ordered", "replicas": 2}
    made = adapter(production_stack(loraAdapterDeploymentConfig=config))
    assert (made.key, made.served_name, made.base_model) == ("default/sql", "sql-v1", "qwen")
    assert made.source.uri == "hf://org/repo"
    assert made.distribution == Distribution(strategy="fixed", replicas=2)
    assert adapter(production_stack()).distribution.strategy == "all"
    assert noted(production_stack(loraAdapterDeploymentConfig=config), "'ordered'", "never had an effect")
    assert noted(production_stack(vllmApiKey={"secretName": "a", "secretKey": "b"}), "--engine-api-key-file")


@pytest.mark.parametrize(
    ("source", "uri"),
    [
        ({"adapterPath": "/data/lora-adapters/org/repo"}, "hf://org/repo"),  # written there by its controller
        ({"type": "local", "adapterPath": "/data/sql"}, "file:///data/sql"),
        ({"type": "s3", "repository": None, "adapterPath": "bucket/sql"}, "s3://bucket/sql"),
        ({"type": "s3", "repository": "s3://bucket/sql"}, "s3://bucket/sql"),
        ({"type": "http", "repository": None, "adapterPath": "https://host/a.zip"}, "https://host/a.zip"),
    ],
)
def test_production_stack_sources(source: dict[str, Any], uri: str) -> None:
    assert adapter(production_stack(source)).source.uri == uri


def test_production_stack_secrets() -> None:
    document = production_stack({"credentialsSecretRef": {"name": "hf", "key": "token"}})
    assert adapter(document).source.secret == "hf"
    assert noted(document, "key 'token'")


@pytest.mark.parametrize(
    ("document", "part"),
    [
        (production_stack({"type": "git"}), "spec.adapterSource.type: 'git'"),
        (production_stack({"type": "local", "adapterPath": "data/sql"}), "spec.source.uri"),
        (production_stack(baseModel=None), "spec.baseModel: is required"),
        (production_stack(adapterSource=None), "spec.adapterSource: is required"),
        (aibrix(artifactURL=None), "spec.artifactURL: is required"),
        (aibrix(artifactURL="ftp://host/x"), "spec.source.uri"),
        (aibrix(replicas="2"), "spec.replicas: '2' is text"),
        (dynamo(source={"uri": "nowhere"}), "spec.source.uri"),
        (dynamo() | {"spec": None}, ""),
        ({**aibrix(), "spec": []}, "spec: a list of 0"),
        ({**aibrix(), "metadata": None}, "metadata.name: is required"),
    ],
)
def test_what_cannot_be_carried_over_is_a_fault_or_nothing(document: dict[str, Any], part: str) -> None:
    made = converted(document)
    assert made.document is None or any(part in fault for fault in made.faults)


@pytest.mark.parametrize("document", [dynamo(zebra=1), aibrix(zebra=1), production_stack(zebra=1)])
def test_unknown_fields_are_noted(document: dict[str, Any]) -> None:
    assert noted(document, "spec.zebra", "left out")


def test_long_names_are_cut_and_stay_apart() -> None:
    one, other = (aibrix() | {"metadata": {"name": "x" * 100 + end}} for end in "ab")
    made = adapter(one)
    assert len(made.name) == 63
    assert made.served_name == "x" * 100 + "a"
    assert made.name != adapter(other).name
    assert noted(one, "101 characters")


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"kind": "DynamoModel"},
        {"apiVersion": "other.com/v1", "kind": "ModelAdapter"},
        {"apiVersion": "v1", "kind": "Service"},
    ],
)
def test_other_kinds_are_left_alone(document: object) -> None:
    assert not is_foreign(document)
    assert convert(document) is None
