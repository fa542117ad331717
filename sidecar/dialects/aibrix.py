"""AIBrix's ModelAdapter (model.aibrix.ai/v1alpha1)."""

from __future__ import annotations

from typing import Any

from sidecar.core.fields import Fields, show
from sidecar.dialects.draft import Draft, single_object_note

PLACEHOLDER = "REPLACE-ME"
_KNOWN = (
    *("baseModel", "podSelector", "artifactURL", "credentialsSecretRef", "replicas", "additionalConfig"),
    "schedulerName",
)


def convert(draft: Draft) -> None:
    """Its adapters are served under the resource's name."""
    given = draft.given
    draft.left_out(_KNOWN)
    draft.served(draft.name)
    _base_model(draft)
    secret = given.mapping("credentialsSecretRef")
    draft.source(_uri(draft), secret.text("name") if secret else "")
    selector = given.mapping("podSelector")
    if selector is not None:
        _workers(draft, selector)
    draft.fixed(given.whole("replicas", 1, 0, 100_000) if given.has("replicas") else None)
    if given.has("schedulerName"):
        draft.note(f"schedulerName {show(given.raw('schedulerName'))} was left out: every agent computes the placement")
    config = given.mapping("additionalConfig")
    for key in config.names if config else ():
        if key == "api-key":
            draft.note("additionalConfig.api-key was left out: the engine's key belongs in --engine-api-key-file")
        else:
            draft.note(f"additionalConfig.{key} was left out")


def _base_model(draft: Draft) -> None:
    base = draft.given.text("baseModel")
    draft.spec["baseModel"] = base or PLACEHOLDER
    if base:
        draft.note(
            f"baseModel {show(base)} was only a label; here workers are found by it, so it must be what the engine's"
            " /v1/models shows, or the agent's --base-model"
        )
    else:
        draft.faults.append(
            f"spec.baseModel: was not given; put the base model's name as in /v1/models in place of {PLACEHOLDER}"
        )


def _uri(draft: Draft) -> str:
    url = draft.given.text("artifactURL", required="write where the adapter is")
    scheme, _, rest = url.partition("://")
    if scheme == "huggingface":
        return f"hf://{rest}"
    if url.startswith("/"):
        return f"file://{url}"
    if scheme in ("gcs", "gs"):
        draft.note(
            "Google Cloud Storage is read through its S3 interface: set AWS_ENDPOINT_URL_S3=https://storage.googleapis.com"
            " and HMAC keys in the agent's container"
        )
        return f"s3://{rest}"
    if scheme == "tos":
        draft.note("TOS is read through its S3 interface: set AWS_ENDPOINT_URL_S3 and keys in the agent's container")
        return f"s3://{rest}"
    if note := single_object_note(url):
        draft.note(note)
    return url


def _workers(draft: Draft, selector: Fields) -> None:
    workers: dict[str, Any] = {}
    labels = selector.pairs("matchLabels")
    if labels:
        workers["matchLabels"] = labels
    expressions = [_expression(item) for item in selector.items("matchExpressions")]
    if expressions:
        workers["matchExpressions"] = expressions
        draft.note("podSelector.matchExpressions were ignored before; here they count")
    if workers:
        draft.spec["workers"] = workers


def _expression(item: Fields) -> dict[str, Any]:
    made: dict[str, Any] = {"key": item.text("key"), "operator": item.text("operator")}
    values = item.texts("values")
    return made | ({"values": list(values)} if values else {})
