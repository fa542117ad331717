"""Another worker wants other adapters: said once it has lasted, in the log, to people and to the metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
from structlog.testing import capture_logs

from sidecar.core.adapter_lists import digest
from sidecar.core.world import Peer, World
from sidecar.loops.adapter_lists import LASTING_SECONDS, TELL_EVERY, AdapterLists
from sidecar.loops.agent_view import LiveView
from sidecar.model import Adapter, Record
from sidecar.ports import Observed

from ..core.worlds import ME, NOW, adapter, entry, peer, world

A, B = adapter("a"), adapter("b")


def telling(name: str, *adapters: Adapter, alive: bool = True) -> Peer:
    """A peer that wants these adapters and has loaded them all."""
    return peer(name, *[entry(a) for a in adapters], alive=alive, adapter_list=digest(adapters))


def at(seconds: float, *peers: Peer) -> World:
    """This worker wants A."""
    return world(A, targets={"a": [ME]}, peers=peers, now=NOW + seconds)


def lists() -> AdapterLists:
    made = AdapterLists()
    made.digest((A,), NOW)
    return made


def test_a_difference_is_said_once_when_it_has_lasted() -> None:
    mine, other = lists(), telling("worker-1", A, B)
    with capture_logs() as said:
        assert mine.look(at(0.0, other, telling("worker-2", A)), {A.key: A}) == 0
        assert mine.look(at(LASTING_SECONDS - 0.1, other), {A.key: A}) == 0
        assert said == []
        assert mine.problems() == ()
        for more in (0.0, 1.0, 100.0):
            assert mine.look(at(LASTING_SECONDS + more, other), {A.key: A}) == 1
    (event,) = said
    assert event["event"] == "adapter_lists_differ"
    assert event["worker"] == "worker-1"
    assert event["adapters"] == [f"{B.key}: only there"]
    (problem,) = mine.problems()
    assert problem.where == "worker worker-1"
    assert B.key in problem.message


def test_that_they_agree_again_is_said_too_and_the_next_time_counts_anew() -> None:
    mine, other, same = lists(), telling("worker-1", A, B), telling("worker-1", A)
    mine.look(at(0.0, other), {A.key: A})
    mine.look(at(LASTING_SECONDS, other), {A.key: A})
    with capture_logs() as said:
        assert mine.look(at(40.0, same), {A.key: A}) == 0
        assert mine.look(at(50.0, other), {A.key: A}) == 0
        assert mine.look(at(50.0 + LASTING_SECONDS - 0.1, other), {A.key: A}) == 0
    assert [e["event"] for e in said] == ["adapter_lists_differ_no_more"]
    assert mine.problems() == ()


def test_who_is_dead_or_tells_no_digest_differs_in_nothing() -> None:
    mine = lists()
    peers = (telling("worker-1", B, alive=False), peer("worker-2", entry(B)))
    for seconds in (0.0, LASTING_SECONDS):
        assert mine.look(at(seconds, *peers), {A.key: A}) == 0


def test_of_many_that_differ_the_first_are_named() -> None:
    mine, others = lists(), [telling(f"worker-{n}", A, B) for n in range(1, 9)]
    for seconds in (0.0, LASTING_SECONDS):
        mine.look(at(seconds, *others), {A.key: A})
    assert len(mine.problems()) == 6
    assert mine.problems()[-1].message.startswith("3 more")


def test_many_changes_in_a_row_are_told_as_a_few() -> None:
    mine = AdapterLists()
    assert mine.digest(None, NOW) == ""
    first = mine.digest((A,), NOW + 1.0)
    assert first == digest((A,))
    assert mine.digest((A, B), NOW + 1.0 + TELL_EVERY - 0.1) == first
    assert mine.digest((A, B), NOW + 1.0 + TELL_EVERY) == digest((A, B))


def test_the_same_list_in_another_tuple_is_no_change() -> None:
    mine = lists()
    told = mine.digest((A,), NOW + 10.0)
    copied = msgspec.json.decode(msgspec.json.encode(A), type=Adapter)
    assert mine.digest((copied,), NOW + 20.0) == told
    assert mine.digest((A, B), NOW + 20.0) == digest((A, B))


def test_peers_are_shown_with_what_is_known_of_their_lists() -> None:
    mine = lists()
    peers = [telling("worker-1", A, B), telling("worker-2", A), peer("worker-3")]
    mine.look(at(0.0, *peers), {A.key: A})
    view = {
        p.head.name: Observed(record=Record(head=p.head), heard=NOW, alive=True) for p in [*peers, peer("worker-4")]
    }
    agent: Any = SimpleNamespace(
        record=Record(head=peer(ME).head),
        lists=mine,
        peers=SimpleNamespace(view=lambda: view, unheard=frozenset),
    )
    shown = LiveView(
        cast(Any, agent), cast(Any, None), lambda: NOW, ready_timeout=0, beats=dict, more_problems=tuple
    ).peers()
    assert [row.get("adapterList") for row in shown] == [None, "differs", "same", "unknown", "unknown"]
    assert [row.get("adaptersDiffering") for row in shown] == [
        None, [{"adapter": B.key, "how": "only there"}], None, None, None,
    ]  # fmt: skip
