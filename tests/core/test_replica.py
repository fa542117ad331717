"""Copies of records: deltas in any order, cut anywhere, lost or doubled, lead to the owner's record and never back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.messages import (
    MAX_REMOVED,
    Delta,
    EntryItem,
    HeadItem,
    RemovedItem,
    Standing,
    decode_answer,
    decode_message,
    decode_request,
    encode,
)
from sidecar.core.replica import MAX_ITEM, Applied, Replica
from sidecar.model import Entry, Head, Record, State, Suspicion

DECODE = msgspec.msgpack.Decoder(Delta).decode
UID = "uid-of-worker"

heads = st.builds(Head, uid=st.just(UID), name=st.just("worker"), capacity=st.integers(0, 9), cordoned=st.booleans())
entries = st.builds(
    Entry,
    adapter=st.sampled_from([f"ns/{letter}" for letter in "abcdefgh"]),
    state=st.sampled_from(State),
    message=st.text(max_size=20) | st.text(min_size=400, max_size=500),
    avoid=st.booleans(),
)
suspicions = st.lists(
    st.builds(Suspicion, revision=st.just("sha256:0"), kind=st.just("death"), at=st.floats(0, 9)), max_size=2
).map(tuple)
records = st.builds(
    Record,
    head=heads,
    entries=st.lists(entries, max_size=8, unique_by=lambda entry: entry.adapter).map(tuple),
    suspicions=suspicions,
)


def owner() -> Replica:
    return Replica(UID, 7)


def same(one: Replica, other: Replica) -> bool:
    return one.record() == other.record() and (one.generation, one.version) == (other.generation, other.version)


@settings(max_examples=40)
@given(st.lists(records, min_size=1, max_size=6))
def test_what_is_written_is_what_is_read(written: list[Record]) -> None:
    replica = owner()
    for record in written:
        before = (replica.version, replica.record())
        news = replica.write(record)
        found = replica.record()
        assert found is not None
        assert found.head == msgspec.structs.replace(record.head, generation=7)
        assert {entry.adapter: entry for entry in found.entries} == {entry.adapter: entry for entry in record.entries}
        assert found.suspicions == record.suspicions
        assert news == ((replica.version, found) != before)
        assert not replica.write(record), "the same again is no news"


@settings(max_examples=40)
@given(st.lists(records, min_size=1, max_size=6), st.data())
def test_any_deltas_in_any_order_never_lead_back_and_in_the_end_to_the_truth(
    written: list[Record], data: st.DataObject
) -> None:
    source, copy = owner(), Replica(UID, 7)
    deltas: list[Delta] = []
    for record in written:
        source.write(record)
        for _ in range(3):
            base = data.draw(st.integers(0, source.version))
            room = data.draw(st.integers(0, 1100))
            packed = source.pack(base, room)
            if packed is not None:
                assert len(bytes(packed[1])) <= room
                deltas.append(DECODE(packed[1]))
    for delta in data.draw(st.permutations(deltas + deltas)):
        before = (copy.generation, copy.version)
        applied = copy.apply(delta)
        assert (copy.generation, copy.version) >= before
        assert applied is not Applied.BROKEN
        assert (applied is Applied.CHANGED) == ((copy.generation, copy.version) > before)
    copy.apply(source.delta(copy.version))
    assert same(copy, source)


@settings(max_examples=40)
@given(st.lists(records, min_size=2, max_size=6), st.integers(0, 5))
def test_copies_of_copies_are_equal(written: list[Record], at: int) -> None:
    source, relay, end = owner(), Replica(UID, 7), Replica(UID, 7)
    for n, record in enumerate(written):
        source.write(record)
        relay.apply(source.delta(relay.version))
        if n >= at:
            end.apply(relay.delta(end.version))
    end.apply(relay.delta(end.version))
    assert same(relay, source)
    assert same(end, source)


def test_a_piece_that_was_missed_is_a_gap_and_a_later_process_is_only_taken_whole() -> None:
    source, copy = owner(), Replica(UID, 7)
    head = Head(uid=UID, name="worker")
    for n in range(5):
        source.write(Record(head=head, entries=tuple(Entry(adapter=f"ns/{i}", state=State.PENDING) for i in range(n))))
    assert copy.apply(source.delta(3)) is Applied.GAP
    assert copy.apply(source.delta(0)) is Applied.CHANGED
    again = Replica(UID, 8)
    again.write(Record(head=head))
    again.write(Record(head=head, entries=(Entry(adapter="ns/a", state=State.LOADED),)))
    assert copy.apply(again.delta(1)) is Applied.GAP
    assert copy.apply(again.delta(0)) is Applied.CHANGED
    assert same(copy, again)
    assert copy.apply(source.delta(0)) is Applied.OLD


def test_a_process_that_rises_above_itself_is_taken_whole() -> None:
    source, copy = owner(), Replica(UID, 7)
    source.write(Record(head=Head(uid=UID, name="worker"), entries=(Entry(adapter="ns/a", state=State.LOADED),)))
    copy.apply(source.delta(0))
    source.reborn(9)
    assert copy.apply(source.delta(copy.version)) is Applied.GAP
    assert copy.apply(source.delta(0)) is Applied.CHANGED
    assert same(copy, source)
    assert copy.head is not None
    assert copy.head.generation == 9


def test_a_piece_ends_before_an_item_too_large_for_any_datagram_and_tells_of_it() -> None:
    source = owner()
    head = Head(uid=UID, name="worker")
    small, large = Entry(adapter="ns/a", state=State.LOADED), Entry(adapter="ns/" + "b" * 230, state=State.FAILED)
    large = msgspec.structs.replace(large, message="m" * 500)
    assert len(encode(large)) > MAX_ITEM
    source.write(Record(head=head))
    base = source.version
    source.write(Record(head=head, entries=(small,)))
    source.write(Record(head=head, entries=(small, large)))
    reached, packed = source.pack(base, 1000) or (0, msgspec.Raw())
    delta = DECODE(packed)
    assert (reached, delta.version, delta.latest) == (2, 2, 3)
    reached, packed = source.pack(2, 1000) or (0, msgspec.Raw())
    delta = DECODE(packed)
    assert (reached, delta.version, delta.latest, delta.items) == (2, 0, 3, ())


def test_what_was_removed_long_ago_needs_the_whole() -> None:
    source = owner()
    head = Head(uid=UID, name="worker")
    source.write(Record(head=head))
    base = source.version
    for n in range(2 * MAX_REMOVED):
        source.write(Record(head=head, entries=(Entry(adapter=f"ns/{n}", state=State.PENDING),)))
    assert source.delta(base).base == 0
    assert source.delta(source.version - 10).base == source.version - 10
    assert len(source.items) <= MAX_REMOVED + 2


def entry_item(stamp: int) -> EntryItem:
    return EntryItem(stamp, Entry(adapter=f"ns/{stamp}", state=State.LOADED))


@pytest.mark.parametrize(
    "delta",
    [
        Delta(UID, 7, 2, 5, 5, (entry_item(4), entry_item(3))),
        Delta(UID, 7, 2, 5, 5, (entry_item(6),)),
        Delta(UID, 7, 2, 5, 4, (entry_item(4),)),
        Delta(UID, 7, 1, 5, 5, (entry_item(1),)),
        Delta(UID, 7, 0, 5, 5, (entry_item(1),)),
        Delta(UID, 7, 0, 5, 5, (HeadItem(1, Head(uid="another", name="worker")),)),
        Delta(UID, 8, 0, 5, 5, (HeadItem(6, Head(uid=UID, name="worker")),)),
        Delta(UID, 7, 0, 5, 5, (RemovedItem(1, "\0head"),)),
    ],
)
def test_a_delta_that_breaks_the_rules_changes_nothing(delta: Delta) -> None:
    copy = owner()
    copy.write(Record(head=Head(uid=UID, name="worker"), entries=(Entry(adapter="ns/a", state=State.LOADED),)))
    before = copy.record()
    assert copy.apply(delta) is Applied.BROKEN
    assert copy.record() is before


@given(st.binary(max_size=1200))
def test_random_bytes_decode_to_nothing_and_never_raise(data: bytes) -> None:
    for decode in (decode_message, decode_request, decode_answer):
        decode(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    )
)
def test_any_messagepack_decodes_to_a_bounded_message_or_nothing(value: object) -> None:
    data = msgspec.msgpack.encode(value)
    message = decode_message(data)
    assert message is None or all(claim.standing in Standing for claim in message.claims)
    decode_request(data)
    decode_answer(data)
