"""spec.source.secretRef where the label alone injects: refused clearly, granted as documented, rotated, renamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.adapters import adapter
from tests.kubernetes.controlplane import API_HOST, ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY, POOL, bind_namespace
from tests.kubernetes.pool import BASE_MODEL, Pool
from tests.kubernetes.test_secrets import HIDDEN, NAME, ROLE, message, put_secret
from tests.s3server import ACCESS_KEY, SECRET_KEY, S3Server

OTHER = "s3-credentials-new"


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with S3Server(API_HOST) as server:
        if not server.checks_signatures:
            pytest.skip("moto's server accepts any key")
        for path, data in adapter("private", base_model_name_or_path=BASE_MODEL).items():
            server.put("bucket", f"private/{path}", data)
        yield server


@pytest.fixture
def labelled(policies: ControlPlane, pool: Pool, tmp_path: Path) -> Pool:
    """One worker whose Deployment has nothing but the label."""
    bind_namespace(policies, pool.namespace, tmp_path)
    document = pool.plain(1, 8)
    document["spec"]["template"]["metadata"]["labels"][POOL] = pool.label
    service = (DEPLOY / "samples" / "pool-service.yaml").read_text().replace("llama-lora", pool.label)
    policies.kubectl("apply", "-n", pool.namespace, "-f", "-", stdin=service)
    policies.kubectl("apply", "-n", pool.namespace, "-f", "-", stdin=yaml.safe_dump(document))
    pool.until_ready(1)
    return pool


def keys(s3: S3Server, secret: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_REGION": "us-east-1",
    }


def state(pool: Pool) -> str:
    return next(iter(pool.states("private").values()), "")


def grant(pool: Pool, *names: str) -> None:
    """The sample's Role as its comment says: with the Secrets' names in it."""
    text = ROLE.read_text().replace(f"[{NAME}]", json.dumps(list(names)))
    pool.cluster.kubectl("apply", "-n", pool.namespace, "-f", "-", stdin=text)


def point_at(pool: Pool, secret: str, **more: Any) -> None:
    pool.apply("private", source={"uri": "s3://bucket/private", "secretRef": {"name": secret}} | more)


@pytest.mark.slow
def test_a_secret_is_refused_granted_rotated_and_renamed(labelled: Pool, s3: S3Server) -> None:
    pool, cluster = labelled, labelled.cluster
    put_secret(cluster, pool.namespace, keys(s3, HIDDEN))
    point_at(pool, NAME)
    wait_until(lambda: state(pool) == "Failed", "the Secret is refused")
    said = message(pool, "private")
    assert f"Secret {pool.namespace}/{NAME}" in said
    assert "Role lora-sidecar-secrets" in said
    assert "secrets-role.yaml" in said
    assert "tried again" in said
    # Granted, and the key is wrong; rotated, and it is right.
    grant(pool, NAME)
    wait_until(lambda: "SignatureDoesNotMatch" in message(pool, "private"), "the Role is in force", 75)
    put_secret(cluster, pool.namespace, keys(s3, SECRET_KEY))
    (worker,) = pool.until_loaded("private", 1, timeout=75)
    # Another Secret: what serves goes on while it is refused, and the new content comes once it is not.
    with pool.watched("private"):
        put_secret(cluster, pool.namespace, keys(s3, SECRET_KEY), name=OTHER)
        for path, data in adapter("other", base_model_name_or_path=BASE_MODEL).items():
            s3.put("bucket", f"private/{path}", data)
        before = revision(pool)
        point_at(pool, OTHER)
        wait_until(lambda: f"resourceNames [{OTHER}]" in message(pool, "private"), "the new Secret is refused")
        assert state(pool) == "Loaded"
        assert revision(pool) == before
    grant(pool, NAME, OTHER)
    wait_until(lambda: revision(pool) not in ("", before), "the new content is there", 75)
    pool.until_loaded("private", 1)
    everything = cluster.kubectl("get", "pods,loras,events,deployments", "-n", pool.namespace, "-o", "json")
    for told in (pool.log(worker), everything):
        assert HIDDEN not in told
        assert SECRET_KEY not in told


def revision(pool: Pool) -> str:
    """The revision that the only worker says it serves."""
    (pod,) = pool.pods()
    text = pod["metadata"].get("annotations", {}).get("adapter.lora-sidecar.io/private", "{}")
    return str(json.loads(text).get("revision", ""))
