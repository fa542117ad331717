"""What `status` shows of pods: tables that fit, and nothing lost on what can't be read."""

from __future__ import annotations

from sidecar.core.overview import PodLine, long_table, matrix, pod_line, pods_table

TOLD = '{"state":"Loaded","revision":"sha256:0123456789abcdef","servedName":"Org/A","since":"2026-01-01T00:00:00Z"}'


def pod(name: str, labels: dict[str, str] | None = None, **annotations: str) -> PodLine:
    keys = {f"adapter.lora-sidecar.io/{k}": v for k, v in annotations.items() if k not in ("worker", "summary")}
    keys |= {f"lora-sidecar.io/{k}": v for k, v in annotations.items() if k in ("worker", "summary")}
    return pod_line(name, "ns", labels or {}, keys, pool="p", cordoned=False, terminating=False)


LABEL = {"adapter.lora-sidecar.io/a": "loaded"}


def test_adapters_by_pods() -> None:
    pods = [pod("vllm-7d9f-x2", LABEL, a=TOLD), pod("vllm-7d9f-k8", a=TOLD, b='{"state":"Waiting"}')]
    assert matrix(pods) == [
        ("ADAPTER", "LOADED", "k8", "x2"),
        ("a", "2/2", "Loaded*", "Loaded"),
        ("b", "0/1", "Waiting", "-"),
    ]


def test_one_line_for_each_copy() -> None:
    assert long_table([pod("w-0", LABEL, a=TOLD)])[1] == (
        *("a", "w-0", "Loaded", "yes", "0123456789ab", "Org/A", "2026-01-01T00:00:00Z", ""),
    )


def test_pods_tell_who_they_are_and_silent_ones_are_shown() -> None:
    worker = '{"baseModel":"llama","engine":"vllm 0.32.0","capacity":4,"sidecar":"0.1.0"}'
    rows = pods_table([pod("w-1"), pod("w-0", worker=worker, summary="loaded=1 pending=0 failed=0")])
    assert rows[1] == ("w-0", "p", "llama", "vllm 0.32.0", "4", "ok", "loaded=1 pending=0 failed=0")
    assert rows[2] == ("w-1", "p", "-", "-", "-", "silent", "-")


def test_what_cannot_be_read_is_shown_as_such() -> None:
    assert matrix([pod("w-0", a="{")])[1] == ("a", "0/1", "?")
    assert matrix([pod("w-0", LABEL)])[1] == ("a", "0/1", "")
