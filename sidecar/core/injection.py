"""Injection of the sidecar into Kubernetes manifests: documents in, documents out, pure.

Works in place on plain dicts and on ruamel's mappings, which keep comments and order. Objects that a pool needs beside
its workload (a headless Service, a RoleBinding) are added once; a second run changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sidecar.core import injection_parts as parts
from sidecar.core.injection_parts import INJECTED, POOL_LABEL, Json, Options
from sidecar.core.injection_pod import Injection, InjectionRefused, Note, engine_of, mount_at, restore
from sidecar.model import Frozen

__all__ = ["InjectionRefused", "Options", "Outcome", "inject", "uninject"]

_TEMPLATES = ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet")
_POOL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


class Outcome(Frozen, frozen=True, kw_only=True):
    """The documents, and what was done: one sentence each, those that begin with `warning:` to be heeded."""

    documents: tuple[Any, ...]
    notes: tuple[str, ...]


class _Target(Frozen, frozen=True, kw_only=True):
    workload: Any
    template: Any

    @property
    def name(self) -> str:
        metadata = self.workload.get("metadata") or {}
        return str(metadata.get("name") or metadata.get("generateName", "").rstrip("-") or "pool")

    @property
    def namespace(self) -> str | None:
        return (self.workload.get("metadata") or {}).get("namespace")

    @property
    def label(self) -> str:
        return f"{self.workload.get('kind')} {self.name}"

    def noting(self, notes: list[str]) -> Note:
        """Adds sentences about this workload to `notes`."""
        return lambda text: notes.append(f"{self.label}: {text}")


def inject(documents: list[Any], options: Options) -> Outcome:
    """Put the sidecar into every workload with a vLLM container. Raises InjectionRefused with every reason at once."""
    if options.pool and not _POOL.fullmatch(options.pool):
        raise InjectionRefused(
            f"pool {options.pool!r} names a Service: at most 63 lower-case letters, digits and '-', a letter first"
        )
    notes: list[str] = []
    refusals: list[str] = []
    done: list[tuple[_Target, str]] = []
    for target in _targets(documents, options, refusals):
        try:
            pool = _pool_of(target, documents, options)
            done.append((target, pool))
            Injection(target.template, options, pool, target.noting(notes)).run()
        except InjectionRefused as refusal:
            refusals.append(f"{target.label}: {refusal}")
    if not done and not refusals:
        refusals.append(_nothing_found(documents, options))
    if refusals:
        raise InjectionRefused("\n".join(refusals))
    for target, pool in done:
        documents = _add_objects(documents, target, pool, notes)
    return Outcome(documents=tuple(documents), notes=tuple(notes))


def uninject(documents: list[Any]) -> Outcome:
    """Take the sidecar out again, and the objects that were added with it. Raises InjectionRefused."""
    notes: list[str] = []
    refusals: list[str] = []
    for workload in _flat(documents):
        for template in _pod_templates(workload):
            target = _Target(workload=workload, template=template)
            try:
                restore(template, target.noting(notes))
            except InjectionRefused as refusal:
                refusals.append(f"{target.label}: {refusal}")
    if refusals:
        raise InjectionRefused("\n".join(refusals))
    kept = []
    for document in documents:
        if _is_list(document):
            items = document["items"]
            for index in reversed(range(len(items))):
                if _added(items[index], notes):
                    del items[index]
        elif _added(document, notes):
            continue
        kept.append(document)
    return Outcome(documents=tuple(kept), notes=tuple(notes))


def _added(document: Any, notes: list[str]) -> bool:
    """Whether injection made this object."""
    if not isinstance(document, dict) or document.get("kind") not in ("Service", "RoleBinding"):
        return False
    metadata = document.get("metadata") or {}
    if INJECTED not in (metadata.get("annotations") or {}):
        return False
    notes.append(f"left out {document['kind']} {metadata['name']}; if it was applied, delete it in the cluster")
    return True


def _is_list(document: Any) -> bool:
    return isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list)


def _flat(documents: list[Any]) -> Iterator[Any]:
    for document in documents:
        if _is_list(document):
            yield from _flat(document["items"])
        elif isinstance(document, dict):
            yield document


def _pod_templates(workload: Any) -> list[Any]:
    """The pod templates of a document (a Pod is its own), none for kinds that have none that we know."""
    kind, spec = workload.get("kind"), workload.get("spec")
    if not isinstance(spec, dict):
        return []
    if kind == "Pod":
        found = [workload]
    elif kind in _TEMPLATES:
        found = [spec.get("template")]
    elif kind == "LeaderWorkerSet":
        group = spec.get("leaderWorkerTemplate") or {}
        found = [group.get("leaderTemplate"), group.get("workerTemplate")]
    else:
        found = []
    return [template for template in found if isinstance(template, dict) and isinstance(template.get("spec"), dict)]


def _targets(documents: list[Any], options: Options, refusals: list[str]) -> Iterator[_Target]:
    """The templates that run a vLLM server; of a LeaderWorkerSet the leader's, which alone has an API server."""
    for workload in _flat(documents):
        templates = _pod_templates(workload)
        for template in templates:
            target = _Target(workload=workload, template=template)
            try:
                engine = engine_of(template, options.container)
            except InjectionRefused as refusal:
                refusals.append(f"{target.label}: {refusal}")
                continue
            if engine is None:
                continue
            if workload.get("kind") == "LeaderWorkerSet" and (reason := _group_reason(workload, engine, options)):
                refusals.append(f"{target.label}: {reason}")
            else:
                yield target
            break


