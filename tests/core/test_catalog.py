"""Which adapters concern a worker, and who keeps a name that two want."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.catalog import age_order, select
from sidecar.model import Adapter, Source

BASES = frozenset({"qwen", "/models/qwen"})


def adapter(name: str, served: str = "", base: str = "qwen", created: int = 0, priority: int = 0) -> Adapter:
    return Adapter(
        namespace="default",
        name=name,
        base_model=base,
        served_name=served or name,
        source=Source(uri=f"s3://bucket/{name}"),
        created=created,
        priority=priority,
    )


ADAPTERS = st.lists(
    st.builds(
        adapter,
        name=st.sampled_from("abcdefgh"),
        served=st.sampled_from(["one", "two", "qwen", "/models/qwen"]),
        base=st.sampled_from(["qwen", "/models/qwen", "llama"]),
        created=st.integers(0, 3),
        priority=st.integers(-1, 1),
    ),
    unique_by=lambda a: a.key,
)


def test_another_base_model_is_none_of_our_business() -> None:
    catalog = select([adapter("a"), adapter("b", base="llama")], BASES)
    assert [a.name for a in catalog.active] == ["a"]
    assert catalog.rejected == {}


def test_the_older_keeps_the_name_and_the_newer_says_so() -> None:
    newer, older = adapter("a", "sql", created=20), adapter("b", "sql", created=10)
    catalog = select([newer, older], BASES)
    assert catalog.active == (older,)
    assert list(catalog.rejected) == ["default/a"]
    for part in ("'sql'", "default/b", "older", "spec.servedName"):
        assert part in catalog.rejected["default/a"]


def test_priority_does_not_take_a_name_from_its_owner() -> None:
    older = adapter("a", "sql", created=10)
    assert select([adapter("b", "sql", created=20, priority=100), older], BASES).active == (older,)


def test_of_the_same_age_the_name_decides() -> None:
    first = adapter("a", "sql")
    assert select([adapter("b", "sql"), first], BASES).active == (first,)


def test_one_name_on_two_base_models_is_no_conflict() -> None:
    catalog = select([adapter("a", "sql"), adapter("b", "sql", base="llama")], frozenset({"llama"}))
    assert [a.name for a in catalog.active] == ["b"]
    assert catalog.rejected == {}


def test_the_base_models_own_name_is_refused() -> None:
    catalog = select([adapter("a", "qwen"), adapter("b", "/models/qwen")], BASES)
    assert catalog.active == ()
    assert "'qwen' is the name of the base model" in catalog.rejected["default/a"]
    assert "default/b" in catalog.rejected


@given(ADAPTERS, st.integers())
def test_order_of_arrival_does_not_matter(adapters: list[Adapter], seed: int) -> None:
    shuffled = adapters[:]
    Random(seed).shuffle(shuffled)
    assert select(shuffled, BASES) == select(adapters, BASES)


@given(ADAPTERS)
def test_every_adapter_is_active_or_rejected_and_names_are_unique(adapters: list[Adapter]) -> None:
    catalog = select(adapters, BASES)
    mine = {a.key for a in adapters if a.base_model in BASES}
    assert {a.key for a in catalog.active} | set(catalog.rejected) == mine
    assert not {a.key for a in catalog.active} & set(catalog.rejected)
    served = [a.served_name for a in catalog.active]
    assert len(served) == len(set(served))
    assert not set(served) & BASES
    assert list(catalog.active) == sorted(catalog.active, key=lambda a: a.order)


@given(ADAPTERS)
def test_no_rejected_adapter_is_older_than_the_owner_of_its_name(adapters: list[Adapter]) -> None:
    catalog = select(adapters, BASES)
    owners = {a.served_name: a for a in catalog.active}
    for loser in (a for a in adapters if a.key in catalog.rejected and a.served_name not in BASES):
        assert age_order(owners[loser.served_name]) < age_order(loser)


@given(ADAPTERS)
def test_one_bad_adapter_never_costs_another(adapters: list[Adapter]) -> None:
    """Taking a rejected adapter away changes nothing for the rest."""
    catalog = select(adapters, BASES)
    for key in catalog.rejected:
        assert select([a for a in adapters if a.key != key], BASES).active == catalog.active
