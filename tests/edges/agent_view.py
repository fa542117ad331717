"""An agent's view whose answers a test sets by hand, and a server of it on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sidecar.edges.metrics import Metrics
from sidecar.edges.server import Server
from sidecar.model import Head, Problem, Record
from sidecar.ports import AgentView, Row


@dataclass
class StaticView:
    loops: dict[str, object] = field(default_factory=lambda: {"loops": {"reconcile": 0.1}})
    is_healthy: bool = True
    missing: tuple[str, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    explained: dict[str, dict[str, Any]] = field(default_factory=dict)
    own: Record = field(
        default_factory=lambda: Record(head=Head(uid="uid-w", name="w", pool="p", generation=1), version=1)
    )
    workers: list[dict[str, Any]] = field(default_factory=list)
    found: list[Problem] = field(default_factory=list)
    is_drained: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def healthy(self) -> tuple[bool, Row]:
        return self.is_healthy, self.loops

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        return not self.missing, self.missing

    def adapters(self) -> list[dict[str, Any]]:
        return self.rows

    def explain(self, name: str) -> Row | None:
        self.asked.append(name)
        return self.explained.get(name)

    def record(self) -> Record:
        return self.own

    def peers(self) -> list[dict[str, Any]]:
        return self.workers

    async def drained(self) -> Row:
        self.asked.append("drained")
        self.entered.set()
        try:
            await self.is_drained.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return {"drained": True, "waiting": []}

    def problems(self) -> list[Problem]:
        return self.found


@asynccontextmanager
async def serving(view: AgentView, listen: str = "127.0.0.1:0", **options: Any) -> AsyncIterator[str]:
    """The server's address."""
    server = Server(view, Metrics(process=False), listen, **options)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()
