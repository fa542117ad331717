"""What is decoded of the API's objects: the few fields that are used, everything else is skipped unread."""

from __future__ import annotations

from typing import Any

import msgspec

from sidecar.model import Frozen


class Meta(Frozen, frozen=True, rename="camel"):
    """metadata of a pod or slice."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class PodSpec(Frozen, frozen=True, rename="camel"):
    """Containers as they are: `core.vllm_args` reads them."""

    containers: list[dict[str, Any]] = []


class PodStatus(Frozen, frozen=True, rename="camel"):
    """Where the pod is reached."""

    pod_ip: str = msgspec.field(default="", name="podIP")


class Pod(Frozen, frozen=True):
    """The own pod."""

    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class PodMeta(Frozen, frozen=True):
    """A pod's metadata alone, for the command line's list of pods."""

    metadata: Meta = Meta()


class PodList(Frozen, frozen=True):
    """A list of pods, their metadata alone."""

    items: list[PodMeta] = []


class Conditions(Frozen, frozen=True):
    """Null is unknown; by the API's rule it is then to be taken as serving and not terminating."""

    serving: bool | None = None
    terminating: bool | None = None


class Reference(Frozen, frozen=True):
    """The pod behind an endpoint."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class Endpoint(Frozen, frozen=True, rename="camel"):
    """One address of a slice."""

    addresses: list[str] = []
    conditions: Conditions = Conditions()
    target_ref: Reference | None = None
    zone: str | None = None


class Slice(Frozen, frozen=True, rename="camel"):
    """An EndpointSlice."""

    metadata: Meta = Meta()
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None


class Manager(Frozen, frozen=True):
    """One entry of managedFields."""

    manager: str = ""
    subresource: str = ""


class Condition(Frozen, frozen=True, rename="camel"):
    """One condition of an Adapter's status."""

    type: str = ""
    status: str = ""
    reason: str = ""
    last_transition_time: str = ""


class AdapterMeta(Frozen, frozen=True, rename="camel"):
    """metadata of an Adapter, for what the spec's reader doesn't look at."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    managed_fields: list[Manager] | None = None


class AdapterHead(Frozen, frozen=True):
    """An Adapter's metadata and status, the status undecoded."""

    metadata: AdapterMeta = AdapterMeta()
    status: msgspec.Raw = msgspec.Raw(b"null")
