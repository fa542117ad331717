"""Other systems' custom resources -> Adapter manifests. Pure: one decoded document in, one manifest and notes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sidecar.dialects import aibrix, dynamo, production_stack
from sidecar.dialects.draft import Converted, Draft

# By kind, with the API group that must be in front of the apiVersion's "/".
_DIALECTS: Mapping[str, tuple[str, Callable[[Draft], None]]] = {
    "DynamoModel": ("nvidia.com", dynamo.convert),
    "ModelAdapter": ("model.aibrix.ai", aibrix.convert),
    "LoraAdapter": ("production-stack.vllm.ai", production_stack.convert),
}


def is_foreign(document: object) -> bool:
    """Whether `convert` knows this kind of document."""
    return _dialect(document) is not None


def convert(document: object) -> Converted | None:
    """The Adapter manifest that comes closest to another system's resource; None for a kind that is not known."""
    dialect = _dialect(document)
    if dialect is None or not isinstance(document, Mapping):
        return None
    draft = Draft(document)
    dialect(draft)
    return draft.finish()


def _dialect(document: object) -> Callable[[Draft], None] | None:
    if not isinstance(document, Mapping):
        return None
    group, found = _DIALECTS.get(str(document.get("kind")), ("", None))
    return found if str(document.get("apiVersion")).partition("/")[0] == group else None
