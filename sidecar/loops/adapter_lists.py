"""Tells people when another worker wants other adapters than this one, once that has lasted."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from sidecar.core.adapter_lists import Difference, differences, digest, placed_on, verdict
from sidecar.core.world import Peer, World
from sidecar.model import Adapter, Problem
from sidecar.ports import Row

log = structlog.get_logger()

# Everybody hears of a change at a time of its own.
LASTING_SECONDS = 30.0
# A hundred changes in a row are told as one or two: each is news of this worker for the whole pool.
TELL_EVERY = 5.0
_SHOWN = 5


class AdapterLists:
    """`lasting` are the workers whose lists have differed from this worker's for 30 s and longer, by name."""

    def __init__(self) -> None:
        self._list: tuple[Adapter, ...] | None = None
        self._digest = ""
        self._told_at = 0.0
        self._since: dict[str, float] = {}
        self._world: World | None = None
        self._adapters: Mapping[str, Adapter] = {}
        self.lasting: tuple[str, ...] = ()

    def digest(self, adapters: tuple[Adapter, ...] | None, now: float) -> str:
        """For the head: of the list as it was up to 5 s ago."""
        if adapters is not self._list and (now - self._told_at >= TELL_EVERY or not self._digest):
            if adapters != self._list:
                self._digest, self._told_at = digest(adapters), now
            self._list = adapters
        return self._digest

    def look(self, world: World, adapters: Mapping[str, Adapter]) -> int:
        """Compare this worker's list, `adapters` by key, with its peers'; returns how many have differed for long."""
        self._world, self._adapters = world, adapters
        now = world.now
        self._since = {
            name: self._since.get(name, now)
            for name, p in world.peers.items()
            if p.alive and self._verdict(p) == "differs"
        }
        before, self.lasting = (
            self.lasting,
            tuple(sorted(n for n, t in self._since.items() if now - t >= LASTING_SECONDS)),
        )
        for name in sorted(set(self.lasting) - set(before)):
            log.warning("adapter_lists_differ", worker=name, adapters=self._told(name))
        for name in sorted(set(before) - set(self.lasting)):
            log.info("adapter_lists_differ_no_more", worker=name)
        return len(self.lasting)

    def rows(self) -> dict[str, Row]:
        """By worker name: adapterList (same, differs, unknown), and the adapters that are known to differ."""
        world = self._world
        if world is None:
            return {}
        targeted = placed_on(world.assignments)
        found: dict[str, Row] = {}
        for name, peer in world.peers.items():
            said = self._verdict(peer)
            row: dict[str, object] = {"adapterList": said}
            if said == "differs":
                named = differences(self._adapters, targeted.get(name, ()), peer)
                row["adaptersDiffering"] = [{"adapter": d.adapter, "how": d.how} for d in named]
            found[name] = row
        return found

    def problems(self) -> tuple[Problem, ...]:
        """For people, the first few."""
        shown = [self._problem(name) for name in self.lasting[:_SHOWN]]
        if len(self.lasting) > _SHOWN:
            more = f"{len(self.lasting) - _SHOWN} more want other adapters than this worker; see /v1/peers"
            shown.append(Problem(where="workers", message=more))
        return tuple(shown)

    def _verdict(self, peer: Peer) -> str:
        return verdict(self._digest, peer.head.adapter_list)

    def _problem(self, name: str) -> Problem:
        named = self._told(name)
        return Problem(
            where=f"worker {name}",
            message="wants other adapters than this worker"
            + (f" ({', '.join(named[:_SHOWN])}{', …' if len(named) > _SHOWN else ''})" if named else "")
            + "; give both the same manifests, or see in its log why it doesn't hear of changes",
        )

    def _told(self, name: str) -> list[str]:
        return [f"{d.adapter}: {d.how}" for d in self._differences(name)]

    def _differences(self, name: str) -> tuple[Difference, ...]:
        world = self._world
        peer = world.peers.get(name) if world else None
        if world is None or peer is None:
            return ()
        return differences(self._adapters, placed_on(world.assignments).get(name, ()), peer)
