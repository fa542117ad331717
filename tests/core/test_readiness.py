"""When a worker may get traffic for the first time."""

from __future__ import annotations

import pytest

from sidecar.core.readiness import reasons
from sidecar.core.world import Status
from sidecar.model import State

WANTED = frozenset({"default/a", "default/b"})


def status(state: State, *, held: bool = False) -> Status:
    return Status(state=state, served_name="a", held=held)


def test_not_before_the_engine_has_answered() -> None:
    assert reasons(frozenset(), {}, engine_seen=False) == ("the engine has not answered yet",)


def test_not_before_placement_was_computed_with_this_worker() -> None:
    (reason,) = reasons(None, {}, engine_seen=True)
    assert "placement" in reason


def test_with_nothing_wanted_at_once() -> None:
    assert reasons(frozenset(), {"default/x": status(State.LOADING)}, engine_seen=True) == ()


@pytest.mark.parametrize(
    ("told", "ready"),
    [
        (status(State.LOADED), True),
        (status(State.WAITING), True),
        (status(State.REJECTED), True),
        (status(State.FAILED), True),
        (status(State.PENDING, held=True), True),
        (status(State.PENDING), False),
        (status(State.DOWNLOADING), False),
        (status(State.LOADING), False),
        (status(State.DRAINING), False),
    ],
)
def test_not_until_each_wanted_adapter_is_settled(told: Status, ready: bool) -> None:
    found = reasons(WANTED, {"default/a": told, "default/b": status(State.LOADED)}, engine_seen=True)
    assert found == (() if ready else (f"adapter default/a is {told.state.value}",))


def test_what_is_wanted_here_no_longer_is_not_waited_for() -> None:
    assert reasons(WANTED, {"default/b": status(State.LOADED)}, engine_seen=True) == ()


def test_every_reason_is_said_in_order() -> None:
    both = {"default/b": status(State.LOADING), "default/a": status(State.DOWNLOADING)}
    assert reasons(WANTED, both, engine_seen=True) == (
        "adapter default/a is Downloading",
        "adapter default/b is Loading",
    )
