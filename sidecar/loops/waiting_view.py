"""What the agent shows while it can't start yet: implements `ports.AgentView`."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.model import Head, Problem, Record
from sidecar.ports import Row


class WaitingView:
    """Alive, not ready, and why. `problem` is replaced as the reason changes."""

    def __init__(self, name: str, uid: str) -> None:
        self._record = Record(head=Head(uid=uid, name=name, generation=0))
        self.problem = Problem(where=name, message="starting")

    def healthy(self) -> tuple[bool, Row]:
        """See ports.AgentView. Restarting would not help."""
        return True, {"waiting": self.problem.message}

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        """See ports.AgentView."""
        return False, (f"{self.problem.where}: {self.problem.message}",)

    def adapters(self) -> Sequence[Row]:
        """See ports.AgentView."""
        return ()

    def explain(self, name: str) -> Row | None:
        """See ports.AgentView."""
        return None

    def record(self) -> Record:
        """See ports.AgentView. A record without a pool: no peer believes it."""
        return self._record

    def peers(self) -> Sequence[Row]:
        """See ports.AgentView."""
        return ()

    async def drained(self) -> Row:
        """See ports.AgentView. Nothing was ever loaded by this process: there is nothing to wait for."""
        return {"drained": True, "waiting": []}

    def problems(self) -> Sequence[Problem]:
        """See ports.AgentView."""
        return (self.problem,)
