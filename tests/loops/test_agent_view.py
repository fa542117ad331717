"""What the agent answers while its pod ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from sidecar.loops.agent_view import LiveView
from sidecar.model import Steering
from sidecar.ports import BackendView


class Pod:
    """A backend that learns of the pod's deletion only when it looks again."""

    def __init__(self, ending: bool) -> None:
        self.ending = ending
        self.looks = 0
        self.steering = Steering()
        self.agent: Any = None

    def view(self) -> BackendView:
        return BackendView(
            adapters=(), adapters_fresh=True, members=(), members_fresh=True, steering=self.steering, problems=()
        )

    async def look_again(self) -> None:
        self.looks += 1
        self.steering = Steering(terminating=self.ending)


def view_of(pod: Pod) -> LiveView:
    moments = iter([0.0, *[1000.0] * 10])
    agent = SimpleNamespace(plan=None, unsaved="", world=None, handed_over=False, wake=lambda: None)
    pod.agent = agent
    return LiveView(
        cast(Any, agent),
        cast(Any, pod),
        lambda: next(moments),
        ready_timeout=0,
        beats=dict,
        more_problems=tuple,
        look_again=pod.look_again,
    )


async def test_a_deletion_that_the_kubelet_heard_of_first_is_waited_for() -> None:
    pod = Pod(ending=True)
    answer = await view_of(pod).drained()
    assert answer["drained"] is False
    assert answer["waiting"]
    # From here on the engine may be gone at any moment: nothing is put back into routing.
    assert pod.agent.handed_over


async def test_a_container_that_restarts_alone_waits_for_nothing() -> None:
    pod = Pod(ending=False)
    assert await view_of(pod).drained() == {"drained": True, "waiting": []}
    assert pod.looks == 1
    assert not pod.agent.handed_over
