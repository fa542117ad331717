"""An Adapter manifest in the making, from another system's document."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from sidecar.core.fields import Fields, show
from sidecar.core.manifest import API_VERSION, KIND, MAX_NAME, InvalidManifest, parse_adapter
from sidecar.core.sources import is_archive
from sidecar.model import Frozen

# Labels that tie an object to its installation, which the converted one isn't part of.
_OTHERS_LABELS = ("helm.sh/", "app.kubernetes.io/managed-by", "helm-release-name", "argocd.argoproj.io/")


class Converted(Frozen, frozen=True, kw_only=True):
    """`document` is the manifest, None if there is nothing to make one of. `notes` say what is different from before,
    `faults` what keeps the manifest from being valid."""

    document: dict[str, Any] | None
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class Draft:
    """Reads the other document, and collects the manifest's spec, notes and faults."""

    def __init__(self, document: Mapping[object, object]) -> None:
        self.notes: list[str] = []
        self.faults: list[str] = []
        self.spec: dict[str, Any] = {}
        self.nothing = False
        top = Fields(document, "", self.faults, False)
        self.metadata = top.mapping("metadata") or top.empty("metadata")
        self.given = top.mapping("spec") or top.empty("spec")
        self.name = self.metadata.text("name", required="name the adapter")

    def note(self, text: str) -> None:
        """Say what is different from before."""
        self.notes.append(text)

    def left_out(self, known: Sequence[str], given: Fields | None = None) -> None:
        """Note every field that no one here knows."""
        fields = given or self.given
        for key in fields.names:
            if key not in known:
                self.note(f"{fields.path(key)} is not known here and was left out")

    def served(self, name: str) -> None:
        """What clients send as `model`."""
        if name != self.resource_name:
            self.spec["servedName"] = name

    def source(self, uri: str, secret: str = "") -> None:
        """Where the files are."""
        self.spec["source"] = {"uri": uri}
        if secret:
            self.spec["source"]["secretRef"] = {"name": secret}
            keys = {"s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", "hf": "HF_TOKEN"}.get(uri.partition(":")[0])
            self.note(
                f"agents read the Secret {secret!r} only if they are allowed to; its keys must be named like the"
                f" environment variables of the source{f' ({keys})' if keys else ''}"
            )
        elif uri.startswith("s3://"):
            self.note("credentials come from the agent's own container: give it what the other one had for S3")
        if uri.startswith("file://"):
            self.note("a file:// path must exist in the agent's container: mount the volume there")

    def fixed(self, replicas: int | None) -> None:
        """That many workers; None is all of them."""
        if replicas is not None:
            self.spec["distribution"] = {"strategy": "fixed", "replicas": replicas}

    @property
    def resource_name(self) -> str:
        """The name, shortened to what fits into a label."""
        if len(self.name) <= MAX_NAME:
            return self.name
        return f"{self.name[: MAX_NAME - 9].rstrip('-.')}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"

    def finish(self) -> Converted:
        """The manifest, checked like any other."""
        if self.nothing:
            return Converted(document=None, notes=tuple(self.notes), faults=tuple(self.faults))
        if self.resource_name != self.name:
            self.note(f"metadata.name {self.name!r} has {len(self.name)} characters, at most {MAX_NAME} are allowed")
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": self._metadata(), "spec": self.spec}
        if not self.faults:
            try:
                parse_adapter(document)
            except InvalidManifest as error:
                self.faults += error.faults
        return Converted(document=document, notes=tuple(self.notes), faults=tuple(self.faults))

    def _metadata(self) -> dict[str, Any]:
        made: dict[str, Any] = {"name": self.resource_name}
        namespace = self.metadata.text("namespace")
        if namespace:
            made["namespace"] = namespace
        labels = {k: v for k, v in self.metadata.pairs("labels").items() if not k.startswith(_OTHERS_LABELS)}
        if labels:
            made["labels"] = labels
        return made


def single_object_note(uri: str) -> str:
    """What to say about an S3 URI that another system would read as one object; "" if it is the same here."""
    if uri.startswith("s3://") and not uri.endswith("/") and not is_archive(uri):
        return f"{show(uri)} is read as a prefix here: every object under it is a file of the adapter"
    return ""
