"""The Kubernetes backend: adapters, peers and the own pod from three watches, reports by one patch.

It watches the Adapters of the namespace, the EndpointSlices of the pool's headless Service and its own pod, and nothing
else: with every agent patching its pod, watching all pods would cost the square of their number in events.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

import msgspec
import structlog

from sidecar.core.status import AdapterStatus, Happening
from sidecar.edges.kubernetes.adapters import GROUP, AdapterList
from sidecar.edges.kubernetes.api import Api, ApiError, PodIdentity
from sidecar.edges.kubernetes.board import Board
from sidecar.edges.kubernetes.members import MemberList
from sidecar.edges.kubernetes.pod import OwnPod, PodWatch, own_pod
from sidecar.edges.kubernetes.trouble import problem
from sidecar.edges.kubernetes.watch import Pace, Sink, Watch
from sidecar.edges.problems import log_changes
from sidecar.edges.remembered import remembered
from sidecar.edges.seeds import join_address
from sidecar.model import Adapter, Frozen, Member, Problem
from sidecar.ports import BackendView, Clock, EdgeError, Report, StatusSeen, Store

log = structlog.get_logger()

STATE_ADAPTERS = "kubernetes-adapters.json"
STATE_MEMBERS = "kubernetes-members.json"
STATE_POD = "kubernetes-pod.json"
# Changes that come together are saved together.
SAVE_AFTER = 1.0
SAVE_AGAIN = 30.0
# Somebody waits for this look, who can do without.
POD_NOW = 3.0


class Place(Frozen, frozen=True, kw_only=True):
    """Where to look: the adapters' namespace, the headless Service in the pod's namespace, the agents' port."""

    namespace: str
    service: str
    pool: str
    port: int = 8790


