"""The LoraAdapter of the vLLM production stack (production-stack.vllm.ai/v1alpha1)."""

from __future__ import annotations

from sidecar.core.fields import Fields, show
from sidecar.dialects.draft import Draft, single_object_note

_KNOWN = ("baseModel", "adapterSource", "loraAdapterDeploymentConfig", "vllmApiKey")
_SOURCE = (*("type", "adapterName", "adapterPath", "repository", "credentialsSecretRef", "pattern", "maxAdapters"),)


def convert(draft: Draft) -> None:
    """Of its source types only local and huggingface ever worked there; s3 and http do here."""
    given = draft.given
    draft.left_out(_KNOWN)
    base = given.text("baseModel", required="name the base model")
    draft.spec["baseModel"] = base
    draft.note(
        f"baseModel {show(base)} was the pods' label model; here it must be what the engine's /v1/models shows, or the"
        " agent's --base-model"
    )
    source = given.mapping("adapterSource")
    if source is None:
        draft.faults.append("spec.adapterSource: is required; it says where the adapter is")
        draft.source("")
    else:
        _source(draft, source)
    config = given.mapping("loraAdapterDeploymentConfig")
    if config is not None:
        draft.fixed(config.whole("replicas", 1, 0, 100_000) if config.has("replicas") else None)
        if config.text("algorithm", "default") != "default":
            draft.note(f"the algorithm {show(config.raw('algorithm'))} was left out: it never had an effect")
    if given.has("vllmApiKey"):
        draft.note("vllmApiKey was left out: the engine's key belongs in --engine-api-key-file")
    draft.note("pods were found in all namespaces; here an adapter and its workers are in one namespace")


def _source(draft: Draft, source: Fields) -> None:
    draft.left_out(_SOURCE, source)
    draft.served(source.text("adapterName", draft.name))
    for key in ("pattern", "maxAdapters"):
        if source.has(key):
            draft.note(f"adapterSource.{key} was left out: it never had an effect")
    secret = source.mapping("credentialsSecretRef")
    draft.source(_uri(draft, source), secret.text("name") if secret else "")
    if secret is not None and secret.has("key"):
        draft.note(f"the token was under the Secret's key {show(secret.raw('key'))}")


def _uri(draft: Draft, source: Fields) -> str:
    kind = source.choice("type", ("local", "s3", "http", "huggingface"), "local")
    path, repository = source.text("adapterPath"), source.text("repository")
    if kind == "huggingface":
        # adapterPath is where its controller downloaded it to.
        return f"hf://{repository.removeprefix('hf://')}"
    if kind == "local":
        return f"file://{path}" if path.startswith("/") else path
    uri = path or repository
    if kind == "s3" and uri and "://" not in uri:
        uri = f"s3://{uri.lstrip('/')}"
    if note := single_object_note(uri):
        draft.note(note)
    return uri
