"""spec.source.secretRef on a real API server: read by name, only where a Role names the Secret, and never told."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.edges.kubernetes.api import Api, PodIdentity
from sidecar.edges.kubernetes.secrets import Secrets
from sidecar.model import Adapter, Source
from sidecar.ports import OriginDenied, OriginError
from tests.adapters import adapter
from tests.kubernetes.controlplane import API_HOST, ControlPlane, wait_until
from tests.kubernetes.manifests import DEPLOY
from tests.kubernetes.pool import BASE_MODEL, Pool
from tests.kubernetes.workers import ACCOUNT, connect, make_pod, prepare
from tests.s3server import ACCESS_KEY, SECRET_KEY, S3Server

Json = dict[str, Any]
NAME = "s3-credentials"
ROLE = DEPLOY / "samples/secrets-role.yaml"
HIDDEN = "not-to-be-seen-anywhere"


def put_secret(cluster: ControlPlane, namespace: str, data: dict[str, str], name: str = NAME) -> None:
    """Create the Secret, or give it other data."""
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    document = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": encoded}
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(document))


def allow(cluster: ControlPlane, namespace: str, account: str = "default") -> None:
    """The sample's Role, bound to this service account."""
    text = ROLE.read_text()
    assert "    name: default" in text
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=text.replace("name: default", f"name: {account}"))
    may = ("auth", "can-i", "get", f"secrets/{NAME}", "-n", namespace)
    user = f"--as=system:serviceaccount:{namespace}:{account}"
    wait_until(lambda: cluster.kubectl(*may, user, check=False).startswith("yes"), "the Role is in force")


def s3_keys(secret: str = HIDDEN) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": secret}


