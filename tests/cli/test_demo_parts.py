"""What the demo holds a pool against, and what it does with wrong flags: quick, without a pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.__main__ import main
from sidecar.cli.demo_check import moves_beyond, unlike
from sidecar.cli.demo_look import Answer
from sidecar.cli.demo_plan import Item, Unusable, as_adapter, generated, given
from sidecar.cli.demo_watch import Excuse, Tally, Total


def sets(**holders: str) -> dict[str, frozenset[str]]:
    return {name: frozenset(workers.split()) for name, workers in holders.items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sets(x="a b"), sets(x="a b")),
        (sets(x="a b"), sets(x="a new")),
        (sets(x="a b"), sets(x="a b new")),
        # One more is wanted, and it is not the new one.
        (sets(x="a"), sets(x="a b")),
    ],
)
def test_moves_from_or_to_the_changed_worker_are_allowed(
    before: dict[str, frozenset[str]], after: dict[str, frozenset[str]]
) -> None:
    assert moves_beyond(before, after, "new") == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sets(x="a b"), sets(x="a c")),
        (sets(x="a b"), sets(x="c new")),
        (sets(x="a b"), sets(x="a")),
    ],
)
def test_other_moves_are_named(before: dict[str, frozenset[str]], after: dict[str, frozenset[str]]) -> None:
    assert len(moves_beyond(before, after, "new")) == 1


def test_answers_differ_by_text_or_by_more_than_rounding() -> None:
    answer = Answer("text", (-1.0, -2.0))
    assert not answer.differs(Answer("text", (-1.001, -2.0)))
    assert answer.differs(Answer("text", (-1.1, -2.0)))
    assert answer.differs(Answer("other", (-1.0, -2.0)))
    assert answer.differs(Answer("text"))


def test_an_answer_of_another_adapter_is_found() -> None:
    mine, other = Answer("mine"), Answer("other")
    assert unlike({"x": [mine]}, {"x": [mine]}) == []
    assert unlike({"x": [mine, other]}, {"x": [mine]}) == ["x gave an answer that is not its own"]
    assert unlike({"x": [mine, other]}, {"x": [mine, other]}) == []


def test_a_crash_excuses_its_worker_and_what_only_that_had() -> None:
    tally = Tally(failures=[("a", "at a"), ("b", "at b")], gaps={"only": 2.0, "both": 1.0})
    assert len(tally.faults(None)) == 4
    assert tally.faults(Excuse("a", frozenset({"only"}))) == ["both: for 1.0 s no agent said Loaded", "at b"]


def test_the_summary_says_what_failed() -> None:
    assert Total(requests=9).summary() == "Of 9 requests none failed."
    assert "2 failed" in Total(requests=9, failed=2).summary()
    assert "1 came too late" in Total(requests=9, late=1).summary()


@pytest.mark.parametrize(("workers", "numbers"), [(1, (1, 1, 1)), (3, (3, 2, 1)), (4, (4, 2, 1)), (6, (6, 2, 2))])
def test_the_plain_counts(tmp_path: Path, workers: int, numbers: tuple[int, ...]) -> None:
    cast = generated(tmp_path)
    by_wish = {item.wish: item.number(workers) for item in cast.items}
    assert tuple(by_wish[wish] for wish in ("all", "2", "34 %")) == numbers
    assert all(as_adapter(item, "base").served_name == item.served_name for item in cast.items)


def test_own_adapters_become_items(tmp_path: Path) -> None:
    for name in ("First", "2nd", "c"):
        (tmp_path / name).mkdir()
    places = [str(tmp_path / name) for name in ("First", "2nd", "c")]
    three = given(places)
    assert [item.name for item in three.items] == ["demo-1-first", "demo-2-2nd", "demo-3-c"]
    assert three.updated is three.items[1]
    assert three.new_uri == three.items[2].uri
    four = given([*places, "s3://bucket/new"])
    assert len(four.items) == 3
    assert four.new_uri == "s3://bucket/new"


def test_a_scheme_that_nobody_knows_is_refused_before_anything_starts() -> None:
    item = Item(name="x", served_name="x", uri="gopher://x", distribution={"strategy": "all"})
    with pytest.raises(Unusable, match="gopher"):
        as_adapter(item, "base")


ENGINES = ("--engine-url", "http://127.0.0.1:1,http://127.0.0.1:2")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--workers", "0"), "--workers: 0 is not from 1 to 16"),
        (("--workers", "17"), "--workers: 17 is not from 1 to 16"),
        (("--capacity", "0"), "--capacity: 0 is not 1 or more"),
        (("--adapters", "a,b,c"), "--adapters goes with --engine-url"),
        (("--engine-api-key-file", "k"), "--engine-api-key-file goes with --engine-url"),
        (("--engine-url", "http://127.0.0.1:1"), "at least two different engines"),
        (("--engine-url", "a,b"), "'a' is no URL"),
        (ENGINES, "name at least 3 adapters"),
        ((*ENGINES, "--adapters", "a,b,c", "--workers", "3"), "exclude each other"),
        ((*ENGINES, "--adapters", "a,b,c"), "http://127.0.0.1:1/v1/models can't be reached"),
        (("--work-dir", "/nowhere"), "--work-dir: /nowhere is no directory"),
    ],
)
def test_wrong_flags_are_told_and_nothing_starts(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--plain", *flags]) == 2
    assert said in capsys.readouterr().err


def test_too_few_adapters(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="2 different adapters are given"):
        given([str(tmp_path), str(tmp_path), "s3://bucket/x"])
    with pytest.raises(Unusable, match="does not exist"):
        given([str(tmp_path / "none")])
