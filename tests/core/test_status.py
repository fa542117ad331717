"""The aggregated status of an adapter: what it says, when it counts as changed, what of it is an Event."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.memory import spoken
from sidecar.core.placement import Assignment
from sidecar.core.pool import Worker
from sidecar.core.status import (
    AdapterStatus,
    Condition,
    Pool,
    Transition,
    aggregate,
    digest,
    digest_of,
    happenings,
    timed,
)
from sidecar.core.writers import Writers
from sidecar.model import Adapter, Distribution, Entry, Source, State

REVISION = "sha256:" + "a" * 64
OLD = "sha256:" + "b" * 64
ADAPTER = Adapter(
    namespace="ns", name="a", base_model="llama", served_name="a", source=Source(uri="file:///a"), generation=3
)


def entry(state: State = State.LOADED, revision: str = REVISION, message: str = "") -> Entry:
    return Entry(adapter="ns/a", state=state, revision=revision, served_name="a", message=message)


def assigned(*targets: str, members: int = 3, wanted: int | None = None, waiting: tuple[str, ...] = ()) -> Assignment:
    number = len(targets) if wanted is None else wanted
    return Assignment(
        adapter="ns/a", members=members, wanted=number, targets=targets, waiting=waiting, short=number - len(targets)
    )


def status(assignment: Assignment | None, rejected: str = "", **entries: Entry) -> AdapterStatus:
    named = {name.replace("_", "-"): e for name, e in entries.items()}
    return aggregate(ADAPTER, assignment, REVISION, Pool(entries=named, base_models=("llama",)), rejected)


def condition(found: AdapterStatus, kind: str) -> Condition:
    return next(c for c in found.conditions if c.type == kind)


def test_loaded_on_all_targets_is_ready() -> None:
    found = status(assigned("w-1", "w-0"), w_0=entry(), w_1=entry())
    assert (found.targets, found.loaded, found.failed, found.summary) == (2, 2, 0, "2/2")
    assert found.observed_generation == 3
    assert found.revision == REVISION
    assert (condition(found, "Ready").status, condition(found, "Placed").status) == ("True", "True")
    assert [w.name for w in found.workers] == ["w-1", "w-0"]


def test_an_old_revision_is_not_loaded_and_others_than_targets_do_not_count() -> None:
    found = status(assigned("w-0"), w_0=entry(revision=OLD), w_1=entry())
    assert (found.targets, found.loaded) == (1, 0)
    assert condition(found, "Ready").reason == "Progressing"
    assert [w.name for w in found.workers] == ["w-0", "w-1"]


def test_a_failure_is_named_with_its_worker() -> None:
    found = status(assigned("w-0", "w-1"), w_0=entry(), w_1=entry(State.REJECTED, message="rank 64 is over 16"))
    assert found.failed == 1
    ready = condition(found, "Ready")
    assert (ready.status, ready.reason, ready.message) == ("False", "Rejected", "w-1: rank 64 is over 16")


def test_nobody_serves_the_base_model() -> None:
    typo = msgspec.structs.replace(ADAPTER, base_model="lama")
    found = aggregate(typo, None, None, Pool(entries={}, base_models=("llama", "llama-alias")))
    placed = condition(found, "Placed")
    assert (placed.status, placed.reason) == ("False", "NoCandidates")
    assert "base models seen: llama, llama-alias" in placed.message
    assert condition(found, "Ready").reason == "NoCandidates"
    assert found.summary == "0/0"


def test_none_wanted_is_placed_and_not_ready() -> None:
    none = msgspec.structs.replace(ADAPTER, distribution=Distribution(strategy="fixed", replicas=0))
    found = aggregate(none, assigned(), REVISION, Pool(entries={}, base_models=("llama",)))
    assert (condition(found, "Placed").status, condition(found, "Placed").reason) == ("True", "NoneWanted")
    assert condition(found, "Ready").status == "False"


def test_no_room_no_engine_and_a_conflict_are_told_apart() -> None:
    assert condition(status(assigned(wanted=1, waiting=("w-0",))), "Placed").reason == "NoRoom"
    assert condition(status(assigned(wanted=1)), "Placed").reason == "NoneUp"
    assert condition(status(None, rejected="the name belongs to ns/b"), "Placed").reason == "NameConflict"


def test_at_most_fifty_workers_are_listed() -> None:
    names = [f"w-{i}" for i in range(80)]
    found = aggregate(ADAPTER, assigned(*names, members=80), REVISION, Pool(entries={n: entry() for n in names}))
    assert (found.targets, found.loaded, len(found.workers)) == (80, 80, 50)


def test_it_is_written_by_the_names_of_the_schema() -> None:
    found = timed(status(assigned("w-0"), w_0=entry()), {}, 0.0)
    document = json.loads(msgspec.json.encode(found))
    assert document["observedGeneration"] == 3
    assert document["conditions"][0] == {
        "type": "Placed",
        "status": "True",
        "reason": "Placed",
        "message": "on w-0",
        "observedGeneration": 3,
        "lastTransitionTime": "1970-01-01T00:00:00Z",
    }
    assert document["workers"] == [{"name": "w-0", "state": "Loaded", "revision": REVISION}]


def test_a_time_moves_only_when_the_condition_does() -> None:
    before = {
        "Placed": Transition("True", "2026-01-01T00:00:00Z"),
        "Ready": Transition("False", "2026-01-02T00:00:00Z"),
    }
    found = timed(status(assigned("w-0"), w_0=entry()), before, 1_800_000_000.0)
    assert condition(found, "Placed").last_transition_time == "2026-01-01T00:00:00Z"
    assert condition(found, "Ready").last_transition_time == "2027-01-15T08:00:00Z"


def test_content_is_the_same_whatever_the_times_and_the_order() -> None:
    found = status(assigned("w-0", "w-1"), w_0=entry(), w_1=entry())
    shown = json.loads(msgspec.json.encode(timed(found, {}, 5.0)))
    shown["conditions"].reverse()
    shown["workers"].reverse()
    assert digest_of(msgspec.Raw(json.dumps(shown).encode())) == digest(found)
    shown["loaded"] = 1
    assert digest_of(msgspec.Raw(json.dumps(shown).encode())) != digest(found)
    assert digest_of(msgspec.Raw(b"null")) == ""
    assert digest_of(msgspec.Raw(b'{"conditions": 1}')) == ""


def test_events_are_about_what_became_of_it() -> None:
    loading = status(assigned("w-0"), w_0=entry(State.LOADING))
    loaded = status(assigned("w-0"), w_0=entry())
    failed = status(assigned("w-0"), w_0=entry(State.FAILED, message="no such key"))
    moved = status(assigned("w-1"), w_1=entry())
    assert [h.reason for h in happenings(loading, loaded, False)] == ["Loaded"]
    assert happenings(loaded, loaded, True) == []
    assert [(h.reason, h.message, h.warning) for h in happenings(loading, failed, False)] == [
        ("Failed", "w-0: no such key", True)
    ]
    assert happenings(failed, failed, False) == []
    # When it is tried again is told elsewhere: the same failure would else be another Event each time.
    for now in (0.0, 1000.0):
        again = status(assigned("w-0"), w_0=entry(State.FAILED, message=spoken("no such key", now + 10, now)))
        assert happenings(loading, again, False) == happenings(loading, failed, False)
    assert [(h.reason, h.message) for h in happenings(loaded, moved, True)] == [("Moved", "from w-0; loaded on w-1")]
    assert happenings(None, loaded, True) == []


_names = st.lists(st.sampled_from([f"w-{i}" for i in range(8)]), unique=True)


@given(st.lists(st.tuples(_names, st.sampled_from(["", "w-0", "w-3"]), st.booleans()), min_size=1, max_size=6))
def test_the_writer_is_the_same_however_one_got_there(steps: list[tuple[list[str], str, bool]]) -> None:
    adapters = {f"ns/{i}": msgspec.structs.replace(ADAPTER, name=str(i)) for i in range(4)}
    walked = Writers()
    for names, ending, foreign in steps:
        workers = [
            Worker(name=n, terminating=n == ending, base_models=("other",) if foreign and n == "w-1" else ("llama",))
            for n in names
        ]
        walked.update(adapters, workers, frozenset(names))
        fresh = Writers()
        fresh.update(adapters, workers, frozenset(names))
        for key in adapters:
            assert walked.of(key) == fresh.of(key)
            assert (walked.of(key) in names) if names else walked.of(key) is None
            if len(names) > 1:
                assert walked.of(key) != ending or names == [ending] or set(names) - {ending} == set()


def test_who_serves_the_base_model_writes_before_who_does_not() -> None:
    adapters = {f"ns/{i}": msgspec.structs.replace(ADAPTER, name=str(i)) for i in range(20)}
    workers = [Worker(name="w-0", base_models=("other",)), Worker(name="w-1", base_models=("llama",))]
    writers = Writers()
    writers.update(adapters, workers, frozenset({"w-0", "w-1"}))
    assert {writers.of(key) for key in adapters} == {"w-1"}
    writers.update(adapters, workers, frozenset({"w-0"}))
    assert {writers.of(key) for key in adapters} == {"w-0"}
