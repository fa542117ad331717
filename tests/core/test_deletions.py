"""Unknown is never empty: when a deletion is believed, and what brings adapters back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.deletions import Believed, confirmed, deleted, doubtful, due, in_force, listed, not_found, seen
from sidecar.model import Adapter, Source

GRACE = 600.0


def adapter(name: str, generation: int = 1, status: str | None = None) -> Adapter:
    return Adapter(
        namespace="ns",
        name=name,
        base_model="llama",
        served_name=name,
        source=Source(uri="file:///a"),
        generation=generation,
        status_revision=status,
    )


def believing(*names: str) -> Believed:
    state = Believed(grace=GRACE)
    listed(state, [adapter(n) for n in names], (), 0.0)
    return state


def names(state: Believed) -> set[str]:
    return {a.name for a in in_force(state)}


def test_one_of_two_goes_after_two_seconds_if_the_list_still_answers() -> None:
    state = believing("a", "b")
    deleted(state, "ns/a", 10.0)
    assert due(state) == 12.0
    assert confirmed(state, 11.9, empty=False) == ()
    assert names(state) == {"a", "b"}
    assert confirmed(state, 12.0, empty=False) == ("ns/a",)
    assert names(state) == {"b"}
    assert due(state) is None


def test_the_only_one_goes_after_two_seconds() -> None:
    state = believing("a")
    deleted(state, "ns/a", 10.0)
    assert confirmed(state, 12.0, empty=True) == ("ns/a",)


def test_all_of_two_go_a_minute_after_the_last() -> None:
    state = believing("a", "b")
    deleted(state, "ns/a", 10.0)
    deleted(state, "ns/b", 11.0)
    assert due(state) == 71.0
    assert confirmed(state, 70.9, empty=True) == ()
    assert set(confirmed(state, 71.0, empty=True)) == {"ns/a", "ns/b"}


def test_one_of_them_coming_back_lets_the_rest_go_by_the_short_wait() -> None:
    state = believing("a", "b")
    deleted(state, "ns/a", 10.0)
    deleted(state, "ns/b", 10.0)
    seen(state, adapter("b"))
    assert due(state) == 12.0
    assert confirmed(state, 12.0, empty=False) == ("ns/a",)


def test_a_404_brings_back_the_last_minute_and_nothing_goes_while_it_lasts() -> None:
    state = believing("a", "b", "c")
    deleted(state, "ns/a", 10.0)
    confirmed(state, 12.0, empty=False)
    deleted(state, "ns/b", 13.0)
    deleted(state, "ns/c", 13.0)
    assert not_found(state, 14.0) is True
    assert names(state) == {"a", "b", "c"}
    assert due(state) is None
    assert confirmed(state, 1e9, empty=False) == ()
    assert names(state) == {"a", "b", "c"}


def test_a_404_does_not_bring_back_what_went_long_ago() -> None:
    state = believing("a", "b")
    deleted(state, "ns/a", 10.0)
    confirmed(state, 12.0, empty=False)
    assert not_found(state, 73.0) is False
    assert names(state) == {"b"}


def test_after_a_404_what_stays_away_goes_when_the_grace_is_over() -> None:
    state = believing("a", "b")
    not_found(state, 10.0)
    listed(state, [adapter("a")], (), 100.0)
    assert names(state) == {"a", "b"}
    assert due(state) == 610.0
    assert confirmed(state, 609.0, empty=False) == ()
    assert confirmed(state, 610.0, empty=False) == ("ns/b",)


def test_a_crd_that_came_back_empty_starts_the_grace() -> None:
    state = believing("a", "b")
    deleted(state, "ns/a", 10.0)
    deleted(state, "ns/b", 10.0)
    listed(state, [], (), 11.0)
    assert names(state) == {"a", "b"}
    assert due(state) == 611.0
    seen(state, adapter("a"))
    assert confirmed(state, 611.0, empty=False) == ("ns/b",)


def test_a_crd_that_came_back_empty_after_its_only_adapter_had_gone_brings_it_back() -> None:
    state = believing("a")
    deleted(state, "ns/a", 10.0)
    confirmed(state, 12.0, empty=True)
    assert doubtful(state, 13.0)
    assert listed(state, [], (), 13.0) is True
    assert names(state) == {"a"}
    assert due(state) == 613.0
    assert not doubtful(believing("a"), 13.0)


def test_an_empty_list_confirms_nothing_that_nobody_deleted() -> None:
    state = believing("a", "b")
    deleted(state, "ns/a", 10.0)
    assert confirmed(state, 12.0, empty=True) == ()
    assert names(state) == {"a", "b"}


def test_what_cannot_be_read_keeps_its_last_good_version() -> None:
    state = believing("a", "b")
    listed(state, [adapter("a")], ["ns/b"], 50.0)
    assert due(state) is None
    assert names(state) == {"a", "b"}


def test_a_change_of_the_status_alone_is_none() -> None:
    state = believing("a")
    assert seen(state, adapter("a", status="sha256:1")) is True
    assert seen(state, adapter("a", status="sha256:2")) is False
    assert seen(state, adapter("a", generation=2, status="sha256:2")) is True


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("deleted"), st.sampled_from("abc")),
        st.tuples(st.just("seen"), st.sampled_from("abc")),
        st.tuples(st.just("404"), st.just("")),
        st.tuples(st.just("empty"), st.just("")),
        st.tuples(st.just("ask"), st.sampled_from(["0.5", "2", "5", "59"])),
    ),
    max_size=30,
)


@given(_steps)
def test_nothing_goes_within_two_seconds_nor_all_within_a_minute_nor_within_the_grace(
    steps: list[tuple[str, str]],
) -> None:
    state, now = believing("a", "b", "c"), 0.0
    last_deleted: dict[str, float] = {}
    last_doubt = -1e9
    for what, argument in steps:
        now += 0.25
        before = names(state)
        if what == "deleted":
            deleted(state, f"ns/{argument}", now)
            last_deleted.setdefault(f"ns/{argument}", now)
        elif what == "seen":
            seen(state, adapter(argument))
            last_deleted.pop(f"ns/{argument}", None)
        elif what == "404":
            not_found(state, now)
            last_doubt = now
            last_deleted.clear()
        elif what == "empty":
            listed(state, [], (), now)
            last_doubt = now if before else last_doubt
            for name in before:
                last_deleted.setdefault(f"ns/{name}", now)
        else:
            now += float(argument)
            waits = [now - last_deleted.pop(key) for key in confirmed(state, now, empty=False)]
            everything = not names(state) and len(before) > 1
            assert not waits or min(waits) >= (60.0 if everything else 2.0)
            assert not waits or now - last_doubt >= GRACE
        if what != "ask":
            assert before <= names(state)
