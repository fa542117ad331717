"""The pool's workers, from the EndpointSlices of its headless Service."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sidecar.edges.kubernetes.api import ApiError
from sidecar.edges.kubernetes.objects import Endpoint, Slice
from sidecar.edges.kubernetes.watch import EventType
from sidecar.model import Member, Problem

_slices = msgspec.json.Decoder(Slice)


class MemberList:
    """Told by a Watch; `uid` and `service` are this worker's own and its Service's name."""

    def __init__(
        self,
        *,
        uid: str,
        service: str,
        port: int,
        saved: Sequence[Member] | None,
        changed: Callable[[], None],
        trouble: Callable[[ApiError], Problem],
    ) -> None:
        self._uid, self._service, self._port = uid, service, port
        self._changed, self._trouble = changed, trouble
        self._slices: dict[str, tuple[Member, ...]] = {}
        self._read = False
        self._emptied = False
        self._current = False
        self._error: Problem | None = None
        self._members = tuple(saved) if saved is not None else None

    @property
    def members(self) -> tuple[Member, ...] | None:
        """By name; None while nothing was ever known."""
        return self._members

    @property
    def _listed_here(self) -> bool:
        return not self._emptied and any(m.uid == self._uid for m in self._members or ())

    @property
    def fresh(self) -> bool:
        """Whether the list may take something away: it is current, and this worker stands in it.

        A list without us is that of another Service, or of one that was deleted or is still being filled.
        """
        return self._current and self._read and self._listed_here

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The list's own trouble."""
        if self._error:
            return (self._error,)
        if not self._read or self._listed_here:
            return ()
        where = f"endpointslices of Service {self._service}"
        message = (
            "this pod is not in them. Is there a headless Service of this name with publishNotReadyAddresses: true "
            "whose selector matches the pod? --service names another one"
        )
        return (Problem(where=where, message=message),)

    async def listed(self, items: Sequence[msgspec.Raw]) -> None:
        """See watch.Sink."""
        self._slices = {}
        for item in items:
            self._take(_slices.decode(item))
        self._read = True
        self._put_together()

    def event(self, kind: EventType, item: msgspec.Raw) -> None:
        """See watch.Sink."""
        found = _slices.decode(item)
        if kind == "DELETED":
            self._slices.pop(_slice_name(found), None)
        else:
            self._take(found)
        self._put_together()

    def current(self) -> None:
        """See watch.Sink."""
        if not self._current or self._error:
            self._current, self._error = True, None
            self._changed()

    def failed(self, error: ApiError) -> None:
        """See watch.Sink."""
        trouble = self._trouble(error)
        if self._current or trouble != self._error:
            self._current, self._error = False, trouble
            self._changed()

    def doubtful(self) -> bool:
        """See watch.Sink."""
        return False

    def _take(self, found: Slice) -> None:
        self._slices[_slice_name(found)] = tuple(m for e in found.endpoints or () if (m := self._member(e)) is not None)

    def _member(self, endpoint: Endpoint) -> Member | None:
        pod = endpoint.target_ref
        if pod is None or pod.kind != "Pod" or not pod.uid or not endpoint.addresses:
            return None
        host = endpoint.addresses[0]
        return Member(
            name=pod.name,
            address=f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}",
            uid=pod.uid,
            zone=endpoint.zone or "",
            terminating=bool(endpoint.conditions.terminating),
            serving=endpoint.conditions.serving is not False,
        )

    def _put_together(self) -> None:
        """Each pod once, however many slices hold it; one that anybody says is ending is ending."""
        by_uid: dict[str, Member] = {}
        for name in sorted(self._slices):
            for member in self._slices[name]:
                known = by_uid.setdefault(member.uid, member)
                if member.terminating and not known.terminating:
                    by_uid[member.uid] = msgspec.structs.replace(known, terminating=True)
        members = tuple(sorted(by_uid.values(), key=lambda m: (m.name, m.uid)))
        # The Service was deleted, most likely: who the peers are is then unknown, which isn't "nobody".
        emptied = not members and bool(self._members)
        if emptied:
            members = self._members or ()
        before = (self._read, self._emptied, self._members)
        self._read, self._emptied, self._members = True, emptied, members
        if before != (True, emptied, members):
            self._changed()


def _slice_name(found: Slice) -> str:
    """Sorts IPv4 first: of a pod with addresses of both families that one counts, on every agent."""
    return f"{found.address_type}/{found.metadata.name}"
