"""Adapters and workers for the tests of placement, and strategies that draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st

from sidecar.core.placement import Assignment, Worker, place
from sidecar.model import Adapter, Distribution, Requirement, Selector, Source

BASE = "base"
EVERYWHERE = Selector()
SCARCE = st.integers(0, 4)
LABELS = st.fixed_dictionaries(
    {}, optional={"gpu": st.sampled_from(["a10", "h100"]), "spot": st.sampled_from(["true", "false"])}
)
Placement = dict[str, Assignment]
# Drawing a pool takes longer than placing on it.
FEWER = settings(max_examples=40)


def adapter(
    name: str,
    *,
    namespace: str = "default",
    base_model: str = BASE,
    replicas: int | None = None,
    percentage: int | None = None,
    spread: Literal["zone", "none"] = "zone",
    priority: int = 0,
    created: int = 0,
    selector: Selector = EVERYWHERE,
    uid: str = "",
) -> Adapter:
    """`replicas` makes it fixed, `percentage` a percentage, neither all."""
    strategy: Literal["all", "fixed", "percentage"] = "all"
    if replicas is not None:
        strategy = "fixed"
    elif percentage is not None:
        strategy = "percentage"
    return Adapter(
        namespace=namespace,
        name=name,
        uid=uid,
        base_model=base_model,
        served_name=name,
        source=Source(uri="file:///adapter"),
        distribution=Distribution(strategy=strategy, replicas=replicas or 0, percentage=percentage or 0, spread=spread),
        priority=priority,
        created=created,
        selector=selector,
    )


def worker(name: str, **fields: object) -> Worker:
    """A healthy worker with plenty of room."""
    return Worker(**{"name": name, "uid": f"uid-{name}", "base_models": (BASE,), "room": 1_000} | fields)  # type: ignore[arg-type]  # fields of Worker by name


def workers(count: int, **fields: object) -> list[Worker]:
    return [worker(f"worker-{i}", **fields) for i in range(count)]


def targets(adapters: Sequence[Adapter], pool: Sequence[Worker]) -> dict[str, tuple[str, ...]]:
    """Targets by resource name."""
    return {key.partition("/")[2]: a.targets for key, a in place(adapters, pool).items()}


SELECTORS = st.sampled_from(
    [
        Selector(),
        Selector(),
        Selector(labels={"gpu": "h100"}),
        Selector(expressions=(Requirement(key="gpu", operator="NotIn", values=("a10",)),)),
        Selector(labels={"gpu": "a10"}, expressions=(Requirement(key="spot", operator="DoesNotExist"),)),
    ]
)


@st.composite
def some_adapters(draw: st.DrawFn, *, most: int = 12, base_models: Sequence[str] = (BASE, "other")) -> list[Adapter]:
    """Up to `most` adapters of every strategy, with priorities and creation times that often tie."""
    found = []
    for i in range(draw(st.integers(0, most))):
        replicas = draw(st.none() | st.integers(0, 5))
        found.append(
            adapter(
                f"adapter-{i}",
                namespace=draw(st.sampled_from(["default", "team"])),
                base_model=draw(st.sampled_from(base_models)),
                replicas=replicas,
                percentage=draw(st.none() | st.integers(0, 100)) if replicas is None else None,
                spread=draw(st.sampled_from(["zone", "none"])),
                priority=draw(st.integers(-1, 1)),
                created=draw(st.integers(0, 2)),
                selector=draw(SELECTORS),
            )
        )
    return found


@st.composite
def some_workers(
    draw: st.DrawFn, *, least: int = 0, most: int = 9, room: st.SearchStrategy[int] = SCARCE
) -> list[Worker]:
    """Up to `most` workers in all conditions, in up to three zones and one unnamed."""
    rarely = st.sampled_from([False, False, False, False, True])
    names = draw(st.lists(st.integers(0, 99), min_size=least, max_size=most, unique=True))
    return [
        worker(
            f"worker-{n}",
            zone=draw(st.sampled_from(["a", "b", "c", ""])),
            base_models=draw(st.sampled_from([(BASE,), (BASE,), (BASE, "other"), ("other",), ()])),
            labels=draw(LABELS),
            room=draw(room),
            up=not draw(rarely),
            cordoned=draw(rarely),
            terminating=draw(rarely),
            resting=draw(rarely),
            avoids=frozenset(draw(st.lists(st.sampled_from([f"default/adapter-{i}" for i in range(6)]), max_size=2))),
        )
        for n in names
    ]