def _group_reason(workload: Any, engine: Json, options: Options) -> str:
    """Why a group of several pods can't share adapters: each pod reads them by path."""
    group = workload["spec"]["leaderWorkerTemplate"]
    size = group.get("size") or 1
    if size == 1:
        return ""
    if not group.get("leaderTemplate"):
        return f"size {size} without a leaderTemplate: only the leader has an API server, so describe it apart"
    workers = (group.get("workerTemplate") or {}).get("spec") or {}
    mounts = [mount_at(container, options.adapters_dir) for container in workers.get("containers") or ()]
    if mount_at(engine, options.adapters_dir) is not None and any(mounts):
        return ""
    return (
        f"size {size}: every pod of the group reads the adapters by path, so mount one volume that the pods of a group"
        f" share (and no other group) at {options.adapters_dir} in the leader's and the workers' template first"
    )


def _nothing_found(documents: list[Any], options: Options) -> str:
    kinds = ", ".join(sorted({str(d.get("kind")) for d in _flat(documents)})) or "nothing"
    wanted = f"a container named {options.container}" if options.container else "a vLLM container"
    return (
        f"no workload with {wanted} (found: {kinds}); known are Pods, Deployments, StatefulSets, ReplicaSets,"
        " DaemonSets, LeaderWorkerSets and Lists of them, and --container NAME names the server's container where its"
        " image and command don't say vllm"
    )


def _pool_of(target: _Target, documents: list[Any], options: Options) -> str:
    """The pool's name: asked for, or on the template, or made from the workload's so that its Service is free."""
    labels = (target.template.get("metadata") or {}).get("labels") or {}
    present = str(labels.get(POOL_LABEL) or "")
    pool = options.pool or present or _pool_name(target.name)
    for document in _flat(documents):
        if (
            document.get("kind") == "Service"
            and _same(document, pool, target.namespace)
            and not _serves(document, pool)
        ):
            raise InjectionRefused(
                f"Service {pool} is there and is not the headless one of that pool; choose another name with --pool"
            )
    return pool


def _pool_name(workload: str) -> str:
    base = re.sub(r"[^a-z0-9-]", "-", workload.lower())[:58].strip("-")
    return (base if base[:1].isalpha() else f"p{base}"[:58]) + "-lora"


def _serves(service: Json, pool: str) -> bool:
    spec = service.get("spec") or {}
    return spec.get("clusterIP") == "None" and (spec.get("selector") or {}) == {POOL_LABEL: pool}


def _same(document: Json, name: str, namespace: str | None) -> bool:
    metadata = document.get("metadata") or {}
    return metadata.get("name") == name and metadata.get("namespace") == namespace


def _add_objects(documents: list[Any], target: _Target, pool: str, notes: list[str]) -> list[Any]:
    account = str(target.template["spec"].get("serviceAccountName") or "default")
    namespace = target.namespace
    for made in (parts.service(pool, namespace), parts.role_binding(account, namespace)):
        kind, name = made["kind"], made["metadata"]["name"]
        if any(d.get("kind") == kind and _same(d, name, namespace) for d in _flat(documents)):
            continue
        what = "headless Service" if kind == "Service" else kind
        notes.append(f"{target.label}: {what} {name}")
        home = next((d for d in documents if _is_list(d) and any(t is target.workload for t in _flat([d]))), None)
        if home is not None:
            home["items"].append(made)
        else:
            documents = [*documents, made]
    return documents
