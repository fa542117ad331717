"""What gossip shows to people."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.core.namesakes import Names
from sidecar.core.speaker import Speaker
from sidecar.core.wire import CLOCK_WINDOW
from sidecar.model import Problem
from sidecar.ports import Row

_SHOWN = 5


def problems(speaker: Speaker, names: Names) -> tuple[Problem, ...]:
    """Names used twice, clocks that are off, and peers that only HTTP reaches."""
    found = [
        Problem(
            where=f"worker {name}",
            message=f"the agent at {later} has the name of the one at {earlier}, which was first; it holds no "
            "adapters until it has a --name of its own",
        )
        for name, earlier, later in names.twice
    ]
    for uid, skew in sorted(speaker.skewed.items())[:_SHOWN]:
        way = "ahead of" if skew > 0 else "behind"
        message = (
            f"is {abs(skew):.0f} s {way} this machine's; messages more than {CLOCK_WINDOW:.0f} s off are dropped; "
            "set the clock that is wrong"
        )
        found.append(Problem(where=f"clock of {_name_of(speaker, uid)}", message=message))
    return (*found, *_without_datagrams(speaker))


def rows(speaker: Speaker, names: Names) -> Mapping[str, Row]:
    """By worker name: state (alive, suspect, dead, clock), since, incarnation, udp (None: not tried), clockSkew."""
    found: dict[str, Row] = {}
    for name, (member, _) in names.shown.items():
        skew = speaker.skewed.get(member.uid)
        found[name] = {
            "state": "clock" if skew is not None else member.standing.name.lower(),
            "since": member.since,
            "incarnation": member.incarnation,
            "udp": member.udp,
            "clockSkew": skew,
        }
    return found


def _without_datagrams(speaker: Speaker) -> tuple[Problem, ...]:
    members = speaker.gossip.members
    silent = sorted(
        _name_of(speaker, uid) for uid, m in members.by_uid.items() if m.udp is False and uid not in members.dead
    )
    if not silent:
        return ()
    more = f" and {len(silent) - _SHOWN} more" if len(silent) > _SHOWN else ""
    return (
        Problem(
            where="gossip",
            message=f"no datagrams come through to {', '.join(silent[:_SHOWN])}{more}; HTTP is used instead, which is "
            "slower; let UDP pass on the agents' port between the workers of the pool",
        ),
    )


def _name_of(speaker: Speaker, uid: str) -> str:
    replica = speaker.gossip.membership.replica(uid)
    head = replica.head if replica else None
    return f"{head.name} ({head.address})" if head else uid
