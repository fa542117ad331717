"""The authenticated frame: what is let in, and that nothing else ever gets in or raises."""

from __future__ import annotations

import base64
import hmac
import itertools
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.core.keyring import INSECURE, Keyring, make_key, parse_keys
from sidecar.core.wire import (
    CLOCK_WINDOW,
    MAX_DATAGRAM,
    REPLAY_WINDOW,
    UNCOVERED,
    Drop,
    Dropped,
    Gate,
    HttpAnswer,
    HttpRequest,
    Kind,
    Opened,
    Party,
    body_hash,
)

NOW = 1_760_000_000.0
OLD, NEW, OTHER = (make_key(f"{name} key of the test pool") for name in ("old", "new", "other"))
A, B = Party("uid-a", 7), Party("uid-b", 9)


def gate(me: Party, keys: tuple = (OLD,), pool: str = "pool", first_nonce: int = 1000) -> Gate:
    return Gate(me, pool, Keyring(keys), first_nonce)


def reason(found: Opened | Dropped) -> Drop | None:
    return found.reason if isinstance(found, Dropped) else None


@given(st.binary(max_size=900), st.sampled_from([Kind.PING, Kind.ACK, Kind.GOSSIP]))
def test_what_is_sealed_opens_at_its_addressee_and_says_who_sent_it(body: bytes, kind: Kind) -> None:
    data = gate(A).seal(kind, B, body, NOW)
    assert gate(B).open(data, NOW + 1) == Opened(kind, A, 1001, NOW, body)


@given(st.text(min_size=1, max_size=64), st.text(min_size=1, max_size=64), st.integers(0, 2**53))
def test_a_body_as_large_as_the_room_fits_the_datagram(sender: str, to: str, generation: int) -> None:
    sending = Gate(Party(sender, generation), "pool", INSECURE, 2**61)
    body = bytes(sending.room(to))
    assert MAX_DATAGRAM - 16 <= len(sending.seal(Kind.PING, Party(to, 2**53), body, NOW)) <= MAX_DATAGRAM


def test_oversized_datagrams_are_dropped_unread() -> None:
    data = gate(A).seal(Kind.PING, B, bytes(MAX_DATAGRAM), NOW)
    assert reason(gate(B).open(data, NOW)) is Drop.OVERSIZED


@pytest.mark.parametrize(
    ("sender", "receiver", "wall", "expected"),
    [
        (gate(A, (OTHER,)), gate(B), NOW, Drop.STRANGER),
        (gate(A, pool="other pool"), gate(B), NOW, Drop.WRONG_POOL),
        (gate(A), gate(Party("uid-c", 9)), NOW, Drop.WRONG_ADDRESSEE),
        (gate(A), gate(Party("uid-b", 10)), NOW, Drop.WRONG_ADDRESSEE),
        (gate(Party("uid-b", 7)), gate(B), NOW, Drop.SELF),
        (gate(A), gate(B), NOW + CLOCK_WINDOW + 1, Drop.CLOCK),
        (gate(A), gate(B), NOW - CLOCK_WINDOW - 1, Drop.CLOCK),
        (gate(A), gate(B), float("nan"), Drop.CLOCK),
        (gate(A), gate(B), NOW + CLOCK_WINDOW - 1, None),
        (gate(A), gate(B), NOW - CLOCK_WINDOW + 1, None),
    ],
)
def test_who_is_let_in(sender: Gate, receiver: Gate, wall: float, expected: Drop | None) -> None:
    assert reason(receiver.open(sender.seal(Kind.PING, B, b"x", NOW), wall)) is expected
    assert sum(receiver.dropped.values()) == (expected is not None)


def test_a_peer_with_a_wrong_clock_is_named_with_its_skew() -> None:
    found = gate(B).open(gate(A).seal(Kind.PING, B, b"", NOW + 1000), NOW)
    assert found == Dropped(Drop.CLOCK, A, 1000.0)


@given(st.data())
def test_one_changed_bit_is_never_let_in(data: st.DataObject) -> None:
    sealed = bytearray(gate(A).seal(Kind.PING, B, b"some body", NOW))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= 1 << data.draw(st.integers(0, 7))
    found = gate(B).open(bytes(sealed), NOW)
    assert isinstance(found, Dropped)
    assert found.sender is None


@given(st.integers(0, 200))
def test_a_cut_datagram_is_truncated(size: int) -> None:
    sealed = gate(A).seal(Kind.PING, B, bytes(150), NOW)
    assert reason(gate(B).open(sealed[:size], NOW)) is (Drop.TRUNCATED if size else Drop.STRANGER)


def test_bytes_behind_the_end_are_an_alteration() -> None:
    assert reason(gate(B).open(gate(A).seal(Kind.PING, B, b"", NOW) + b"\0", NOW)) is Drop.ALTERED


