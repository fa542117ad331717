"""What the fetcher's tests share: a fetcher with its own store, adapters behind URIs, a proxy before the S3 server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.model import Adapter, Source
from sidecar.ports import Fetched
from sidecar.settings import Settings
from tests.adapters import Files
from tests.s3proxy import Proxy
from tests.s3server import S3Server


def wanted(uri: str, name: str = "a", *, digest: str | None = None, secret: str | None = None) -> Adapter:
    source = Source(uri=uri, digest=digest, secret=secret)
    return Adapter(namespace="ns", name=name, base_model="base-model", served_name=name, source=source, uid=name)


def ignore(_: int, __: int) -> None:
    """A progress nobody looks at."""


async def fetched(fetcher: OriginFetcher, adapter: Adapter, revision: str | None = None) -> Fetched:
    return await fetcher.fetch(adapter, await fetcher.listing(adapter), revision, ignore)


def content(directory: str) -> Files:
    root = Path(directory)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def upload(s3: S3Server, prefix: str, files: Files) -> str:
    """The URI of these files under `bucket/prefix`."""
    for path, data in files.items():
        s3.put("bucket", f"{prefix}/{path}", data)
    return f"s3://bucket/{prefix}"


async def noted(adapters: Path, count: int) -> None:
    """Returns when so many parts and files of the downloads in this directory have been noted as whole."""
    journals = adapters / "tmp/staging"
    while sum(journal.read_bytes().count(b"\n") - 1 for journal in journals.glob("*/journal")) < count:  # noqa: ASYNC110  # a file has no event
        await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(autouse=True)
async def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """All S3 requests of this process go through it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    async with Proxy(s3.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    opened = AdapterStore.open(str(tmp_path / "adapters"))
    yield opened
    opened.close()


@pytest.fixture
async def fetcher(store: AdapterStore) -> AsyncIterator[OriginFetcher]:
    running = OriginFetcher(Settings(), store)
    yield running
    await running.close()
