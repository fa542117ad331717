"""What is believed about peers: tables of answers and times, without any network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.edges.peerbook import NotBelieved, PeerBook
from sidecar.model import Entry, Head, Member, Record, State

WINDOW = 3.0


def record(
    name: str, uid: str = "", *, pool: str = "p", generation: int = 1, version: int = 1, text: str = ""
) -> Record:
    entries = (Entry(adapter="ns/a", state=State.LOADED, message=text),) if text else ()
    head = Head(uid=uid or f"uid-{name}", name=name, pool=pool, generation=generation, address=f"{name}:1")
    return Record(head=head, version=version, entries=entries)


def at(address: str) -> Member:
    return Member(name=address, address=address)


def pod(name: str, address: str) -> Member:
    return Member(name=name, address=address, uid=f"uid-{name}")


def book(*members: Member, keep: float = 600.0) -> PeerBook:
    made = PeerBook(pool="p", uid="uid-me", window=WINDOW, keep=keep)
    made.set_members(members, WINDOW, 0.0)
    return made


def seen(peers: PeerBook, now: float) -> dict[str, bool]:
    return {name: observed.alive for name, observed in peers.view(now).items()}


def test_an_answer_makes_a_peer_alive_for_a_window() -> None:
    peers = book(at("w:1"))
    assert peers.hear(at("w:1"), record("w"), 0.9, 1.0)
    assert peers.view(1.0)["w"].heard == 1.0
    assert seen(peers, 3.999) == {"w": True}
    assert seen(peers, 4.0) == {"w": False}
    assert peers.view(4.0)["w"].record == record("w")


def test_an_unchanged_answer_keeps_it_alive_and_moves_heard() -> None:
    peers = book(at("w:1"))
    peers.hear(at("w:1"), record("w"), 0.9, 1.0)
    assert peers.view(1.0)["w"].heard == 1.0
    peers.hear_again("uid-w", 3.0)
    assert peers.view(3.0)["w"].heard == 3.0
    assert seen(peers, 5.9) == {"w": True}
    assert seen(peers, 6.0) == {"w": False}


def test_a_view_once_taken_stays_as_it_was() -> None:
    peers = book(at("w:1"))
    peers.hear(at("w:1"), record("w"), 0.9, 1.0)
    before = peers.view(1.0)
    peers.hear_again("uid-w", 2.0)
    assert before["w"].heard == 1.0


def test_changed_tells_of_content_and_liveness_alone() -> None:
    peers = book(at("w:1"))
    assert not peers.changed(0.0)
    peers.hear(at("w:1"), record("w"), 0.9, 1.0)
    assert peers.changed(1.0)
    peers.hear_again("uid-w", 1.4)
    assert not peers.changed(1.4)
    peers.hear(at("w:1"), record("w"), 1.7, 1.8)
    assert not peers.changed(1.8)
    peers.hear(at("w:1"), record("w", version=2, text="new"), 1.9, 2.0)
    assert peers.view(2.0)["w"].record.version == 2
    assert peers.changed(2.0)
    for now in (3.0, 4.0, 4.9):
        assert not peers.changed(now)
    assert peers.changed(5.0)
    assert not peers.changed(5.5)
    peers.hear_again("uid-w", 6.0)
    assert peers.changed(6.0)


@pytest.mark.parametrize(
    ("member", "answer", "reason"),
    [
        (at("w:1"), record("w", pool="other"), "pool 'other', this agent to 'p'"),
        (pod("w", "w:1"), record("x"), r"is 'x' \(uid uid-x\), not 'w' \(uid uid-w\)"),
        (at("w:1"), Record(head=Head(uid="", name="w", pool="p")), "no uid"),
        (at("w:1"), Record(head=Head(uid="u", name="", pool="p")), "no name"),
    ],
)
def test_who_is_not_the_member_is_not_believed(member: Member, answer: Record, reason: str) -> None:
    peers = book(member)
    with pytest.raises(NotBelieved, match=reason):
        peers.hear(member, answer, 0.9, 1.0)
    assert seen(peers, 1.0) == {}


def test_the_own_answer_is_known_and_a_copy_of_this_agent_named() -> None:
    peers = book(at("me:1"))
    peers.set_own(record("me", generation=7))
    assert peers.is_own(record("me", generation=7))
    assert not peers.is_own(record("w"))
    with pytest.raises(NotBelieved, match=r"this agent's own identity.*delete state/"):
        peers.is_own(record("me", generation=8))


def test_two_agents_with_one_uid_are_named_and_the_view_doesn_t_flap() -> None:
    peers = book(at("a:1"), at("b:1"))
    peers.hear(at("a:1"), record("a", "u", generation=1), 0.9, 1.0)
    with pytest.raises(NotBelieved, match=r"identity .*of the agent at a:1"):
        peers.hear(at("b:1"), record("b", "u", generation=2), 1.0, 1.1)
    assert seen(peers, 1.1) == {"a": True}
    peers.hear(at("b:1"), record("b", "u", generation=2), 4.9, 5.0)
    assert seen(peers, 5.0) == {"b": True}


def test_one_agent_under_two_addresses_is_one() -> None:
    peers = book(at("localhost:1"), at("127.0.0.1:1"))
    peers.hear(at("localhost:1"), record("w"), 0.9, 1.0)
    peers.hear(at("127.0.0.1:1"), record("w"), 0.9, 1.1)
    assert seen(peers, 1.1) == {"w": True}
    assert peers.problems(1.1) == ()


def test_an_answer_that_was_overtaken_doesn_t_bring_old_content_back() -> None:
    peers = book(at("w:1"))
    peers.hear(at("w:1"), record("w", version=5, text="new"), 1.0, 1.1)
    assert not peers.hear(at("w:1"), record("w", version=4, text="old"), 0.5, 1.2)
    assert peers.view(1.2)["w"].record.version == 5


def test_an_agent_that_lost_its_memory_is_believed_again() -> None:
    """Asked after the last answer, a lower generation is what the process says now."""
    peers = book(at("w:1"))
    peers.hear(at("w:1"), record("w", generation=9), 1.0, 1.1)
    assert peers.hear(at("w:1"), record("w", generation=2), 2.0, 2.1)
    assert peers.view(2.1)["w"].record.head.generation == 2


def test_a_newcomer_at_an_address_ends_the_one_before_at_once() -> None:
    peers = book(at("host:1"))
    peers.hear(at("host:1"), record("host:1", "first", generation=1), 0.9, 1.0)
    assert peers.changed(1.0)
    peers.hear(at("host:1"), record("host:1", "second", generation=2), 1.9, 2.0)
    assert peers.view(2.0)["host:1"].record.head.uid == "second"
    assert peers.view(2.0)["host:1"].alive
    assert peers.problems(2.0) == ()


def test_a_listed_pod_that_is_listed_no_more_is_gone_at_once() -> None:
    peers = book(pod("a", "a:1"), pod("b", "b:1"))
    peers.hear(pod("a", "a:1"), record("a"), 0.9, 1.0)
    peers.hear(pod("b", "b:1"), record("b"), 0.9, 1.0)
    peers.set_members([pod("b", "b:1")], WINDOW, 1.5)
    assert seen(peers, 1.5) == {"b": True}
    assert peers.changed(1.5)


def test_a_listed_pod_that_is_silent_stays_in_view_as_dead() -> None:
    peers = book(pod("a", "a:1"), keep=10)
    peers.hear(pod("a", "a:1"), record("a"), 0.9, 1.0)
    assert seen(peers, 1e6) == {"a": False}


def test_without_a_platform_a_silent_peer_stays_ten_minutes_or_as_long_as_listed() -> None:
    peers = book(at("a:1"), at("b:1"))
    peers.hear(at("a:1"), record("a"), 0.9, 1.0)
    peers.hear(at("b:1"), record("b"), 0.9, 1.0)
    peers.set_members([at("b:1")], WINDOW, 1.5)
    assert seen(peers, 1.5) == {"a": True, "b": True}
    assert seen(peers, 600.9) == {"a": False, "b": False}
    assert seen(peers, 601.0) == {"b": False}


def test_one_whose_address_another_took_goes_after_ten_minutes_although_the_address_is_listed() -> None:
    peers = book(at("host:1"))
    peers.hear(at("host:1"), record("old", "first"), 0.9, 1.0)
    peers.hear(at("host:1"), record("new", "second"), 1.9, 2.0)
    assert seen(peers, 2.0) == {"old": False, "new": True}
    assert seen(peers, 601.0) == {"new": False}


def test_before_the_first_list_nothing_is_forgotten() -> None:
    peers = PeerBook(pool="p", uid="uid-me", window=WINDOW)
    peers.hear(pod("a", "a:1"), record("a"), 0.9, 1.0)
    assert seen(peers, 1e6) == {"a": False}


def test_of_two_live_agents_with_one_name_the_later_is_ignored_and_named() -> None:
    peers = book(at("x:1"), at("y:1"))
    peers.hear(at("y:1"), record("w", "u2", generation=20), 0.9, 1.0)
    peers.hear(at("x:1"), record("w", "u1", generation=10), 0.9, 1.5)
    assert peers.view(1.5)["w"].record.head.uid == "u1"
    (problem,) = peers.problems(1.5)
    assert problem.where == "worker w"
    assert "the later one, at y:1, holds no targets" in problem.message
    # The rightful one dies: the other has the name.
    peers.hear_again("u2", 4.0)
    assert peers.view(4.6)["w"].record.head.uid == "u2"
    assert peers.problems(4.6) == ()


def test_the_own_name_belongs_to_this_agent_when_it_is_older() -> None:
    peers = book(at("x:1"))
    peers.set_own(record("w", "uid-me", generation=5))
    peers.hear(at("x:1"), record("w", "u", generation=6), 0.9, 1.0)
    assert seen(peers, 1.0) == {}
    assert peers.namesake(1.0) is None
    assert "the later one, at x:1" in peers.problems(1.0)[0].message


def test_the_own_name_is_lost_to_an_older_live_agent() -> None:
    peers = book(at("x:1"))
    peers.set_own(record("w", "uid-me", generation=5))
    other = record("w", "u", generation=4)
    peers.hear(at("x:1"), other, 0.9, 1.0)
    assert peers.changed(1.0)
    assert peers.namesake(1.0) == other
    assert peers.view(1.0)["w"].record == other
    assert "(this agent), holds no targets" in peers.problems(1.0)[0].message
    assert not any([peers.changed(2.0), peers.changed(3.0)])
    assert peers.changed(4.0)
    assert peers.namesake(4.0) is None
    assert seen(peers, 4.0) == {}


def test_who_was_asleep_itself_accuses_nobody() -> None:
    peers = book(at("a:1"), at("b:1"))
    peers.hear(at("a:1"), record("a"), 0.9, 1.0)
    peers.changed(1.0)
    peers.hear(at("b:1"), record("b"), 3.4, 3.5)
    for now in (1.9, 2.8, 3.7, 4.4):
        peers.changed(now)
    assert seen(peers, 4.4) == {"a": False, "b": True}
    assert seen(peers, 60.0) == {"a": False, "b": True}
    peers.changed(60.0)
    assert not peers.changed(61.0)
    peers.changed(62.0)
    assert peers.changed(63.0)
    assert seen(peers, 63.0) == {"a": False, "b": False}


def test_a_longer_window_holds_at_once_and_a_shorter_from_the_next_answer_on() -> None:
    peers = book(at("a:1"))
    peers.hear(at("a:1"), record("a"), 0.9, 1.0)
    peers.set_members([at("a:1")], 15.0, 3.0)
    assert seen(peers, 15.9) == {"a": True}
    peers.set_members([at("a:1")], 3.0, 15.9)
    assert seen(peers, 15.9) == {"a": True}


def test_with_a_shorter_window_the_next_answer_s_deadline_is_kept() -> None:
    peers = book(at("a:1"))
    peers.set_members([at("a:1")], 15.0, 0.0)
    peers.hear(at("a:1"), record("a"), 0.9, 1.0)
    peers.set_members([at("a:1")], 3.0, 10.0)
    assert seen(peers, 10.0) == {"a": True}
    peers.hear_again("uid-a", 12.0)
    assert seen(peers, 14.9) == {"a": True}
    assert seen(peers, 15.0) == {"a": False}


def test_a_window_that_grows_doesn_t_wake_the_dead() -> None:
    peers = book(at("a:1"))
    peers.hear(at("a:1"), record("a"), 0.9, 1.0)
    assert seen(peers, 5.0) == {"a": False}
    peers.set_members([at("a:1")], 15.0, 5.0)
    assert seen(peers, 5.0) == {"a": False}


@given(st.dictionaries(st.sampled_from("uvwxyz"), st.tuples(st.sampled_from("abc"), st.integers(1, 3))))
def test_all_agents_see_the_same_names_whoever_they_ask_first(drawn: dict[str, tuple[str, int]]) -> None:
    by_uid = {uid: record(name, uid, generation=generation) for uid, (name, generation) in drawn.items()}
    views = []
    for uids in (sorted(by_uid), sorted(by_uid, reverse=True)):
        peers = book(*(at(f"{uid}:1") for uid in uids))
        for uid in uids:
            peers.hear(at(f"{uid}:1"), by_uid[uid], 0.9, 1.0)
        views.append({name: observed.record for name, observed in peers.view(1.0).items()})
    assert views[0] == views[1]
    for name, shown in views[0].items():
        rivals = [r.head for r in by_uid.values() if r.head.name == name]
        assert shown.head == min(rivals, key=lambda head: (head.generation, head.uid))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 2.0), st.integers(1, 3)), max_size=20))
def test_no_flip_is_missed_by_who_wakes_at_until_and_at_answers(steps: list[tuple[str, float, int]]) -> None:
    peers = book(*(at(f"{name}:1") for name in "abc"))
    now = 0.0
    last: dict[str, tuple[int, float]] = {}
    told: dict[str, tuple[int, bool]] = {}
    for name, pause, version in steps:
        end = now + pause
        while now < end:
            now = min(end, now + 0.5, peers.until if peers.until > now else end)
            changed = peers.changed(now)
            expected = {peer: (number, now < heard + WINDOW) for peer, (number, heard) in last.items()}
            assert {peer: (o.record.version, o.alive) for peer, o in peers.view(now).items()} == expected
            assert changed == (expected != told)
            told = expected
        peers.hear(at(f"{name}:1"), record(name, version=version), now, now)
        last[name] = (version, now)
        peers.changed(now)
        told = {peer: (number, now < heard + WINDOW) for peer, (number, heard) in last.items()}
