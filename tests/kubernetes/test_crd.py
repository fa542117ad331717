"""The custom resource's definition: what the API server itself accepts, fills in, refuses and shows."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from sidecar.core.manifest import InvalidManifest, parse_adapter
from tests.kubernetes.controlplane import ApiError, ControlPlane, wait_until

Json = dict[str, Any]
REMOVE = object()


def adapter(name: str = "sql", **spec: Any) -> Json:
    """A good adapter, with `spec` put over it (keys with dots reach inside, REMOVE takes away)."""
    document: Json = {
        "apiVersion": "lora-sidecar.io/v1alpha1",
        "kind": "Adapter",
        "metadata": {"name": name},
        "spec": {"baseModel": "meta/base", "source": {"uri": "s3://bucket/loras/sql"}},
    }
    for path, value in spec.items():
        *parents, leaf = path.split("__")
        place = document["spec"]
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is REMOVE:
            place.pop(leaf)
        else:
            place[leaf] = value
    return document


def path_of(namespace: str, name: str = "") -> str:
    return f"/apis/lora-sidecar.io/v1alpha1/namespaces/{namespace}/adapters" + (f"/{name}" if name else "")


def refusal(cluster: ControlPlane, namespace: str, document: Json) -> str:
    """What the API server says against `document`."""
    with pytest.raises(ApiError) as refused:
        cluster.post(path_of(namespace) + "?dryRun=All", document)
    assert refused.value.code == 422
    return str(refused.value)


def test_the_smallest_adapter_gets_every_default(cluster: ControlPlane, namespace: str) -> None:
    stored = cluster.post(path_of(namespace), adapter())
    assert stored["spec"] == {
        "baseModel": "meta/base",
        "source": {"uri": "s3://bucket/loras/sql"},
        "distribution": {"strategy": "all", "spread": "zone"},
        "priority": 0,
        "drainSeconds": 5,
        "onStalePrefixCache": "Hold",
    }
    assert "status" not in stored


def test_a_half_filled_distribution_gets_the_rest(cluster: ControlPlane, namespace: str) -> None:
    stored = cluster.post(path_of(namespace), adapter(distribution={"strategy": "fixed", "replicas": 0}))
    assert stored["spec"]["distribution"] == {"strategy": "fixed", "replicas": 0, "spread": "zone"}


GOOD: dict[str, Json] = {
    "name of 63 characters": adapter("a" * 63),
    "name with dots": adapter("sql.v3-final"),
    "served name": adapter(servedName="team/Sql.v3:prod"),
    "served name of one character": adapter(servedName="x"),
    "bucket alone": adapter(source__uri="s3://bucket"),
    "archive in a bucket": adapter(source__uri="s3://bucket/a b/ü?#%20.tar.gz"),
    "hub": adapter(source__uri="hf://org/repo"),
    "hub, revision, folder": adapter(source__uri="hf://org/re.po_1@v1.0/sub/folder"),
    "web": adapter(source__uri="https://h.example:8443/a/x%20y.tgz?sig=1/2"),
    "plain web": adapter(source__uri="http://h/x.ZIP"),
    "file": adapter(source__uri="file:///data/my lora"),
    "digest": adapter(source__digest="sha256:" + "0123456789abcdef" * 4),
    "digest looked at again": adapter(source__digest="sha256:" + "0" * 64, source__refreshInterval="1h"),
    "secret": adapter(source__secretRef={"name": "s3-credentials"}),
    **{
        f"refreshInterval {value}": adapter(source__refreshInterval=value)
        for value in ("1s", "1h30m", "1.5h", "1000ms")
    },
    "selector": adapter(
        workers={
            "matchLabels": {"gpu": "a100"},
            "matchExpressions": [
                {"key": "tier", "operator": "In", "values": ["gold", "silver"]},
                {"key": "spot", "operator": "DoesNotExist"},
                {"key": "example.com/x", "operator": "Exists", "values": []},
            ],
        }
    ),
    "nobody": adapter(distribution={"strategy": "fixed", "replicas": 0}),
    "half": adapter(distribution={"strategy": "percentage", "percentage": 50, "spread": "none"}),
    "all of it": adapter(distribution={"strategy": "percentage", "percentage": 100}),
    "negative priority": adapter(priority=-5),
    "no drain": adapter(drainSeconds=0),
    "replace": adapter(onStalePrefixCache="Replace"),
}


@pytest.mark.parametrize("document", GOOD.values(), ids=GOOD.keys())
def test_accepted(cluster: ControlPlane, namespace: str, document: Json) -> None:
    stored = cluster.post(path_of(namespace) + "?dryRun=All&fieldValidation=Strict", document)
    for field, value in document["spec"].items():
        assert stored["spec"][field] == value or stored["spec"][field] == {"spread": "zone"} | value


WHITESPACE = "begin or end with a space"
BAD: list[tuple[str, Json, str]] = [
    ("name of 64 characters", adapter("a" * 64), "put a longer name into spec.servedName"),
    ("no base model", adapter(baseModel=REMOVE), "spec.baseModel: Required"),
    ("empty base model", adapter(baseModel=""), "spec.baseModel"),
    ("long base model", adapter(baseModel="x" * 513), "spec.baseModel"),
    ("no source", adapter(source=REMOVE), "spec.source: Required"),
    ("no uri", adapter(source={}), "spec.source.uri: Required"),
    ("empty served name", adapter(servedName=""), "spec.servedName"),
    ("served name with a space", adapter(servedName="sql "), WHITESPACE),
    ("served name with a line break", adapter(servedName="a\nb"), "control characters"),
    ("uri with a space", adapter(source__uri=" s3://bucket/x"), WHITESPACE),
    ("uri with a line break", adapter(source__uri="s3://bucket/x\n"), WHITESPACE),
    ("stray quote", adapter(source__uri='["s3://bucket/x'), "known are s3://bucket/prefix"),
    ("path", adapter(source__uri="/data/lora"), "known are s3://bucket/prefix"),
    ("unknown scheme", adapter(source__uri="gs://bucket/x"), "hf://org/repo[@revision]"),
    ("upper case scheme", adapter(source__uri="S3://bucket/x"), "known are s3://"),
    ("no bucket", adapter(source__uri="s3:///x"), "bucket name of 3 to 255"),
    ("short bucket", adapter(source__uri="s3://ab/x"), "bucket name of 3 to 255"),
    ("parent folder", adapter(source__uri="s3://bucket/a/../b"), "'..' are not allowed"),
    ("hub without repository", adapter(source__uri="hf://org"), "hf://org/repo[@revision][/subfolder]"),
    ("hub with an empty revision", adapter(source__uri="hf://org/repo@/x"), "hf://org/repo[@revision]"),
    ("hub dataset", adapter(source__uri="hf://datasets/org/x"), "model repositories"),
    ("relative file", adapter(source__uri="file://data/lora"), "file:///absolute/path"),
    ("root folder", adapter(source__uri="file:///"), "file:///absolute/path"),
    ("no host", adapter(source__uri="https:///x.zip"), "names a host"),
    ("password", adapter(source__uri="https://me:secret@h/x.zip"), "use secretRef"),
    ("no archive", adapter(source__uri="https://h/folder/"), "can't list files"),
    ("archive in the query only", adapter(source__uri="https://h/get?x=a.zip"), "can't list files"),
    ("long uri", adapter(source__uri="s3://bucket/" + "x" * 2048), "2048"),
    ("digest without algorithm", adapter(source__digest="0" * 64), "sha256: and 64 lower-case hex"),
    ("digest in upper case", adapter(source__digest="sha256:" + "A" * 64), "64 lower-case hex digits"),
    ("secret with a capital", adapter(source__secretRef={"name": "S3"}), "the name of a Secret"),
    ("secret without a name", adapter(source__secretRef={}), "secretRef.name: Required"),
    ("day", adapter(source__refreshInterval="1d"), "such as 30s, 10m or 1h30m"),
    ("bare number", adapter(source__refreshInterval="30"), "such as 30s"),
    ("negative duration", adapter(source__refreshInterval="-30s"), "such as 30s"),
    ("too seldom", adapter(source__refreshInterval="9000h"), "at most 8760h"),
    ("too often", adapter(source__refreshInterval="999ms"), "at least 1s"),
    ("label value", adapter(workers={"matchLabels": {"a": "b c"}}), "a label's value"),
    (
        "value in a list",
        adapter(workers={"matchExpressions": [{"key": "a", "operator": "In", "values": ["-b"]}]}),
        "a label's value",
    ),
    ("label key", adapter(workers={"matchExpressions": [{"key": "a b", "operator": "Exists"}]}), "a label's key"),
    ("In without values", adapter(workers={"matchExpressions": [{"key": "a", "operator": "In"}]}), "need values"),
    (
        "Exists with values",
        adapter(workers={"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}),
        "take no values",
    ),
    (
        "unknown operator",
        adapter(workers={"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}),
        '"In", "NotIn", "Exists", "DoesNotExist"',
    ),
    ("unknown strategy", adapter(distribution={"strategy": "most"}), '"all", "fixed", "percentage"'),
    ("fixed without replicas", adapter(distribution={"strategy": "fixed"}), "strategy fixed needs replicas"),
    ("replicas without fixed", adapter(distribution={"replicas": 2}), "this is strategy all"),
    (
        "replicas with percentage",
        adapter(distribution={"strategy": "percentage", "percentage": 5, "replicas": 2}),
        "replicas goes with strategy fixed only, and this is strategy percentage",
    ),
    ("percentage without one", adapter(distribution={"strategy": "percentage"}), "needs percentage: 0 to 100"),
    ("percentage without strategy", adapter(distribution={"percentage": 5}), "and this is strategy all"),
    (
        "percentage with fixed",
        adapter(distribution={"strategy": "fixed", "replicas": 1, "percentage": 5}),
        "percentage goes with strategy percentage only, and this is strategy fixed",
    ),
    ("negative replicas", adapter(distribution={"strategy": "fixed", "replicas": -1}), "greater than or equal to 0"),
    ("101 percent", adapter(distribution={"strategy": "percentage", "percentage": 101}), "less than or equal to 100"),
    ("half a replica", adapter(distribution={"strategy": "fixed", "replicas": 1.5}), "integer"),
    ("unknown spread", adapter(distribution={"spread": "node"}), '"zone", "none"'),
    ("negative drain", adapter(drainSeconds=-1), "greater than or equal to 0"),
    ("unknown answer to a stale cache", adapter(onStalePrefixCache="hold"), '"Hold", "Replace"'),
]


@pytest.mark.parametrize(("document", "reason"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_refused_with_a_way_out(cluster: ControlPlane, namespace: str, document: Json, reason: str) -> None:
    assert reason in refusal(cluster, namespace, document)


@pytest.mark.parametrize("document", GOOD.values(), ids=GOOD.keys())
def test_files_are_accepted_alike(document: Json) -> None:
    parse_adapter(document)


@pytest.mark.parametrize("document", [case[1] for case in BAD], ids=[case[0] for case in BAD])
def test_files_are_refused_alike(document: Json) -> None:
    with pytest.raises(InvalidManifest):
        parse_adapter(document)


def test_a_change_is_checked_like_a_creation(cluster: ControlPlane, namespace: str) -> None:
    cluster.post(path_of(namespace), adapter())
    with pytest.raises(ApiError, match="strategy fixed needs replicas"):
        cluster.patch(path_of(namespace, "sql"), {"spec": {"distribution": {"strategy": "fixed"}}})


def test_kubectl_apply_names_a_misspelt_field(cluster: ControlPlane, namespace: str) -> None:
    document = yaml.safe_dump(adapter(distribution={"stratgy": "all"}))
    said = cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=document, check=False)
    assert 'unknown field "spec.distribution.stratgy"' in said


STATUS: Json = {
    "observedGeneration": 1,
    "revision": "sha256:" + "0" * 64,
    "targets": 2,
    "loaded": 2,
    "failed": 0,
    "summary": "2/2",
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Loaded",
            "message": "2 of 2 workers have it loaded",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
    "workers": [{"name": "w-0", "state": "Loaded"}, {"name": "w-1", "state": "Loaded"}],
}


def apply_status(cluster: ControlPlane, namespace: str, manager: str, status: Json, force: bool = True) -> Json:
    document = {
        "apiVersion": "lora-sidecar.io/v1alpha1",
        "kind": "Adapter",
        "metadata": {"name": "sql"},
        "status": status,
    }
    query = f"?fieldManager={manager}&force={str(force).lower()}"
    return cluster.patch(path_of(namespace, "sql") + "/status" + query, document, media="application/apply-patch+yaml")


def test_kubectl_shows_the_columns(cluster: ControlPlane, namespace: str) -> None:
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(adapter()))
    apply_status(cluster, namespace, "lora-sidecar-pool", STATUS)
    for name in ("lora", "loras", "adapter", "adapters.lora-sidecar.io"):
        head, row = cluster.kubectl("get", name, "-n", namespace).splitlines()
        assert head.split() == ["NAME", "BASE", "SOURCE", "STRATEGY", "LOADED", "READY", "AGE"]
        assert row.split()[:6] == ["sql", "meta/base", "s3://bucket/loras/sql", "all", "2/2", "True"]
    assert "REVISION" in cluster.kubectl("get", "lora", "-n", namespace, "-o", "wide")


def test_kubectl_waits_for_ready(cluster: ControlPlane, namespace: str) -> None:
    cluster.post(path_of(namespace), adapter())
    apply_status(cluster, namespace, "lora-sidecar-pool", STATUS)
    assert "condition met" in cluster.kubectl(
        "wait", "-n", namespace, "--for=condition=Ready", "lora/sql", "--timeout=10s"
    )


def test_kubectl_explains_every_field(cluster: ControlPlane) -> None:
    def said(of: str) -> str:
        return cluster.kubectl("explain", of)

    spec = said("lora.spec")
    for field in ("baseModel", "servedName", "source", "workers", "distribution", "priority", "drainSeconds"):
        assert field in spec
    assert "LoRA adapter" in said("lora")
    assert "at least one worker" in said("lora.spec.distribution.percentage")
    assert said("lora.spec.distribution.strategy").split("ENUM:")[1].split()[:3] == ["all", "fixed", "percentage"]


def test_the_status_is_a_subresource(cluster: ControlPlane, namespace: str) -> None:
    created = cluster.post(path_of(namespace), adapter() | {"status": {"loaded": 7}})
    assert "status" not in created
    written = apply_status(cluster, namespace, "lora-sidecar-pool", STATUS)
    assert written["status"] == STATUS
    assert written["metadata"]["generation"] == created["metadata"]["generation"]
    document = {"spec": {"priority": 9}, "status": {"loaded": 3}}
    patched = cluster.patch(path_of(namespace, "sql") + "/status", document)
    assert (patched["spec"]["priority"], patched["status"]["loaded"]) == (0, 3)


def test_one_manager_takes_back_what_it_no_longer_says(cluster: ControlPlane, namespace: str) -> None:
    cluster.post(path_of(namespace), adapter())
    apply_status(cluster, namespace, "lora-sidecar-a", STATUS)
    shorter = copy.deepcopy(STATUS)
    shorter["workers"] = shorter["workers"][:1]
    del shorter["revision"]
    written = apply_status(cluster, namespace, "lora-sidecar-a", shorter)
    assert written["status"] == shorter


def test_another_manager_is_a_conflict_that_names_it(cluster: ControlPlane, namespace: str) -> None:
    cluster.post(path_of(namespace), adapter())
    apply_status(cluster, namespace, "lora-sidecar-a", STATUS)
    other = STATUS | {"loaded": 1}
    with pytest.raises(ApiError, match="lora-sidecar-a") as conflict:
        apply_status(cluster, namespace, "lora-sidecar-b", other, force=False)
    assert conflict.value.code == 409


@pytest.mark.parametrize(
    "status",
    [
        {"workers": [{"name": f"w-{i}", "state": "Loaded"} for i in range(51)]},
        {"workers": [{"name": "w", "state": "Sleeping"}]},
        {"targets": -1},
        {
            "conditions": [
                {
                    "type": "Ready",
                    "status": "Yes",
                    "reason": "R",
                    "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ]
        },
    ],
    ids=["51 workers", "unknown state", "negative", "unknown condition status"],
)
def test_a_wrong_status_is_refused(cluster: ControlPlane, namespace: str, status: Json) -> None:
    cluster.post(path_of(namespace), adapter())
    with pytest.raises(ApiError) as refused:
        apply_status(cluster, namespace, "lora-sidecar-a", status)
    assert refused.value.code == 422


def test_fifty_workers_fit(cluster: ControlPlane, namespace: str) -> None:
    cluster.post(path_of(namespace), adapter())
    workers = [{"name": f"w-{i}", "state": "Failed", "message": "x" * 512} for i in range(50)]
    assert len(apply_status(cluster, namespace, "lora-sidecar-a", {"workers": workers})["status"]["workers"]) == 50


def test_a_deletion_needs_nobody(cluster: ControlPlane, namespace: str) -> None:
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(adapter()))
    assert "deleted" in cluster.kubectl("delete", "lora/sql", "-n", namespace, "--timeout=10s")
    wait_until(lambda: not cluster.exists(path_of(namespace, "sql")), "the adapter is gone")
