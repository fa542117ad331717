"""NVIDIA Dynamo's DynamoModel (nvidia.com/v1alpha1)."""

from __future__ import annotations

from sidecar.core.fields import show
from sidecar.dialects.draft import Draft

_STRATEGIES = ("all", "fixed", "percentage")


def convert(draft: Draft) -> None:
    """Only models of type lora are loaded there, and so here; `distribution` is in some of its versions."""
    given = draft.given
    draft.left_out(("modelName", "baseModelName", "modelType", "source", "distribution"))
    kind = given.text("modelType", "base")
    if kind.lower() != "lora":
        draft.nothing = True
        draft.note(f"modelType is {show(kind)}: only lora is loaded at run time, so there is no adapter to make of it")
        return
    draft.served(given.text("modelName", draft.name))
    base = given.text("baseModelName", required="name the base model")
    draft.spec["baseModel"] = base
    draft.note(
        f"baseModelName {show(base)} had to equal the component's modelRef.name; baseModel must be what the engine's"
        " /v1/models shows, or the agent's --base-model"
    )
    source = given.mapping("source")
    uri = source.text("uri", required="write where the adapter is") if source else ""
    if source is None:
        draft.faults.append("spec.source: is required to load a LoRA")
    draft.source(uri)
    _distribution(draft)


def _distribution(draft: Draft) -> None:
    given = draft.given.mapping("distribution")
    if given is None:
        return
    strategy = given.choice("strategy", _STRATEGIES, "all")
    made: dict[str, object] = {"strategy": strategy}
    if strategy == "fixed":
        made["replicas"] = given.whole("replicas", 1, 0, 100_000)
    if strategy == "percentage":
        made["percentage"] = percentage = given.whole("percentage", 100, 0, 100)
        if percentage == 0:
            draft.note("percentage 0 meant one worker at least; here it means none")
    draft.spec["distribution"] = made
