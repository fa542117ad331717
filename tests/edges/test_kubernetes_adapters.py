"""What an event of the adapters' watch changes, and who is woken by it."""

from __future__ import annotations

from typing import Any

import msgspec

from sidecar.edges.kubernetes.adapters import AdapterList
from sidecar.model import Problem

REVISION = "sha256:" + "a" * 64
READY = {"type": "Ready", "status": "True", "reason": "Loaded", "lastTransitionTime": "2026-01-01T00:00:00Z"}


class Told:
    """An AdapterList, and how often it has called."""

    def __init__(self) -> None:
        self.calls = 0
        self.now = 1000.0
        self.list = AdapterList(
            path="/adapters",
            allow_http=False,
            grace=600.0,
            saved=None,
            clock=lambda: self.now,
            changed=self._changed,
            trouble=lambda error: Problem(where="adapters", message=str(error)),
        )

    def _changed(self) -> None:
        self.calls += 1

    def event(self, document: dict[str, Any], kind: Any = "MODIFIED") -> int:
        """One event; how often the list called."""
        before = self.calls
        self.list.event(kind, msgspec.Raw(msgspec.json.encode(document)))
        return self.calls - before


async def told(*documents: dict[str, Any]) -> Told:
    found = Told()
    await found.list.listed([msgspec.Raw(msgspec.json.encode(d)) for d in documents])
    found.list.current()
    return found


def resource(generation: int = 1, uri: str = "s3://bucket/a", uid: str = "u", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "lora-sidecar.io/v1alpha1",
        "kind": "Adapter",
        "metadata": {"name": "a", "namespace": "ns", "uid": uid, "generation": generation},
        "spec": {"baseModel": "base", "source": {"uri": uri}},
        "status": status,
    }


async def test_a_change_of_the_status_alone_wakes_nobody_and_is_seen() -> None:
    found = await told(resource())
    status = {"observedGeneration": 1, "revision": REVISION, "conditions": [READY]}
    assert found.event(resource(**status)) == 0
    assert (found.list.adapters or ())[0].status_revision == REVISION
    seen = found.list.status_seen("ns/a")
    assert seen is not None
    assert seen.conditions["Ready"].status == "True"
    before = found.list.adapters
    assert found.event(resource(**status | {"revision": "sha256:" + "b" * 64})) == 0
    assert found.list.adapters is before


async def test_a_revision_told_about_another_spec_is_none_of_this() -> None:
    found = await told(resource(generation=2))
    assert found.event(resource(generation=2, observedGeneration=1, revision=REVISION)) == 0
    assert (found.list.adapters or ())[0].status_revision is None


async def test_another_spec_and_another_resource_of_the_name_are_read() -> None:
    found = await told(resource(observedGeneration=1, revision=REVISION))
    assert found.event(resource(generation=2, uri="s3://bucket/b")) == 1
    assert (found.list.adapters or ())[0].source.uri == "s3://bucket/b"
    assert found.event(resource(generation=2, uri="s3://bucket/c", uid="another")) == 1
    assert (found.list.adapters or ())[0].source.uri == "s3://bucket/c"


async def test_a_spec_that_cannot_be_read_is_a_problem_until_it_is_set_right() -> None:
    found = await told(resource())
    assert found.event(resource(generation=2, uri="gopher://a")) == 1
    assert len(found.list.problems) == 1
    assert found.event(resource(generation=2, uri="gopher://a", observedGeneration=1)) == 0
    assert found.event(resource(generation=3)) == 1
    assert found.list.problems == ()


async def test_a_deletion_is_taken_back_by_an_event_of_the_same_resource() -> None:
    found = await told(resource())
    found.event(resource(), "DELETED")
    assert found.list.doubtful()
    found.event(resource(), "ADDED")
    assert not found.list.doubtful()


async def test_without_a_generation_every_event_is_read() -> None:
    found = await told(resource(generation=0))
    assert found.event(resource(generation=0, uri="s3://bucket/b")) == 1
    assert (found.list.adapters or ())[0].source.uri == "s3://bucket/b"
