"""Label selectors match as in Kubernetes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.selector import is_subdomain, key_fault, matches, value_fault
from sidecar.model import Requirement, Selector

KEYS = st.sampled_from(["a", "b", "example.com/gpu"])
VALUES = st.sampled_from(["", "x", "y"])
LABELS = st.dictionaries(KEYS, VALUES)
REQUIREMENTS = st.builds(
    Requirement,
    key=KEYS,
    operator=st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"]),
    values=st.lists(VALUES, min_size=1, max_size=3).map(tuple),
)
SELECTORS = st.builds(Selector, labels=LABELS, expressions=st.lists(REQUIREMENTS, max_size=3).map(tuple))

OPPOSITE = {"In": "NotIn", "NotIn": "In", "Exists": "DoesNotExist", "DoesNotExist": "Exists"}


@pytest.mark.parametrize(
    ("operator", "labels", "expected"),
    [
        ("In", {}, False),
        ("In", {"gpu": "a100"}, True),
        ("In", {"gpu": "h100"}, False),
        ("NotIn", {}, True),  # a missing key is not in the list
        ("NotIn", {"gpu": "a100"}, False),
        ("NotIn", {"gpu": "h100"}, True),
        ("Exists", {"gpu": ""}, True),
        ("Exists", {}, False),
        ("DoesNotExist", {"gpu": ""}, False),
        ("DoesNotExist", {}, True),
    ],
)
def test_operators(operator: str, labels: dict[str, str], expected: bool) -> None:
    values = ("a100", "l40") if operator in ("In", "NotIn") else ()
    selector = Selector(expressions=(Requirement(key="gpu", operator=operator, values=values),))  # type: ignore[arg-type]
    assert matches(selector, labels) is expected


@given(LABELS)
def test_the_empty_selector_matches_everything(labels: dict[str, str]) -> None:
    assert matches(Selector(), labels)


@given(REQUIREMENTS, LABELS)
def test_each_operator_is_the_opposite_of_its_negation(requirement: Requirement, labels: dict[str, str]) -> None:
    negated = Requirement(key=requirement.key, operator=OPPOSITE[requirement.operator], values=requirement.values)  # type: ignore[arg-type]
    assert matches(Selector(expressions=(requirement,)), labels) != matches(Selector(expressions=(negated,)), labels)


@given(SELECTORS, LABELS)
def test_all_parts_have_to_hold(selector: Selector, labels: dict[str, str]) -> None:
    parts = [Selector(labels={k: v}) for k, v in selector.labels.items()]
    parts += [Selector(expressions=(e,)) for e in selector.expressions]
    assert matches(selector, labels) == all(matches(part, labels) for part in parts)


@given(LABELS, LABELS)
def test_match_labels_is_in_with_one_value(wanted: dict[str, str], labels: dict[str, str]) -> None:
    as_expressions = tuple(Requirement(key=k, operator="In", values=(v,)) for k, v in wanted.items())
    assert matches(Selector(labels=wanted), labels) == matches(Selector(expressions=as_expressions), labels)


@pytest.mark.parametrize("key", ["a", "A.b_c-9", "example.com/gpu", "x" * 63, "a" * 63 + ".io/" + "b" * 63])
def test_good_label_keys(key: str) -> None:
    assert key_fault(key) == ""


@pytest.mark.parametrize("key", ["", "-a", "a-", "x" * 64, "/a", "Example.com/a", "a/b/c", "a b", "é", "a\n"])
def test_bad_label_keys(key: str) -> None:
    assert "is no label key" in key_fault(key)


@pytest.mark.parametrize(
    ("value", "good"), [("", True), ("x" * 63, True), ("x" * 64, False), (".a", False), ("a\n", False)]
)
def test_label_values(value: str, good: bool) -> None:
    assert (value_fault(value) == "") is good


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("a", True),
        ("a.b-c.9", True),
        ("a..b", False),
        ("-a", False),
        ("a.", False),
        ("A", False),
        ("", False),
        ("a\n", False),
    ],
)
def test_subdomains(name: str, good: bool) -> None:
    assert is_subdomain(name) is good