class Reader:
    """The Secrets of one agent, on a clock that the test moves."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.now = 0.0
        self.secrets: Secrets

    def adapter(self, secret: str = NAME, uri: str = "s3://bucket/a") -> Adapter:
        source = Source(uri=uri, secret=secret)
        return Adapter(namespace=self.namespace, name="a", base_model="base", served_name="a", source=source, uid="a")

    async def denied(self, one: Adapter) -> str:
        """What is said, much later than whatever was asked before."""
        self.now += 1000
        with pytest.raises(OriginDenied) as raised:
            await self.secrets(one)
        assert HIDDEN not in str(raised.value)
        return str(raised.value)

    def gets(self) -> list[str]:
        """The Secrets that this agent has asked for, and nothing but GET by name."""
        user = f"system:serviceaccount:{self.namespace}:{ACCOUNT}"
        asked = [e for e in self.cluster.audit(user) if e["user"]["username"] == user]
        asked = [e for e in asked if e["objectRef"]["resource"] == "secrets"]
        assert {e["verb"] for e in asked} <= {"get"}
        return [e["objectRef"]["name"] for e in asked]


@pytest.fixture
async def reader(cluster: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Reader]:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    made = Reader(cluster, namespace)
    api, me = await connect(cluster, namespace, pod, tmp_path)
    made.secrets = Secrets(api, me, clock=lambda: made.now)
    yield made
    await api.close()


async def test_no_secret_is_read_without_a_role_and_then_only_the_named_one(reader: Reader) -> None:
    put_secret(reader.cluster, reader.namespace, s3_keys())
    put_secret(reader.cluster, reader.namespace, s3_keys(), name="another")
    said = await reader.denied(reader.adapter())
    for part in (
        f"Secret {reader.namespace}/{NAME}",
        f"ServiceAccount {reader.namespace}:{ACCOUNT} may not read it",
        "Role lora-sidecar-secrets",
        f"resourceNames [{NAME}]",
        "deploy/samples/secrets-role.yaml",
    ):
        assert part in said
    assert len(said) < 256 + len(reader.namespace), "an annotation's message would cut it"
    allow(reader.cluster, reader.namespace, ACCOUNT)
    reader.now += 3
    assert await reader.secrets(reader.adapter()) == s3_keys()
    assert f"Secret {reader.namespace}/another" in await reader.denied(reader.adapter("another"))


async def test_a_missing_secret_and_missing_keys_are_named(reader: Reader) -> None:
    allow(reader.cluster, reader.namespace, ACCOUNT)
    assert f"Secret {reader.namespace}/{NAME} does not exist" in await reader.denied(reader.adapter())
    put_secret(reader.cluster, reader.namespace, {"AWS_ACCESS_KEY_ID": HIDDEN, "password": HIDDEN})
    assert f"{NAME} has no key 'AWS_SECRET_ACCESS_KEY'" in await reader.denied(reader.adapter())
    assert f"{NAME} has no key 'HF_TOKEN'" in await reader.denied(reader.adapter(uri="hf://org/repo"))
    assert f"{NAME} has no key 'host'" in await reader.denied(reader.adapter(uri="https://h.example/a.tgz"))


async def test_it_is_read_once_for_a_while_and_again_when_the_origin_refused_it(reader: Reader) -> None:
    allow(reader.cluster, reader.namespace, ACCOUNT)
    put_secret(reader.cluster, reader.namespace, s3_keys("first"))
    one = reader.adapter()
    first = await reader.secrets(one)
    put_secret(reader.cluster, reader.namespace, s3_keys("second"))
    reader.now += 10
    assert await reader.secrets(one) == first == s3_keys("first")
    assert await reader.secrets(one, refused=first) == s3_keys("second")
    assert await reader.secrets(one, refused=s3_keys("second")) == s3_keys("second")  # it was read just now
    put_secret(reader.cluster, reader.namespace, s3_keys("third"))
    reader.now += 31
    assert await reader.secrets(one) == s3_keys("third")
    wait_until(lambda: len(reader.gets()) == 3, f"three reads; are {reader.gets()}")


async def test_an_api_server_that_is_away_is_no_denial() -> None:
    async def no_authorization(again: bool) -> str:
        return ""

    me = PodIdentity(namespace="ns", pod="w-0", uid="u")
    async with aiohttp.ClientSession() as session:
        secrets = Secrets(Api("http://127.0.0.1:1", session, no_authorization), me)
        source = Source(uri="s3://bucket/a", secret=NAME)
        with pytest.raises(OriginError, match=f"Secret ns/{NAME} can't be read now") as raised:
            await secrets(Adapter(namespace="ns", name="a", base_model="b", served_name="a", source=source, uid="a"))
    assert not isinstance(raised.value, OriginDenied)


def test_a_pool_fetches_with_the_secret_and_shows_what_is_missing(pool: Pool, cluster: ControlPlane) -> None:
    with S3Server(API_HOST) as s3:
        if not s3.checks_signatures:
            pytest.skip("moto's server accepts any key")
        for path, data in adapter("private", base_model_name_or_path=BASE_MODEL).items():
            s3.put("bucket", f"private/{path}", data)
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_ENDPOINT_URL": s3.endpoint, "AWS_REGION": "us-east-1"}
        put_secret(cluster, pool.namespace, keys | {"AWS_SECRET_ACCESS_KEY": HIDDEN})
        put_secret(cluster, pool.namespace, keys | {"AWS_SECRET_ACCESS_KEY": SECRET_KEY}, name="not-in-the-role")
        allow(cluster, pool.namespace)
        pool.install(1)
        for name, secret in (("private", NAME), ("forbidden", "not-in-the-role")):
            pool.apply(name, source={"uri": "s3://bucket/private", "secretRef": {"name": secret}})
        wait_until(lambda: "SignatureDoesNotMatch" in message(pool, "private"), "the wrong key is tried")
        put_secret(cluster, pool.namespace, keys | {"AWS_SECRET_ACCESS_KEY": SECRET_KEY})
        (worker,) = pool.until_loaded("private", 1, timeout=60)
        assert "may not read it" in message(pool, "forbidden")
        assert "resourceNames [not-in-the-role]" in message(pool, "forbidden")
        for told in (pool.log(worker), json.dumps(pool.pods()), json.dumps(pool.adapter("private"))):
            assert HIDDEN not in told
            assert SECRET_KEY not in told


def message(pool: Pool, name: str) -> str:
    """What the only worker says about an adapter on its own pod."""
    (pod,) = pool.pods()
    text = pod["metadata"].get("annotations", {}).get(f"adapter.lora-sidecar.io/{name}", "{}")
    return str(json.loads(text).get("message", ""))
