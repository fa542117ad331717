"""Which adapters concern a worker, and which of them can't be served because of another."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sidecar.model import Adapter, Frozen


class Catalog(Frozen, frozen=True, kw_only=True):
    """`active` in the order in which they get room; `rejected` maps `namespace/name` to the reason."""

    active: tuple[Adapter, ...] = ()
    rejected: dict[str, str] = msgspec.field(default_factory=dict)


def age_order(adapter: Adapter) -> tuple[int, str]:
    """Sort key of who came first. Priority has no say in it: raising it must not take a name from its owner."""
    return (adapter.created, adapter.key)


def select(adapters: Iterable[Adapter], base_models: frozenset[str]) -> Catalog:
    """The adapters for a worker that serves `base_models` (ids, roots and its own --base-model).

    One name can be served once: of two resources with one servedName the older stays and the newer is rejected, as is
    one that takes a base model's own name. Same adapters in any order, same answer.
    """
    taken: dict[str, Adapter] = {}
    rejected: dict[str, str] = {}
    for adapter in sorted((a for a in adapters if a.base_model in base_models), key=age_order):
        if adapter.served_name in base_models:
            rejected[adapter.key] = base_model_conflict(adapter)
        elif (owner := taken.setdefault(adapter.served_name, adapter)) is not adapter:
            rejected[adapter.key] = name_conflict(adapter, owner)
    return Catalog(active=tuple(sorted(taken.values(), key=lambda a: a.order)), rejected=rejected)


def base_model_conflict(adapter: Adapter) -> str:
    """Why an adapter can't be served under a base model's name."""
    return (
        f"servedName {adapter.served_name!r} is the name of the base model itself, and requests for it would reach"
        " either; set another spec.servedName"
    )


def name_conflict(newer: Adapter, older: Adapter) -> str:
    """Why `newer` can't be served beside `older`."""
    return (
        f"servedName {newer.served_name!r} belongs to {older.key}, which is older; set another spec.servedName,"
        " or delete one of the two"
    )
