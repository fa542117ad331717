"""Every test in this folder runs on a real control plane, and inside its network namespace if it uses `cluster`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.manifests import apply_policies
from tests.kubernetes.nodes import Nodes
from tests.kubernetes.pool import Origin, Pool

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder, so that no file can forget it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kubernetes)


def _missing() -> str:
    """Why this machine can't run the control plane, "" if it can."""
    assets = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not assets:
        return "KUBEBUILDER_ASSETS is unset: `setup-envtest use -p path` prints a folder for it"
    for program in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"):
        if not os.access(Path(assets) / program, os.X_OK):
            return f"KUBEBUILDER_ASSETS={assets} holds no {program}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "openssl", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return ""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The control plane with the custom resource's definition, one for the whole run."""
    reason = _missing()
    if reason and "kubernetes" in os.environ.get("LORA_SIDECAR_REQUIRE", "").split(","):
        pytest.fail(f"LORA_SIDECAR_REQUIRE asks for the Kubernetes tests, and {reason}")
    if reason:
        pytest.skip(reason)
    plane = ControlPlane(Path(os.environ["KUBEBUILDER_ASSETS"]), tmp_path_factory.mktemp("controlplane"))
    try:
        plane.start()
        plane.kubectl("apply", "-k", str(REPOSITORY / "crds"))
        plane.kubectl("wait", "--for=condition=Established", "crd/adapters.lora-sidecar.io", "--timeout=30s")
        wait_until(lambda: plane.exists("/openapi/v3/apis/lora-sidecar.io/v1alpha1"), "the resource is published")
        plane.forget_discovery()
        yield plane
    finally:
        plane.stop()


@pytest.fixture(autouse=True)
def _inside(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that use the cluster run in its network namespace: in-process clients and servers reach its addresses.

    Only this thread and what it starts is inside, so threads made before the test (none of ours) are not.
    """
    if "cluster" not in request.fixturenames:
        yield
        return
    plane: ControlPlane = request.getfixturevalue("cluster")
    with plane.netns.entered():
        yield


@pytest.fixture
def namespace(cluster: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh Kubernetes namespace with its service account; deleted afterwards without waiting."""
    created = cluster.post(
        "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "test-"}}
    )
    name = str(created["metadata"]["name"])
    wait_until(
        lambda: cluster.exists(f"/api/v1/namespaces/{name}/serviceaccounts/default"), "the default service account"
    )
    yield name
    cluster.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def nodes(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three nodes in three zones for the whole run. A test that breaks a node makes nodes of its own."""
    made = Nodes(cluster, tmp_path_factory.mktemp("nodes"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def origin() -> Iterator[Origin]:
    """Where the adapters of a test come from."""
    made = Origin()
    yield made
    made.close()


@pytest.fixture
def pool(cluster: ControlPlane, nodes: Nodes, namespace: str, origin: Origin) -> Iterator[Pool]:
    """A pool without workers yet: `install` puts them there. It ends with the test, without any grace."""
    made = Pool(cluster, nodes, namespace, origin)
    yield made
    made.remove()


@pytest.fixture(scope="session")
def policies(cluster: ControlPlane) -> ControlPlane:
    """The cluster with deploy/policy in force, from here on for the whole run, as a cluster has it."""
    apply_policies(cluster)
    return cluster
