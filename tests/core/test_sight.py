"""From what the edges know to what placement and the planner see."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.core.placement import place
from sidecar.core.sight import (
    Roster,
    base_model_names,
    heirless,
    split_names,
    told_decisions,
    unmatched,
    worker_of,
)
from sidecar.core.world import Peer
from sidecar.model import BaseModel, EngineView, Member, Selector, State

from .worlds import BASE, DIRECTORY, ME, R1, R2, adapter, decision, engine, entry, peer

A = adapter("a")
SELF = peer(ME)


def member(name: str, *, uid: str | None = None, **fields: Any) -> Member:
    return Member(name=name, address=f"{name}:8790", uid=f"uid-{name}" if uid is None else uid, **fields)


def roster(peers: list[Peer], members: list[Member], unheard: int = 0) -> Roster:
    return Roster(SELF, members, {p.head.name: p for p in peers}, unheard)


KUBERNETES = [member(ME), member("worker-1"), member("worker-2")]


# -- one worker


def test_a_worker_is_what_its_record_says() -> None:
    seen = worker_of(
        peer("w", entry(A, avoid=True), zone="z", capacity=8, foreign=3, labels={"gpu": "h100"}, resting=True)
    )
    assert (seen.name, seen.uid, seen.zone, seen.room) == ("w", "uid-w", "z", 5)
    assert (seen.labels, seen.avoids, seen.resting) == ({"gpu": "h100"}, frozenset({A.key}), True)
    assert (seen.up, seen.cordoned, seen.terminating) == (True, False, False)


@pytest.mark.parametrize(("alive", "up"), [(True, False), (False, True), (False, False)])
def test_up_means_alive_and_the_engine_answers(alive: bool, up: bool) -> None:
    assert not worker_of(peer("w", alive=alive, up=up)).up


def test_more_foreign_names_than_room_leave_none() -> None:
    assert worker_of(peer("w", capacity=2, foreign=3)).room == 0


def test_zone_and_end_come_from_the_backend() -> None:
    seen = worker_of(peer("w", zone="said"), member("w", zone="listed", terminating=True))
    assert (seen.zone, seen.terminating) == ("listed", True)


def test_a_worker_that_says_it_ends_is_believed() -> None:
    assert worker_of(peer("w", terminating=True), member("w")).terminating


# -- the pool


def test_a_record_counts_only_for_the_pod_that_is_listed() -> None:
    """A new pod of the old name, and a worker that the platform no longer lists."""
    seen = roster([peer("worker-1", uid="old"), peer("worker-2"), peer("worker-3")], KUBERNETES)
    assert [w.name for w in seen.workers] == [ME, "worker-2"]
    assert (seen.listed, seen.reached, seen.unheard) == (3, 2, 1)
    assert not seen.complete


def test_who_is_not_listed_itself_counts_itself() -> None:
    seen = roster([peer("worker-1")], [member("worker-1")])
    assert [w.name for w in seen.workers] == [ME, "worker-1"]
    assert (seen.listed, seen.reached) == (2, 2)


def test_the_dead_are_listed_and_not_reached() -> None:
    seen = roster([peer("worker-1", alive=False), peer("worker-2")], KUBERNETES)
    assert (seen.listed, seen.reached) == (3, 2)
    assert [w.up for w in seen.workers] == [True, False, True]


def test_standalone_the_workers_are_those_that_were_heard() -> None:
    addresses = [member(ME, uid=""), member("10.0.0.1:8790", uid=""), member("10.0.0.2:8790", uid="")]
    seen = roster([peer("worker-1"), peer("worker-2", alive=False)], addresses, unheard=1)
    assert [w.name for w in seen.workers] == [ME, "worker-1", "worker-2"]
    assert (seen.listed, seen.reached, seen.unheard) == (3, 2, 1)
    assert not seen.complete


@pytest.mark.parametrize(
    ("peers", "complete"),
    [
        ([peer("worker-1"), peer("worker-2")], True),
        ([peer("worker-1")], False),
        # Its engine has not answered for the first time: its emptiness means nothing.
        ([peer("worker-1"), peer("worker-2", engine_seen=False, up=False)], False),
        ([peer("worker-1"), peer("worker-2", up=False)], True),
    ],
)
def test_complete_when_every_listed_worker_has_spoken_for_its_engine(peers: list[Peer], complete: bool) -> None:
    assert roster(peers, KUBERNETES).complete is complete


def test_a_worker_alone_is_complete() -> None:
    assert roster([], [member(ME)]).complete
    assert roster([], []).complete


def test_hoped_for_are_those_that_are_up_and_those_whose_engines_are_starting() -> None:
    peers = [
        peer("worker-1", engine_seen=False, up=False),
        peer("worker-2", up=False),
        peer("worker-3", alive=False, engine_seen=False, up=False),
        peer("worker-4"),
    ]
    seen = roster(peers, [*KUBERNETES, member("worker-3"), member("worker-4")])
    assert {w.name: w.up for w in seen.hoped} == {
        ME: True, "worker-1": True, "worker-2": False, "worker-3": False, "worker-4": True,
    }  # fmt: skip
    assert not next(w for w in seen.workers if w.name == "worker-1").up


# -- fits no worker at all


PICKY = adapter("a", selector=Selector(labels={"gpu": "h100"}))


@pytest.mark.parametrize(
    ("peers", "fits_none"),
    [
        ([peer("worker-1"), peer("worker-2")], True),
        ([peer("worker-1", labels={"gpu": "h100"}), peer("worker-2")], False),
        # Those that are cordoned or end are none of its members now, but it fits them.
        ([peer("worker-1", labels={"gpu": "h100"}, cordoned=True), peer("worker-2")], False),
        ([peer("worker-1", labels={"gpu": "h100"}, terminating=True), peer("worker-2")], False),
        ([peer("worker-1", labels={"gpu": "h100"}, base_models=("other",)), peer("worker-2")], True),
        # Unknown is never empty: who was not heard may be the one.
        ([peer("worker-1")], False),
        ([peer("worker-1"), peer("worker-2", engine_seen=False)], False),
    ],
)
def test_a_selector_fits_no_worker_only_when_all_are_known(peers: list[Peer], fits_none: bool) -> None:
    seen = roster(peers, KUBERNETES)
    found = unmatched([PICKY], place([PICKY], seen.workers), seen)
    assert found == (frozenset({PICKY.key}) if fits_none else frozenset())


# -- the engine's names


def test_owned_is_what_lies_directly_in_our_directory() -> None:
    view = EngineView(
        process="p",
        adapters={
            "ours": f"{DIRECTORY}/{R1[7:]}",
            "slash": f"{DIRECTORY}/{R2[7:]}/",
            "other": "/models/other",
            "beside": f"{DIRECTORY}-old/{R1[7:]}",
            "below": f"{DIRECTORY}/{R1[7:]}/inner",
            "the directory": DIRECTORY,
            "the directory/": f"{DIRECTORY}/",
            "nothing": "",
        },
    )
    owned, foreign = split_names(view, DIRECTORY)
    assert owned == {"ours": R1, "slash": R2}
    assert foreign == {"other", "beside", "below", "the directory", "the directory/", "nothing"}
    assert split_names(view, f"{DIRECTORY}/") == (owned, foreign)


def test_an_unknown_engine_has_no_names() -> None:
    assert split_names(None, DIRECTORY) == ({}, frozenset())


def test_a_base_model_goes_by_id_root_and_what_was_configured() -> None:
    view = EngineView(process="p", base_models=(BaseModel(id="tiny", root="/models/tiny"), BaseModel(id="alias")))
    assert base_model_names(view, "") == ("/models/tiny", "alias", "tiny")
    assert base_model_names(view, "mine") == ("/models/tiny", "alias", "mine", "tiny")
    assert base_model_names(None, "mine") == ("mine",)
    assert base_model_names(None, "") == ()
    assert base_model_names(engine(), "") == ("/base", BASE)


def test_decisions_are_heard_from_everyone() -> None:
    one, other = decision(A, R1), decision(A, R2, refresh=1)
    peers = [
        peer("worker-1", entry(A, State.PENDING, "", decision=one)),
        peer("worker-2", entry(A, State.LOADED, R1)),
        peer("worker-3", entry(A, State.PENDING, "", decision=other)),
        peer("worker-4"),
    ]
    assert told_decisions(peers) == {A.key: [one, other]}
    assert told_decisions([]) == {}


# -- nobody to hand over to

ENDING = member("worker-2", terminating=True)


@pytest.mark.parametrize(
    ("members", "peers", "expected"),
    [
        ([member(ME)], [], True),
        ([member(ME), ENDING], [peer("worker-2")], True),
        ([member(ME), ENDING], [], True),
        # One that says so itself is ending, whatever the list says yet.
        ([member(ME), member("worker-2")], [peer("worker-2", terminating=True)], True),
        ([member(ME), member("worker-2")], [peer("worker-2")], False),
        ([member(ME), ENDING, member("worker-1")], [peer("worker-1"), peer("worker-2")], False),
        # Listed and not heard yet, or heard while its engine is still starting: a replacement.
        ([member(ME), member("worker-2")], [], False),
        ([member(ME), member("worker-2")], [peer("worker-2", up=False, engine_seen=False, base_models=())], False),
        # A record of the pod that had the name before says nothing about the one that has it now.
        ([member(ME), member("worker-2", uid="another")], [peer("worker-2", terminating=True)], False),
        # What may come back: cordoned, out of reach, an engine that is down.
        ([member(ME), member("worker-2")], [peer("worker-2", cordoned=True)], False),
        ([member(ME), member("worker-2")], [peer("worker-2", alive=False)], False),
        ([member(ME), member("worker-2")], [peer("worker-2", up=False)], False),
        # What will never fit.
        ([member(ME), member("worker-2")], [peer("worker-2", base_models=("another",))], True),
    ],
)
def test_an_adapter_is_heirless_when_no_other_worker_could_ever_take_it(
    members: list[Member], peers: list[Peer], expected: bool
) -> None:
    assert (A.key in heirless([A], roster(peers, members))) is expected


def test_labels_decide_who_could_take_it() -> None:
    picky = adapter("a", selector=Selector(labels={"gpu": "h100"}))
    others = [peer("worker-1", labels={"gpu": "a100"})]
    assert heirless([picky, adapter("b")], roster(others, KUBERNETES[:2])) == {picky.key}


def test_standalone_an_address_without_a_record_may_be_an_heir() -> None:
    assert heirless([A], roster([], [])) == {A.key}
    assert not heirless([A], roster([], [], unheard=1))
