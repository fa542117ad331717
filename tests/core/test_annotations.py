"""What a worker shows on its pod: the exact form, the sizes, and the patch."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.annotations import (
    LIMIT,
    SUMMARY,
    WORKER,
    adapter_key,
    difference,
    is_ours,
    news,
    routed_here,
    show,
)
from sidecar.core.world import Status
from sidecar.model import Entry, Head, Record, State

HEAD = Head(uid="u", name="w-0", engine_version="0.32.0", capacity=4, sidecar="0.1.0")
REVISION = "sha256:" + "0123456789abcdef" * 4


def entry(name: str, state: State = State.LOADED, message: str = "") -> Entry:
    return Entry(
        adapter=f"ns/{name}", state=state, revision=REVISION, served_name=f"Served/{name}", since=0.0, message=message
    )


def size(annotations: dict[str, str]) -> int:
    return sum(len(k.encode()) + len(v.encode()) for k, v in annotations.items())


def test_the_form_is_what_others_read() -> None:
    shown = show(HEAD, "llama", [entry("a"), entry("b", State.FAILED, "no such key")], ["ns/a"])
    assert shown.labels == {"adapter.lora-sidecar.io/a": "loaded"}
    assert json.loads(shown.annotations["lora-sidecar.io/worker"]) == {
        "baseModel": "llama",
        "engine": "vllm 0.32.0",
        "capacity": 4,
        "sidecar": "0.1.0",
    }
    assert shown.annotations["lora-sidecar.io/summary"] == "loaded=1 pending=0 failed=1"
    assert shown.annotations["adapter.lora-sidecar.io/b"] == (
        '{"state":"Failed","revision":"' + REVISION + '","servedName":"Served/b","since":"1970-01-01T00:00:00Z",'
        '"message":"no such key"}'
    )


def test_messages_are_cut_at_256_characters() -> None:
    shown = show(HEAD, "llama", [entry("a", State.FAILED, "ü" * 300)], [])
    assert json.loads(shown.annotations[adapter_key("a")])["message"] == "ü" * 256


def test_a_thousand_long_names_with_messages_fit_and_keep_every_label() -> None:
    names = [f"{i:04}" + "n" * 59 for i in range(1_000)]
    entries = [entry(n, State.LOADED, "m" * 256) for n in names]
    shown = show(HEAD, "llama", entries, [f"ns/{n}" for n in names])
    assert size(shown.annotations) < LIMIT
    assert len(shown.labels) == 1_000
    assert shown.annotations[SUMMARY] == "loaded=1000 pending=0 failed=0 truncated"
    assert len(shown.annotations) > 950


def test_messages_go_before_revisions() -> None:
    entries = [entry(f"a{i:03}", State.FAILED, "m" * 256) for i in range(400)]
    shown = show(HEAD, "llama", entries, [])
    told = [json.loads(v) for k, v in shown.annotations.items() if k.startswith("adapter.")]
    assert len(told) == 400
    assert {t["revision"] for t in told} == {REVISION}
    assert {len(t["message"]) for t in told} == {64}
    assert shown.annotations[SUMMARY].endswith(" truncated")


def test_then_entries_become_state_and_twelve_digits_then_waiting_ones_go() -> None:
    loaded = [entry(f"{i:03}" + "l" * 60) for i in range(700)]
    shown = show(HEAD, "llama", loaded, [])
    assert shown.annotations[adapter_key("000" + "l" * 60)] == '{"state":"Loaded","revision":"0123456789ab"}'
    waiting = [entry(f"{i:03}" + "w" * 60, State.WAITING) for i in range(700)]
    shown = show(HEAD, "llama", [*loaded, *waiting], [])
    assert sum(1 for v in shown.annotations.values() if "Waiting" in v) == 0
    assert sum(1 for v in shown.annotations.values() if "Loaded" in v) == 700
    assert shown.annotations[SUMMARY] == "loaded=700 pending=0 failed=0 waiting=700 truncated"


_entries = st.lists(
    st.builds(
        entry,
        st.text("abcdefghij-0123456789", min_size=1, max_size=63),
        st.sampled_from(State),
        st.text(max_size=512),
    ),
    max_size=40,
    unique_by=lambda e: e.adapter,
)


@given(_entries, st.integers(0, 60))
def test_always_under_the_limit_and_always_a_summary(entries: list[Entry], times: int) -> None:
    many = [
        Entry(adapter=f"{e.adapter}.{i}", state=e.state, revision=e.revision, served_name="s" * 512, message=e.message)
        for e in entries
        for i in range(times)
    ]
    routed = [e.adapter for e in many if e.state is State.LOADED]
    shown = show(HEAD, "llama", many, routed)
    assert size(shown.annotations) < LIMIT
    assert len(shown.labels) == len(routed)
    missing = len(many) + 2 - len(shown.annotations)
    assert missing == 0 or "truncated" in shown.annotations[SUMMARY]
    assert WORKER in shown.annotations


_keys = st.sampled_from(
    [
        *("adapter.lora-sidecar.io/a", "adapter.lora-sidecar.io/b", WORKER, SUMMARY),
        *("lora-sidecar.io/cordon", "lora-sidecar.io/pool", "app", "lora-sidecar.io/capacity"),
    ]
)
_pairs = st.dictionaries(_keys, st.sampled_from(["1", "2"]))


@given(_pairs, _pairs)
def test_a_patch_makes_ours_exact_and_touches_nothing_else(now: dict[str, str], wanted: dict[str, str]) -> None:
    wanted = {k: v for k, v in wanted.items() if is_ours(k)}
    patch = difference(now, wanted)
    after = {k: v for k, v in {**now, **patch}.items() if v is not None}
    assert {k: v for k, v in after.items() if is_ours(k)} == wanted
    assert {k: v for k, v in after.items() if not is_ours(k)} == {k: v for k, v in now.items() if not is_ours(k)}
    assert difference({k: v for k, v in after.items() if v}, wanted) == {}


def test_labels_follow_routing_and_stay_while_the_engine_is_unknown() -> None:
    statuses = {
        "ns/a": Status(state=State.LOADED, served_name="a", routed=True),
        "ns/b": Status(state=State.LOADING, served_name="b"),
    }
    shown = {adapter_key("b"): "loaded", "app": "x"}
    assert routed_here(statuses, True, shown) == {"a"}
    assert routed_here({}, False, shown) == {"b"}


LOADED = Entry(adapter="ns/a", state=State.LOADED, revision="sha256:1")


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ([], [Entry(adapter="ns/b", state=State.PENDING)], "passing"),
        ([LOADED], [LOADED, Entry(adapter="ns/b", state=State.DOWNLOADING)], "passing"),
        ([Entry(adapter="ns/b", state=State.WAITING)], [Entry(adapter="ns/b", state=State.LOADING)], "passing"),
        ([LOADED], [msgspec.structs.replace(LOADED, hidden=True)], "none"),
        ([], [LOADED], "lasting"),
        ([Entry(adapter="ns/b", state=State.LOADING)], [Entry(adapter="ns/b", state=State.FAILED)], "lasting"),
        ([LOADED], [msgspec.structs.replace(LOADED, message="held back")], "lasting"),
        ([LOADED], [msgspec.structs.replace(LOADED, revision="sha256:2")], "lasting"),
        ([LOADED], [], "lasting"),
        ([LOADED], [Entry(adapter="ns/b", state=State.PENDING)], "lasting"),
    ],
)
def test_what_is_not_shown_yet_passes_or_lasts(before: list[Entry], now: list[Entry], found: str) -> None:
    head = Head(uid="u", name="w")
    assert news(Record(head=head, entries=tuple(before)), Record(head=head, entries=tuple(now))) == found
    other = msgspec.structs.replace(head, capacity=7)
    assert news(Record(head=head, entries=tuple(before)), Record(head=other, entries=tuple(now))) == "lasting"
