"""The status and the Events on a real API server: server-side apply, two pools, who is left alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.placement import Assignment
from sidecar.core.status import AdapterStatus, Happening, Pool, aggregate, digest, timed
from sidecar.edges.kubernetes.board import Board, manager
from sidecar.model import Adapter, Entry, State
from sidecar.ports import StatusConflict
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.workers import ADAPTERS, POOL, Json, Seen, backend_of, connect, make_adapter, make_pod, prepare

REVISION = "sha256:" + "a" * 64


def status_of(adapter: Adapter, *loaded: str) -> AdapterStatus:
    entries = {n: Entry(adapter=adapter.key, state=State.LOADED, revision=REVISION) for n in loaded}
    assignment = Assignment(adapter=adapter.key, members=len(loaded), wanted=len(loaded), targets=loaded)
    found = aggregate(adapter, assignment, REVISION, Pool(entries=entries, base_models=("base",)))
    return timed(found, {}, 1_800_000_000.0)


@pytest.fixture
def pod(cluster: ControlPlane, namespace: str) -> Json:
    """The agent's own, beside an adapter "a"."""
    prepare(cluster, namespace)
    made = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    make_adapter(cluster, namespace, "a")
    return made


async def known(seen: Seen, name: str) -> Adapter:
    view = await seen.until(lambda v: any(a.name == name for a in v.adapters or ()), f"{name} is seen")
    return next(a for a in view.adapters or () if a.name == name)


def shown(cluster: ControlPlane, namespace: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get(f"{ADAPTERS.format(namespace)}/{name}")
    return found


def about_adapters(cluster: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    events = cluster.get(f"/api/v1/namespaces/{namespace}/events")["items"]
    return [e for e in events if e["involvedObject"]["kind"] == "Adapter"]


async def test_a_status_is_written_by_server_side_apply_and_seen(
    cluster: ControlPlane, namespace: str, pod: Json, tmp_path: Path
) -> None:
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        adapter = await known(seen, "a")
        status = status_of(adapter, "w-0")
        await seen.backend.write_status(adapter, status)
        cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", "lora/a", "--timeout=5s")
        document = shown(cluster, namespace, "a")
        assert document["status"]["summary"] == "1/1"
        assert document["metadata"]["generation"] == 1
        owners = {(f["manager"], f["operation"], f.get("subresource")) for f in document["metadata"]["managedFields"]}
        assert ("lora-sidecar-pool", "Apply", "status") in owners
        for _ in range(100):
            found = seen.backend.status_seen(adapter.key)
            if found is not None and found.digest == digest(status):
                break
            await asyncio.sleep(0.05)
        assert found is not None
        assert found.digest == digest(status)
        assert found.managers == ("lora-sidecar-pool",)
        assert found.conditions["Ready"].status == "True"
        assert found.conditions["Ready"].since == "2027-01-15T08:00:00Z"
        # A worker less: what is no longer said goes.
        await seen.backend.write_status(adapter, status_of(adapter))
        assert "workers" not in shown(cluster, namespace, "a")["status"]


async def test_another_pools_status_is_left_alone(
    cluster: ControlPlane, namespace: str, pod: Json, tmp_path: Path
) -> None:
    api, me = await connect(cluster, namespace, pod, tmp_path / "other")
    other = Board(api, me, "other", lambda: 1_800_000_000.0)
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        adapter = await known(seen, "a")
        await other.write_status(adapter, status_of(adapter, "o-0", "o-1"), force=False)
        with pytest.raises(StatusConflict) as conflict:
            await seen.backend.write_status(adapter, status_of(adapter, "w-0"))
        assert conflict.value.managers == (manager("other"),)
        assert shown(cluster, namespace, "a")["status"]["summary"] == "2/2"
        await seen.backend.write_status(adapter, status_of(adapter, "w-0"), force=True)
        assert shown(cluster, namespace, "a")["status"]["summary"] == "1/1"
    await api.close()


async def test_its_own_earlier_write_by_another_way_is_taken_over(
    cluster: ControlPlane, namespace: str, pod: Json, tmp_path: Path
) -> None:
    path = f"{ADAPTERS.format(namespace)}/a/status?fieldManager={manager(POOL)}"
    cluster.patch(path, {"status": {"targets": 7, "loaded": 7, "failed": 0, "summary": "7/7"}})
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        adapter = await known(seen, "a")
        await seen.backend.write_status(adapter, status_of(adapter, "w-0"))
    assert shown(cluster, namespace, "a")["status"]["summary"] == "1/1"


async def test_events_are_counted_not_repeated_and_bounded(
    cluster: ControlPlane, namespace: str, pod: Json, tmp_path: Path
) -> None:
    now = 1_800_000_000.0
    api, me = await connect(cluster, namespace, pod, tmp_path / "board")
    board = Board(api, me, POOL, lambda: now)
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        adapter = await known(seen, "a")
    for _ in range(3):
        await board.tell(adapter, Happening(reason="Failed", message="w-0: no such key", warning=True))
        now += 61.0
    events = about_adapters(cluster, namespace)
    assert [(e["reason"], e["count"], e["type"]) for e in events] == [("Failed", 3, "Warning")]
    assert "no such key" in cluster.kubectl("describe", "-n", namespace, "lora/a")
    for number in range(40):
        await board.tell(adapter, Happening(reason="Moved", message=f"from w-{number}"))
    events = about_adapters(cluster, namespace)
    assert len([e for e in events if e["reason"] == "Moved"]) == 25
    await api.close()
