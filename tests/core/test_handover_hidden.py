"""A copy that gets no traffic yet is none that another may go for."""

from __future__ import annotations

import pytest

from sidecar.core.handover import may_drop
from sidecar.core.memory import Memory
from sidecar.core.report import entries
from sidecar.core.world import Status
from sidecar.model import State

from .worlds import NOW, R1, adapter, entry, fixed, peer, world

STATUSES = {"ns/a": Status(state=State.LOADED, served_name="a", routed=True)}


def hidden(shown: frozenset[str] | None) -> bool:
    return entries({}, STATUSES, {}, {}, Memory(), 0.0, shown)[0].hidden


def test_loaded_is_hidden_until_the_platform_routes_to_it() -> None:
    assert hidden(frozenset())
    assert not hidden(frozenset({"a"}))


def test_without_such_a_platform_nothing_is_hidden() -> None:
    assert not hidden(None)


@pytest.mark.parametrize("unseen", [False, True])
def test_nobody_goes_for_a_copy_that_is_hidden(unseen: bool) -> None:
    a = adapter("a", distribution=fixed(1))
    other = peer("worker-1", entry(a, hidden=unseen))
    seen = world(a, targets={"a": ["worker-1"]}, wants={"a": R1}, owned={"a": R1}, disk=[R1], peers=[other])
    assert may_drop(seen, a, NOW) is not unseen
