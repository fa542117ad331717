"""The Kubernetes backend on a real API server: what it sees, and what it doesn't believe."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sidecar.edges.kubernetes.backend import KubernetesBackend, Place, read_own_pod
from sidecar.model import Steering
from sidecar.ports import BackendView
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.workers import (
    ACCOUNT,
    ADAPTERS,
    POOL,
    MemoryState,
    backend_of,
    connect,
    drop_adapter,
    make_adapter,
    make_pod,
    prepare,
)


def names(view: BackendView) -> list[str]:
    return [a.name for a in view.adapters or ()]


async def test_it_sees_adapters_members_and_its_own_pod(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1", engine=["--model", "base", "--max-cpu-loras=7"])
    make_pod(cluster, namespace, "w-1", "10.244.1.2")
    make_adapter(cluster, namespace, "a", servedName="Org/A")
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        view = await seen.until(
            lambda v: v.adapters_fresh and v.members_fresh and len(v.members or ()) == 2, "everything is seen"
        )
        assert view.problems == ()
        assert [(m.name, m.address) for m in view.members or ()] == [
            ("w-0", "10.244.1.1:8790"),
            ("w-1", "10.244.1.2:8790"),
        ]
        assert (view.members or ())[0].uid == pod["metadata"]["uid"]
        assert view.adapters is not None
        assert (view.adapters[0].served_name, view.adapters[0].generation) == ("Org/A", 1)
        assert view.adapters[0].created > 1_600_000_000
        assert seen.backend.pod is not None
        assert seen.backend.pod.engine is not None
        assert seen.backend.pod.engine.capacity == 7
        assert seen.backend.pod.pool == POOL
        assert seen.backend.pod.own_labels == {"gpu": "a100"}

        make_adapter(cluster, namespace, "b")
        await seen.until(lambda v: names(v) == ["a", "b"], "a new adapter")
        cluster.patch(f"{ADAPTERS.format(namespace)}/b", {"spec": {"priority": 5}})
        await seen.until(lambda v: [a.priority for a in v.adapters or ()] == [0, 5], "a changed adapter")

        cluster.kubectl("annotate", "-n", namespace, "pod/w-0", "lora-sidecar.io/cordon=true")
        await seen.until(lambda v: v.steering.cordoned, "the cordon")
        cluster.kubectl("annotate", "-n", namespace, "pod/w-0", "lora-sidecar.io/cordon-", "lora-sidecar.io/capacity=3")
        await seen.until(lambda v: v.steering == Steering(capacity=3), "the capacity")
        cluster.kubectl("annotate", "-n", namespace, "pod/w-0", "--overwrite", "lora-sidecar.io/capacity=many")
        await seen.until(lambda v: any("'many'" in p.message for p in v.problems), "a capacity that is none")


async def test_who_it_is_stands_in_the_token(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    api, me = await connect(cluster, namespace, pod, tmp_path)
    await api.close()
    assert (me.namespace, me.pod, me.uid, me.account) == (namespace, "w-0", pod["metadata"]["uid"], ACCOUNT)


async def test_a_deletion_counts_when_the_list_still_answers(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    for name in "abc":
        make_adapter(cluster, namespace, name)
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        await seen.until(lambda v: len(names(v)) == 3 and v.adapters_fresh, "three adapters")
        drop_adapter(cluster, namespace, "a")
        await seen.never(lambda v: len(names(v)) != 3, 1.5)
        await seen.until(lambda v: names(v) == ["b", "c"], "one is gone", timeout=5)
        # All that is left, in one go: a minute passes before that is believed.
        cluster.kubectl("delete", "loras", "-n", namespace, "--all")
        await seen.never(lambda v: names(v) != ["b", "c"], 5.0)
        make_adapter(cluster, namespace, "b")
        await seen.until(lambda v: names(v) == ["b"], "one came back, so the other goes", timeout=10)


async def test_what_is_not_understood_keeps_its_last_good_version(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    make_adapter(cluster, namespace, "a", source={"uri": "https://host/a.tar"})
    make_adapter(cluster, namespace, "plain", source={"uri": "http://host/a.tar"})
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        view = await seen.until(lambda v: v.adapters_fresh, "the list")
        assert names(view) == ["a"]
        assert [p.where for p in view.problems if "http" in p.message] == [f"adapter {namespace}/plain"]
        cluster.patch(f"{ADAPTERS.format(namespace)}/a", {"spec": {"source": {"uri": "http://host/a.tar"}}})
        view = await seen.until(lambda v: len([p for p in v.problems if "allow-http" in p.message]) >= 2, "a problem")
        assert view.adapters is not None
        assert view.adapters[0].source.uri == "https://host/a.tar"


async def test_the_members_stay_when_the_service_is_deleted(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    make_pod(cluster, namespace, "w-1", "10.244.1.2")
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        await seen.until(lambda v: v.members_fresh and len(v.members or ()) == 2, "two members")
        cluster.delete(f"/api/v1/namespaces/{namespace}/services/{POOL}")
        view = await seen.until(lambda v: not v.members_fresh, "the list is in doubt", timeout=60)
        assert len(view.members or ()) == 2
        assert any("this pod is not in them" in p.message for p in view.problems)


async def test_a_pod_in_several_slices_counts_once_and_an_ending_one_is_ending(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        await seen.until(lambda v: v.members_fresh, "the member")
        reference = {"kind": "Pod", "namespace": namespace, "name": "w-0", "uid": pod["metadata"]["uid"]}
        copy = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "copy", "labels": {"kubernetes.io/service-name": POOL}},
            "addressType": "IPv4",
            "endpoints": [
                {
                    "addresses": ["10.244.1.1"],
                    "conditions": {"ready": True, "serving": True, "terminating": True},
                    "targetRef": reference,
                    "zone": "z",
                }
            ],
        }
        cluster.post(f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", copy)
        view = await seen.until(lambda v: any(m.terminating for m in v.members or ()), "it is ending")
        assert len(view.members or ()) == 1
        cluster.delete(f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/copy")
        await seen.until(lambda v: [m.terminating for m in v.members or ()] == [False], "the copy is gone")


async def test_without_the_role_it_says_what_to_apply(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    prepare(cluster, namespace, role=False)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    make_adapter(cluster, namespace, "a")
    async with backend_of(cluster, namespace, pod, tmp_path, read_pod=False) as seen:
        view = await seen.until(lambda v: len(v.problems) >= 3, "three watches are forbidden")
        assert view.adapters is None
        assert not view.adapters_fresh
        assert not view.members_fresh
        command = (
            f"kubectl create rolebinding lora-sidecar-{ACCOUNT} -n {namespace} --role=lora-sidecar "
            f"--serviceaccount={namespace}:{ACCOUNT}"
        )
        assert all(command in p.message for p in view.problems)
        cluster.kubectl("apply", "-n", namespace, "-k", "deploy/base")
        await seen.until(lambda v: v.adapters_fresh and v.members_fresh, "it works without a restart")


@pytest.mark.slow
async def test_a_deleted_crd_takes_nothing_away(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    for name in "abc":
        make_adapter(cluster, namespace, name)
    state = MemoryState()
    async with backend_of(cluster, namespace, pod, tmp_path, state=state, grace=8.0) as seen:
        await seen.until(lambda v: len(names(v)) == 3 and v.adapters_fresh, "three adapters")
        try:
            cluster.kubectl("delete", "crd", "adapters.lora-sidecar.io", "--wait=true")
            view = await seen.until(lambda v: not v.adapters_fresh, "the list is in doubt")
            assert len(names(view)) == 3
            assert any("kubectl apply -k crds" in p.message for p in view.problems)
            await seen.never(lambda v: len(names(v)) != 3, 4.0)
        finally:
            restore_crd(cluster)
        await seen.until(lambda v: v.adapters_fresh, "the CRD is back, empty")
        make_adapter(cluster, namespace, "b")
        await seen.never(lambda v: len(names(v)) != 3, 4.0)
        await seen.until(lambda v: names(v) == ["b"], "the grace is over", timeout=30)


@pytest.mark.slow
async def test_a_replaced_crd_takes_nothing_away(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    make_adapter(cluster, namespace, "a")
    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        await seen.until(lambda v: names(v) == ["a"] and v.adapters_fresh, "the adapter")
        cluster.kubectl("replace", "--force", "-f", "crds/adapters.lora-sidecar.io.yaml")
        restore_crd(cluster)
        await seen.never(lambda v: names(v) != ["a"], 10.0)
        await seen.until(lambda v: v.adapters_fresh, "it is current again")


def restore_crd(cluster: ControlPlane) -> None:
    cluster.kubectl("apply", "-k", "crds")
    cluster.kubectl("wait", "--for=condition=Established", "crd/adapters.lora-sidecar.io", "--timeout=30s")
    cluster.forget_discovery()


@pytest.mark.slow
async def test_an_outage_and_a_restart_in_it_change_nothing(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    make_pod(cluster, namespace, "w-1", "10.244.1.2")
    make_adapter(cluster, namespace, "a")
    make_adapter(cluster, namespace, "b")
    state = MemoryState()
    async with backend_of(cluster, namespace, pod, tmp_path, state=state) as seen:
        before = await seen.until(lambda v: v.adapters_fresh and v.members_fresh and len(names(v)) == 2, "all")
        await seen.until(lambda v: len(state.files) == 3, "it is saved")
        api, me = await connect(cluster, namespace, pod, tmp_path / "again")
        cluster.stop_api_server()
        try:
            during = await seen.until(lambda v: not v.adapters_fresh and not v.members_fresh, "nothing is known")
            assert (during.adapters, during.members) == (before.adapters, before.members)
            again = seen.backend.__class__(
                api=api,
                me=me,
                place=seen.backend._place,
                pod=None,
                state=state,  # type: ignore[arg-type]  # the part of a Store that a backend uses
                clock=seen.backend._clock,
            ).view()
            assert (again.adapters, again.members) == (before.adapters, before.members)
            assert not again.adapters_fresh
        finally:
            cluster.start_api_server()
            cluster.start_controllers()
            await api.close()
        await seen.until(lambda v: v.adapters_fresh and v.members_fresh, "all is current again")


async def test_a_look_at_the_own_pod_needs_no_watch(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    path = f"/api/v1/namespaces/{namespace}/pods/w-0"
    cluster.patch(path, {"metadata": {"finalizers": ["test/held"]}})
    api, me = await connect(cluster, namespace, pod, tmp_path)
    try:
        backend = KubernetesBackend(
            api=api,
            me=me,
            place=Place(namespace=namespace, service=POOL, pool=POOL),
            pod=await read_own_pod(api, me),
            state=MemoryState(),  # type: ignore[arg-type]  # the part of a Store that a backend uses
            clock=time.time,
        )
        await backend.look_at_own_pod()
        assert not backend.view().steering.terminating
        cluster.delete(path)
        await backend.look_at_own_pod()
        assert backend.view().steering.terminating
    finally:
        cluster.patch(path, {"metadata": {"finalizers": None}})
        await api.close()