class KubernetesBackend:
    """Implements `ports.Backend` and `ports.StatusBoard`."""

    def __init__(
        self,
        *,
        api: Api,
        me: PodIdentity,
        place: Place,
        pod: OwnPod | None,
        pod_read_now: bool = False,
        state: Store,
        clock: Clock,
        allow_http: bool = False,
        crd_grace: float = 600.0,
        pace: Pace | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`pod` is what is known of the own pod at the start, by the API server if `pod_read_now`, else from the disk.

        `crd_grace` is in seconds.
        """
        self._api, self._me, self._place = api, me, place
        self._state, self._clock = state, clock
        self._rng = rng or random.Random()
        self._pace = pace
        self._view: BackendView | None = None
        self._notify: Callable[[], None] = lambda: None
        self._told: frozenset[Problem] = frozenset()
        self._dirty = asyncio.Event()
        self._saved: dict[str, object] = {}
        pods = f"/api/v1/namespaces/{me.namespace}/pods"
        self._pod_list, self._pod_path = pods, f"{pods}/{me.pod}"
        self._slices = f"/apis/discovery.k8s.io/v1/namespaces/{me.namespace}/endpointslices"
        self._adapters = AdapterList(
            path=f"/apis/{GROUP}/namespaces/{place.namespace}/adapters",
            allow_http=allow_http,
            grace=crd_grace,
            saved=remembered(self._state, STATE_ADAPTERS, tuple[Adapter, ...]),
            clock=clock,
            changed=self._changed,
            trouble=lambda error: problem("adapters", error, me, place.namespace, crd=True),
        )
        self._members = MemberList(
            uid=me.uid,
            service=place.service,
            port=place.port,
            saved=remembered(self._state, STATE_MEMBERS, tuple[Member, ...]),
            changed=self._changed,
            trouble=lambda error: problem(f"endpointslices of {place.service}", error, me, me.namespace),
        )
        self._pod = PodWatch(
            me=me,
            pod=pod,
            read_now=pod_read_now,
            changed=self._changed,
            trouble=lambda error: problem(f"pod {me.pod}", error, me, me.namespace),
        )
        self._board = Board(api, me, place.pool, clock)

    @property
    def pod(self) -> OwnPod | None:
        """The own pod as known now."""
        return self._pod.pod

    def labels(self) -> Mapping[str, str]:
        """The own pod's labels now: what routes at this moment."""
        return self._pod.pod.labels if self._pod.pod else {}

    def view(self) -> BackendView:
        """See ports.Backend; the same object until something changes."""
        # The adapters also become others without a word, when a status first tells a revision.
        if self._view is None or self._view.adapters is not self._adapters.adapters:
            self._view = BackendView(
                adapters=self._adapters.adapters,
                adapters_fresh=self._adapters.fresh,
                members=self._members.members,
                members_fresh=self._members.fresh,
                steering=self._pod.steering,
                labels=self.pod.own_labels if self.pod else None,
                address=join_address(self.pod.ip, self._place.port) if self.pod and self.pod.ip else "",
                problems=(
                    *self._adapters.problems,
                    *self._members.problems,
                    *self._pod.problems,
                    *self._board.problems,
                ),
            )
        return self._view

    async def publish(self, report: Report) -> bool:
        """See ports.Backend: one merge patch of what differs, no request if nothing does. Raises ApiError."""
        return await self._pod.publish(self._api, self._pod_path, report)

    async def look_at_own_pod(self) -> None:
        """Read the own pod now. The kubelet may act on its deletion before our watch has told us of it."""
        try:
            body = await self._api.request("GET", self._pod_path, timeout=POD_NOW)
            self._pod.event("MODIFIED", msgspec.Raw(body))
        except (ApiError, msgspec.MsgspecError) as error:
            log.warning("own_pod_unreadable", message=str(error))

    def status_seen(self, key: str) -> StatusSeen | None:
        """See ports.StatusBoard."""
        return self._adapters.status_seen(key)

    async def write_status(self, adapter: Adapter, status: AdapterStatus, *, force: bool = False) -> None:
        """See ports.StatusBoard."""
        try:
            await self._board.write_status(adapter, status, force=force)
        finally:
            self._board_changed()

    async def tell(self, adapter: Adapter, happening: Happening) -> None:
        """See ports.StatusBoard."""
        try:
            await self._board.tell(adapter, happening)
        finally:
            self._board_changed()

    def _board_changed(self) -> None:
        if self._view is not None and set(self._board.problems) - set(self._view.problems):
            self._changed()
        elif not self._board.problems:
            self._view = None

    async def run(self, changed: Callable[[], None]) -> None:
        """See ports.Backend."""
        self._notify = changed
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(self._adapters.path, self._adapters, {}), name="adapters")
            selector = {"labelSelector": f"kubernetes.io/service-name={self._place.service}"}
            tasks.create_task(self._watch(self._slices, self._members, selector), name="endpointslices")
            own = {"fieldSelector": f"metadata.name={self._me.pod}"}
            tasks.create_task(self._watch(self._pod_list, self._pod, own), name="pod")
            tasks.create_task(self._adapters.ask_for_ever(self._api, self._rng), name="deletions")
            tasks.create_task(self._save_for_ever(), name="save")

    async def _watch(self, path: str, sink: Sink, query: dict[str, str]) -> None:
        await Watch(self._api, path, sink, query=query, pace=self._pace, rng=self._rng).run()

    def _changed(self) -> None:
        self._view = None
        self._dirty.set()
        self._told = log_changes(self._told, self.view().problems)
        self._notify()

    # Remembering

    async def _save_for_ever(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(SAVE_AFTER)
            self._dirty.clear()
            pod = self._pod.pod
            values: dict[str, object | None] = {
                STATE_ADAPTERS: self._adapters.adapters,
                STATE_MEMBERS: self._members.members,
                STATE_POD: pod.without_secrets() if pod else None,
            }
            for name, value in values.items():
                if value is not None and value != self._saved.get(name):
                    await self._save(name, value)

    async def _save(self, name: str, value: object) -> None:
        try:
            await asyncio.to_thread(self._state.save, name, msgspec.json.encode(value))
        except EdgeError as error:
            log.warning("state_unsaved", name=name, error=str(error))
            self._dirty.set()
            await asyncio.sleep(SAVE_AGAIN)
            return
        self._saved[name] = value


def saved_pod(state: Store, uid: str) -> OwnPod | None:
    """The own pod as an earlier process of this pod saw it."""
    try:
        data = state.read(STATE_POD)
        pod = msgspec.json.decode(data, type=OwnPod) if data else None
    except (EdgeError, msgspec.MsgspecError) as error:
        log.warning("state_unreadable", name=STATE_POD, error=str(error))
        return None
    return pod if pod is not None and pod.uid == uid else None


async def read_own_pod(api: Api, me: PodIdentity) -> OwnPod:
    """The own pod as the API shows it now. Raises ApiError, also if another pod has the name now."""
    body = await api.request("GET", f"/api/v1/namespaces/{me.namespace}/pods/{me.pod}")
    try:
        pod, _ = own_pod(body)
    except msgspec.MsgspecError as error:
        raise ApiError(0, f"the pod {me.pod} can't be read: {error}") from error
    if pod.uid != me.uid:
        raise ApiError(409, f"the pod {me.pod} is another one by now (uid {pod.uid}, ours is {me.uid})")
    return pod