@given(st.binary(max_size=1300))
@example(b"LG\x01\x01")
@example(b"LG\x02" + bytes(100))
@example(b"LG\x01\x01" + INSECURE.keys[0].id + b"\0\0" + bytes(16))
def test_random_bytes_are_dropped_and_counted(data: bytes) -> None:
    receiver = Gate(B, "pool", INSECURE, 0)
    assert isinstance(receiver.open(data, NOW), Dropped)
    assert receiver.dropped.total() == 1


@given(st.binary(max_size=900))
@example(b"\x91" * 900)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x98\xc4\x08poolpool\xa1\xff\x01\xa1b\x01\x01\x01\xc4\x00")
def test_an_authentic_frame_around_anything_at_all_never_raises(envelope: bytes) -> None:
    """Only holders of a key can make these; they may run another version, or be broken."""
    key = OLD
    head = struct.pack(">2sBB4sH", b"LG", 1, 1, key.id, len(envelope))
    mac = hmac.digest(key.secret, head + envelope, "sha256")[:16]
    assert reason(gate(B).open(head + mac + envelope, NOW)) is Drop.MALFORMED


def test_a_replay_is_dropped_even_much_later_and_in_another_order() -> None:
    sender, receiver = gate(A), gate(B)
    sent = [sender.seal(Kind.PING, B, b"", NOW) for _ in range(REPLAY_WINDOW)]
    for data in reversed(sent):
        assert isinstance(receiver.open(data, NOW), Opened)
    assert [reason(receiver.open(data, NOW)) for data in sent] == [Drop.REPLAY] * REPLAY_WINDOW
    assert isinstance(receiver.open(sender.seal(Kind.PING, B, b"", NOW), NOW), Opened)
    assert reason(receiver.open(sent[0], NOW)) is Drop.REPLAY


@given(st.lists(st.integers(1, 3 * REPLAY_WINDOW), min_size=1, max_size=60))
def test_no_nonce_is_taken_twice_and_every_new_highest_is_taken(order: list[int]) -> None:
    receiver = gate(B)
    taken: set[int] = set()
    for nonce in order:
        fresh = isinstance(receiver.open(gate(A, first_nonce=nonce - 1).seal(Kind.PING, B, b"", NOW), NOW), Opened)
        within = nonce > max(taken, default=0) - REPLAY_WINDOW
        assert fresh == (nonce not in taken and within)
        if fresh:
            taken.add(nonce)


def test_a_restarted_sender_begins_anew_and_its_old_messages_are_stale() -> None:
    receiver = gate(B)
    before = gate(A, first_nonce=5000).seal(Kind.PING, B, b"", NOW)
    later = gate(A, first_nonce=6000).seal(Kind.PING, B, b"", NOW)
    assert isinstance(receiver.open(before, NOW), Opened)
    assert isinstance(receiver.open(gate(Party("uid-a", 8), first_nonce=1).seal(Kind.PING, B, b"", NOW), NOW), Opened)
    assert reason(receiver.open(later, NOW)) is Drop.STALE


def test_keys_rotate_without_a_gap() -> None:
    """Add the new key everywhere, sign with it, take the old one away: in any order within a step."""
    steps = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    for before, after in itertools.pairwise(steps):
        for ours, theirs in [(before, after), (after, before), (after, after)]:
            assert isinstance(gate(B, theirs).open(gate(A, ours).seal(Kind.PING, B, b"", NOW), NOW), Opened)
    assert reason(gate(B, (NEW,)).open(gate(A, (OLD,)).seal(Kind.PING, B, b"", NOW), NOW)) is Drop.STRANGER


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no key"),
        ("# only a comment\n\n", "no key"),
        ("0123456789abcdef\nshort\n", "line 2 has 5 characters"),
        ("\n".join(f"key number {n:10}" for n in range(17)), "17 keys"),
    ],
)
def test_key_files_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_keys(text)


def test_a_key_file_is_read_by_lines_and_never_shown() -> None:
    keys = parse_keys("# first signs\n  old key of the test pool  \r\n\nnew key of the test pool")
    assert keys == Keyring((OLD, NEW))
    assert "old key" not in repr(keys)
    assert OLD.secret.hex() not in repr(keys)


@pytest.mark.parametrize("uid", ["", "u" * 65])
def test_a_uid_that_does_not_fit_the_wire_is_refused(uid: str) -> None:
    with pytest.raises(ValueError, match="1 to 64 characters"):
        Gate(Party(uid), "pool", INSECURE, 0)


REQUEST = HttpRequest(method="POST", path="/peer/sync", query="a=1", range="bytes=0-9")
ANSWER = HttpAnswer(status=206, fields=("bytes 0-9/10",))


