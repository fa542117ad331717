"""What is told of patches of the own pod, against an API whose answers a test chooses."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sidecar.edges.kubernetes.api import ApiError, PodIdentity
from sidecar.edges.kubernetes.pod import PodWatch
from sidecar.model import Problem
from sidecar.ports import Report

LABEL = "adapter.lora-sidecar.io/a"


def pod(version: str, **labels: str) -> msgspec.Raw:
    meta = {"name": "w-0", "namespace": "ns", "uid": "u", "resourceVersion": version, "labels": labels}
    spec = {"containers": [{"name": "vllm", "image": "vllm/vllm-openai:v0.32.0"}]}
    return msgspec.Raw(json.dumps({"metadata": meta, "spec": spec, "status": {}}).encode())


class Cut:
    """Takes a patch, and is cut off before it answers."""

    async def request(self, *_: Any, **__: Any) -> bytes:
        raise ApiError(0, "can't be reached")


async def test_a_patch_whose_answer_was_lost_is_no_problem_once_the_watch_shows_it() -> None:
    told: list[int] = []
    watch = PodWatch(
        me=PodIdentity(namespace="ns", pod="w-0", uid="u"),
        pod=None,
        read_now=False,
        changed=lambda: told.append(1),
        trouble=lambda error: Problem(where="pod w-0", message=str(error)),
    )
    watch.event("ADDED", pod("1"))
    report = Report(labels={LABEL: "loaded"})
    with pytest.raises(ApiError):
        await watch.publish(Cut(), "/pods/w-0", report)  # type: ignore[arg-type]  # the part of an Api that it calls
    assert [p.message for p in watch.problems] == ["can't be reached"]
    watch.event("MODIFIED", pod("2", **{LABEL: "loaded"}))
    before = len(told)
    assert await watch.publish(Cut(), "/pods/w-0", report) is False  # type: ignore[arg-type]  # likewise
    assert watch.problems == ()
    assert len(told) == before + 1
