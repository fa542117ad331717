"""Several API servers behind one port, told from what honest engines and people do."""

from __future__ import annotations

from sidecar.core.contradiction import WINDOW, Contradictions

A = {"a": "/r/1"}
B = {"b": "/r/2"}


def looks(*lists: dict[str, str]) -> Contradictions:
    seen = Contradictions()
    for at, names in enumerate(lists):
        seen.saw(names, float(at))
    return seen


def test_lists_that_alternate_are_a_contradiction() -> None:
    assert looks(A, B, A, B).names(4.0) == ("a", "b")
    assert looks(A, {}, A, {}).names(4.0) == ("a",)
    assert looks(A, {"a": "/r/9"}, A, {"a": "/r/9"}).names(4.0) == ("a",)


def test_a_steady_list_and_one_that_grows_or_shrinks_are_not() -> None:
    assert looks(A, A, A, A).names(4.0) == ()
    assert looks({}, A, A | B, B, {}).names(5.0) == ()
    assert looks(A, {}, A).names(3.0) == ()  # once, as by hand
    assert looks({}, A, B, {}).names(4.0) == ()


def test_changes_that_the_agent_asked_for_are_not() -> None:
    seen = Contradictions()
    for at in range(10):
        seen.called("a")
        seen.saw(A if at % 2 else {}, float(at))
    assert seen.names(10.0) == ()


def test_answers_that_the_last_look_rules_out_are_evidence() -> None:
    seen = looks({})
    for at in (1.0, 2.0):
        seen.answered("a", True, at)
    assert seen.names(3.0) == ("a",)


def test_an_answer_about_a_name_in_flux_is_not() -> None:
    seen = looks({})
    seen.called("a")  # a load that timed out and took effect later
    for at in (1.0, 2.0):
        seen.answered("a", True, at)
    assert seen.names(3.0) == ()


def test_before_the_first_look_nothing_is() -> None:
    seen = Contradictions()
    seen.answered("a", True, 1.0)
    seen.answered("a", True, 1.0)
    assert seen.names(1.0) == ()


def test_evidence_ages() -> None:
    seen = looks(A, B, A, B)  # the first evidence at 2, the second at 3
    assert seen.names(2.0 + WINDOW) == ("a", "b")
    assert seen.names(2.1 + WINDOW) == ()


def test_a_restart_is_no_contradiction() -> None:
    seen = looks(A, {})
    seen.forget()
    for at in range(3, 8):
        seen.saw(A, float(at))
    assert seen.names(8.0) == ()