@pytest.mark.parametrize("to", [Party("uid-b", 9), Party("uid-b"), Party("")])
def test_a_request_and_its_answer(to: Party) -> None:
    client, server = gate(A), gate(B)
    header, nonce = client.sign_request(to, REQUEST, b"question", NOW)
    opened = server.check_request(header, REQUEST, NOW)
    assert opened == Opened(Kind.REQUEST, A, nonce, NOW, body_hash(b"question"))
    assert server.proved(opened, b"question")
    header = server.sign_answer(opened, ANSWER, body_hash(b"answer"), NOW)
    answered = client.check_answer(header, nonce, ANSWER, NOW)
    assert answered == Opened(Kind.ANSWER, B, nonce, NOW, body_hash(b"answer"))
    assert client.proved(answered, b"answer")
    assert client.dropped.total() == server.dropped.total() == 0


def test_a_request_counts_once() -> None:
    server = gate(B)
    header, _ = gate(A).sign_request(B, REQUEST, b"", NOW)
    assert isinstance(server.check_request(header, REQUEST, NOW), Opened)
    assert reason(server.check_request(header, REQUEST, NOW)) is Drop.REPLAY


def test_a_request_to_another_agent_or_another_process_is_dropped() -> None:
    for to in (Party("uid-c"), Party("uid-b", 8)):
        header, _ = gate(A).sign_request(to, REQUEST, b"", NOW)
        assert reason(gate(B).check_request(header, REQUEST, NOW)) is Drop.WRONG_ADDRESSEE


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "GET"},
        {"path": "/peer/other"},
        {"query": "a=2"},
        {"range": "bytes=0-8"},
        {"range": ""},
        {"path": "/peer/synca=1", "query": ""},
    ],
)
def test_a_changed_request_is_altered(changed: dict) -> None:
    fields = {name: getattr(REQUEST, name) for name in ("method", "path", "query", "range")}
    header, _ = gate(A).sign_request(B, REQUEST, b"", NOW)
    assert reason(gate(B).check_request(header, HttpRequest(**(fields | changed)), NOW)) is Drop.ALTERED


@pytest.mark.parametrize(
    "changed",
    [
        HttpAnswer(status=200, fields=("bytes 0-9/10",)),
        HttpAnswer(status=206, fields=("bytes 0-9/11",)),
        HttpAnswer(status=206, fields=("bytes 0-9/", "10")),
        HttpAnswer(status=206),
    ],
)
def test_a_changed_answer_is_altered(changed: HttpAnswer) -> None:
    client, server = gate(A), gate(B)
    header, nonce = client.sign_request(B, REQUEST, b"", NOW)
    opened = server.check_request(header, REQUEST, NOW)
    assert isinstance(opened, Opened)
    signed = server.sign_answer(opened, ANSWER, UNCOVERED, NOW)
    assert reason(client.check_answer(signed, nonce, changed, NOW)) is Drop.ALTERED


@pytest.mark.parametrize(
    ("signed", "body"), [(body_hash(b"body"), b"bodY"), (body_hash(b"body"), b""), (UNCOVERED, b"")]
)
def test_a_body_that_was_not_signed_is_altered(signed: bytes, body: bytes) -> None:
    receiver = gate(B)
    assert not receiver.proved(Opened(Kind.REQUEST, A, 1, NOW, signed), body)
    assert receiver.dropped[Drop.ALTERED] == 1


def test_an_answer_counts_for_its_request_alone() -> None:
    client, server = gate(A), gate(B)
    first, nonce = client.sign_request(B, REQUEST, b"", NOW)
    second, other = client.sign_request(B, REQUEST, b"", NOW)
    opened = server.check_request(first, REQUEST, NOW)
    assert isinstance(opened, Opened)
    answer = server.sign_answer(opened, ANSWER, UNCOVERED, NOW)
    assert reason(client.check_answer(answer, other, ANSWER, NOW)) is Drop.REPLAY
    assert isinstance(client.check_answer(answer, nonce, ANSWER, NOW), Opened)
    assert reason(client.check_answer(second, other, ANSWER, NOW)) is Drop.ALTERED, "a request is no answer"


@given(st.text(max_size=1200))
@example("é")
@example("TEcBEA==")
def test_any_header_at_all_is_dropped(header: str) -> None:
    server = gate(B)
    assert isinstance(server.check_request(header, REQUEST, NOW), Dropped)
    assert isinstance(server.check_answer(header, 1, ANSWER, NOW), Dropped)


def test_a_datagram_is_no_request_and_a_request_no_datagram() -> None:
    client, server = gate(A), gate(B)
    datagram = client.seal(Kind.PING, B, b"", NOW)
    as_header = base64.urlsafe_b64encode(datagram).decode()
    assert isinstance(server.check_request(as_header, HttpRequest(method="GET", path="/"), NOW), Dropped)
    header, _ = client.sign_request(B, REQUEST, b"", NOW)
    assert isinstance(server.open(base64.urlsafe_b64decode(header), NOW), Dropped)


def test_what_is_remembered_of_senders_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.core.wire.MAX_SENDERS", 3)
    receiver = gate(B)
    for n in range(10):
        assert isinstance(receiver.open(gate(Party(f"uid-{n}x", 1)).seal(Kind.PING, B, b"", NOW), NOW), Opened)
    assert len(receiver._windows) == 3
