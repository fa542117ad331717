"""The own pod: what steers this worker, where it is reached, what its engine was told, and the patch of our keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import structlog

from sidecar.core.annotations import CAPACITY, CORDON, POOL, difference
from sidecar.core.vllm_args import VllmArgs, find_engines, vllm_args
from sidecar.edges.kubernetes.api import MERGE_PATCH, Api, ApiError, PodIdentity
from sidecar.edges.kubernetes.objects import Pod
from sidecar.edges.kubernetes.watch import EventType
from sidecar.model import LABEL_PREFIX, Frozen, Problem, Steering
from sidecar.ports import Report

log = structlog.get_logger()

_pods = msgspec.json.Decoder(Pod)


class OwnPod(Frozen, frozen=True, kw_only=True):
    """What is kept of the pod, over restarts too. `engine` None: no container is recognised as a vLLM server."""

    uid: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    ip: str = ""
    terminating: bool = False
    engine: VllmArgs | None = None
    engines: int = 0

    @property
    def pool(self) -> str:
        """The pool that its label names."""
        return self.labels.get(POOL, "")

    @property
    def own_labels(self) -> dict[str, str]:
        """What spec.workers selects by: the pod's labels without those of this system."""
        return {k: v for k, v in self.labels.items() if not _of_this_system(k)}

    def without_secrets(self) -> OwnPod:
        """For the disk: without API keys that stand in the container's arguments."""
        if self.engine is None or not self.engine.api_keys:
            return self
        return msgspec.structs.replace(self, engine=msgspec.structs.replace(self.engine, api_keys=()))


def _of_this_system(key: str) -> bool:
    prefix = key.partition("/")[0]
    return "/" in key and (prefix == LABEL_PREFIX or prefix.endswith(f".{LABEL_PREFIX}"))


def own_pod(document: bytes | msgspec.Raw) -> tuple[OwnPod, str]:
    """The pod as the API shows it, and its resourceVersion. Raises MsgspecError."""
    pod = _pods.decode(document)
    found = find_engines(pod.spec.containers)
    meta = pod.metadata
    return (
        OwnPod(
            uid=meta.uid,
            labels=meta.labels or {},
            annotations=meta.annotations or {},
            ip=pod.status.pod_ip,
            terminating=meta.deletion_timestamp is not None,
            engine=vllm_args(pod.spec.containers[found[0]]) if found else None,
            engines=len(found),
        ),
        meta.resource_version,
    )


class _PatchMeta(Frozen, frozen=True):
    uid: str
    labels: dict[str, str | None] = {}
    annotations: dict[str, str | None] = {}


class _Patch(Frozen, frozen=True):
    metadata: _PatchMeta


class PodWatch:
    """Told by a Watch on the own pod alone."""

    def __init__(
        self,
        *,
        me: PodIdentity,
        pod: OwnPod | None,
        read_now: bool,
        changed: Callable[[], None],
        trouble: Callable[[ApiError], Problem],
    ) -> None:
        self._me = me
        self._changed, self._trouble = changed, trouble
        self._version = 0
        self._error: Problem | None = None
        self._patch_error: Problem | None = None
        # A pod from the disk is shown, but a patch is made against what the API server says.
        self._confirmed = read_now
        self.pod = pod

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The watch's own trouble, that of patches, and steering that can't be read."""
        found = [p for p in (self._error, self._patch_error) if p]
        text = (self.pod.annotations if self.pod else {}).get(CAPACITY, "")
        if text and _whole(text) is None:
            message = f"annotation {CAPACITY}: {text!r} is no number of adapters; write 0 or more, such as 8"
            found.append(Problem(where=f"pod {self._me.pod}", message=message))
        return tuple(found)

    @property
    def steering(self) -> Steering:
        """What the pod's annotations and its deletion ask for."""
        if self.pod is None:
            return Steering()
        return Steering(
            cordoned=self.pod.annotations.get(CORDON, "").strip().lower() in ("true", "1", "yes"),
            capacity=_whole(self.pod.annotations.get(CAPACITY, "")),
            terminating=self.pod.terminating,
        )

    async def listed(self, items: Sequence[msgspec.Raw]) -> None:
        """See watch.Sink. A list without us: the pod is gone, and this process is about to end."""
        for item in items:
            self.event("MODIFIED", item)
        if self.pod is not None and not any(own_pod(item)[0].uid == self._me.uid for item in items):
            self._take(msgspec.structs.replace(self.pod, terminating=True), "")

    def event(self, kind: EventType, item: msgspec.Raw) -> None:
        """See watch.Sink. Another pod of the same name (a StatefulSet's next) is none of ours."""
        pod, version = own_pod(item)
        if pod.uid != self._me.uid:
            return
        if kind == "DELETED":
            pod = msgspec.structs.replace(pod, terminating=True)
        self._take(pod, version)

    def current(self) -> None:
        """See watch.Sink."""
        if self._error:
            self._error = None
            self._changed()

    def failed(self, error: ApiError) -> None:
        """See watch.Sink."""
        trouble = self._trouble(error)
        if trouble != self._error:
            self._error = trouble
            self._changed()

    def doubtful(self) -> bool:
        """See watch.Sink."""
        return False

    def _take(self, pod: OwnPod, version: str) -> None:
        """Versions of one object grow: an event from before our own patch says nothing new."""
        number = int(version) if version.isdecimal() else self._version
        if self._confirmed and number < self._version:
            return
        self._version = number
        changed = pod != self.pod or not self._confirmed
        self.pod, self._confirmed = pod, True
        if changed:
            self._changed()

    async def publish(self, api: Api, path: str, report: Report) -> bool:
        """Patch what differs, in one request; False (and no request) if nothing does. Raises ApiError."""
        if self.pod is None or not self._confirmed:
            raise ApiError(0, "the own pod was not read yet")
        labels = difference(self.pod.labels, report.labels)
        annotations = difference(self.pod.annotations, report.annotations)
        if not labels and not annotations:
            # Also after a patch that was carried out though its answer never came: the watch has shown it since.
            self._patched()
            return False
        patch = _Patch(_PatchMeta(self._me.uid, labels, annotations))
        try:
            body = await api.request("PATCH", path, body=msgspec.json.encode(patch), media=MERGE_PATCH)
        except ApiError as error:
            self._patch_failed(error)
            raise
        self._take(*own_pod(body))
        self._patched()
        return True

    def _patched(self) -> None:
        if self._patch_error is not None:
            self._patch_error = None
            self._changed()

    def _patch_failed(self, error: ApiError) -> None:
        trouble = self._trouble(error)
        if trouble != self._patch_error:
            self._patch_error = trouble
            self._changed()


def _whole(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() and len(text.strip()) <= 6 else None
