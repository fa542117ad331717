"""The hash behind placement: published values, and that sequential names spread like random ones."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.hashing import adapter_hash, score, worker_hash

VECTORS = json.loads((Path(__file__).parent / "vectors" / "placement-v1.json").read_text())
TEN = [f"worker-{i}" for i in range(10)]
NAMES = st.text(st.characters(codec="utf-8"), max_size=20)


def best(namespace: str, name: str, pool: list[str], count: int) -> list[str]:
    own = adapter_hash(namespace, name)
    return sorted(pool, key=lambda w: score(own, worker_hash(w)), reverse=True)[:count]


@pytest.mark.parametrize("case", VECTORS["adapterHashes"], ids=lambda c: f"{c['namespace']}/{c['name']}"[:40])
def test_published_adapter_hashes(case: dict[str, str]) -> None:
    assert f"{adapter_hash(case['namespace'], case['name']):016x}" == case["hash"]


@pytest.mark.parametrize("case", VECTORS["workerHashes"], ids=lambda c: c["name"][:40])
def test_published_worker_hashes(case: dict[str, str]) -> None:
    assert f"{worker_hash(case['name']):016x}" == case["hash"]


@pytest.mark.parametrize("case", VECTORS["scores"], ids=lambda c: f"{c['adapterHash']}-{c['workerHash']}")
def test_published_scores(case: dict[str, str]) -> None:
    assert f"{score(int(case['adapterHash'], 16), int(case['workerHash'], 16)):016x}" == case["score"]


@pytest.mark.parametrize("namespace", ["default", "ns"])
@pytest.mark.parametrize("pattern", ["adapter-{}", "adapter-{:04d}", "lora-{}", "a{}"])
def test_sequential_names_load_ten_workers_evenly(namespace: str, pattern: str) -> None:
    """Raw FNV-1a of "adapter:pod" is off by a factor of four here."""
    load = Counter(best(namespace, pattern.format(i), TEN, 1)[0] for i in range(5_000))
    assert max(abs(load[w] - 500) for w in TEN) <= 60


def test_sequential_names_use_all_pairs_of_ten_workers() -> None:
    pairs = {tuple(sorted(best("default", f"adapter-{i}", TEN, 2))) for i in range(5_000)}
    assert pairs == set(combinations(TEN, 2))


@pytest.mark.parametrize("worker", ["worker-{}", "vllm-{}", "10.0.0.{}", "vllm-7d9c5b6f4-x{}"])
def test_no_rank_depends_on_another(worker: str) -> None:
    """All 720 orders of six workers come up about equally often: chi-square of 719 degrees within five deviations."""
    pool = [worker.format(i) for i in range(6)]
    seen = Counter(tuple(best("default", f"adapter-{i}", pool, 6)) for i in range(14_400))
    mean = 14_400 / 720
    chi_square = sum((n - mean) ** 2 / mean for n in seen.values()) + (720 - len(seen)) * mean
    assert abs(chi_square - 719) < 5 * (2 * 719) ** 0.5


@given(a=st.tuples(NAMES, NAMES), b=st.tuples(NAMES, NAMES))
def test_framing_keeps_names_apart(a: tuple[str, str], b: tuple[str, str]) -> None:
    assert (adapter_hash(*a) == adapter_hash(*b)) == (a == b)
    assert adapter_hash(a[0] + a[1], "") != adapter_hash("", a[0] + a[1]) or not (a[0] + a[1])


def test_framing_keeps_the_border_between_namespace_and_name() -> None:
    assert adapter_hash("team-a", "b") != adapter_hash("team", "-ab")
    assert adapter_hash("a", "b/c") != adapter_hash("a/b", "c")


@given(adapter=st.integers(0, 2**64 - 1), worker=st.integers(0, 2**64 - 1))
def test_scores_are_unsigned_64_bit(adapter: int, worker: int) -> None:
    assert 0 <= score(adapter, worker) < 2**64
