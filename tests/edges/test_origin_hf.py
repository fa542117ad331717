"""Origin hf:// against a stub of the hub."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.edges.origins import Origins
from sidecar.model import MAX_FILES, Listing, RemoteFile
from sidecar.ports import AdapterRejected, OriginChanged, OriginDenied, OriginError
from sidecar.settings import Settings
from tests.adapters import adapter, revision
from tests.edges.fetching import content, fetched, fetcher, store, wanted
from tests.hub import Hub

__all__ = ["fetcher", "store"]


@pytest.fixture(autouse=True)
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    async with Hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


async def listed(uri: str) -> Listing:
    origins = Origins(Settings())
    try:
        return await origins.open(uri).listing()
    finally:
        await origins.close()


async def test_files_come_with_the_commit_and_the_hashes_that_the_hub_knows(hub: Hub) -> None:
    files = adapter("hub") | {"sub/ü b.txt": b"text", "training_args.bin": b"not weights"}
    commit = hub.commit("org/repo", files)
    listing = await listed("hf://org/repo")
    assert {file.path: file.size for file in listing.files} == {path: len(data) for path, data in files.items()}
    etags = {file.path: file.etag for file in listing.files}
    weights = hashlib.sha256(files["adapter_model.safetensors"]).hexdigest()
    assert etags["adapter_model.safetensors"] == f"sha256:{weights}@{commit}"
    blob = hashlib.sha1(b"blob 4\0text").hexdigest()
    assert etags["sub/ü b.txt"] == f"git:{blob}@{commit}"


async def test_a_repository_becomes_a_revision(hub: Hub, fetcher: OriginFetcher) -> None:
    files = adapter("hub") | {"sub/ü b.txt": b"text", "README.md": b"# hello"}
    hub.commit("org/repo", files)
    result = await fetched(fetcher, wanted("hf://org/repo"))
    assert result.revision == revision(files)
    assert content(result.path) == files


async def test_a_subfolder_of_a_revision_is_an_adapter(hub: Hub, fetcher: OriginFetcher) -> None:
    files = adapter("inner")
    hub.commit("org/repo", {"other.txt": b""} | {f"my loras/a/{path}": data for path, data in files.items()}, "pr/1")
    result = await fetched(fetcher, wanted("hf://org/repo@pr%2F1/my%20loras/a"))
    assert content(result.path) == files


async def test_reads_stay_at_the_commit_that_was_listed(hub: Hub, fetcher: OriginFetcher) -> None:
    old, new = adapter("old"), adapter("new")
    hub.commit("org/repo", old)
    listing = await fetcher.listing(wanted("hf://org/repo"))
    hub.commit("org/repo", new)
    result = await fetcher.fetch(wanted("hf://org/repo"), listing, None, lambda _, __: None)
    assert content(result.path) == old
    assert (await fetched(fetcher, wanted("hf://org/repo"))).revision == revision(new)


async def test_a_hash_that_is_here_already_is_not_fetched(hub: Hub, fetcher: OriginFetcher) -> None:
    files = adapter("same")
    hub.commit("org/repo", files)
    await fetched(fetcher, wanted("hf://org/repo"))
    hub.commit("org/repo", files | {"README.md": b"more"})
    hub.asked.clear()
    await fetched(fetcher, wanted("hf://org/repo"))
    assert [kind for kind, *_ in hub.asked if kind == "cdn"] == []


async def test_the_token_goes_to_the_hub_alone(hub: Hub, store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    hub.commit("org/repo", adapter("private"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    fetcher = OriginFetcher(Settings(), store)
    await fetched(fetcher, wanted("hf://org/repo"))
    await fetcher.close()
    assert {authorization for kind, _, authorization in hub.asked if kind == "hub"} == {"Bearer hf_secret"}
    assert {authorization for kind, _, authorization in hub.asked if kind == "cdn"} == {""}


async def test_a_token_that_is_missing_or_wrong_is_said_without_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    hub.commit("org/repo", adapter("private"))
    with pytest.raises(OriginDenied, match=r"hf://org/repo@main at .* \(without HF_TOKEN\): 401 Invalid token"):
        await listed("hf://org/repo")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OriginDenied, match="401 Invalid token") as raised:
        await listed("hf://org/repo")
    assert "hf_wrong" not in str(raised.value)


async def test_what_is_not_there_is_denied(hub: Hub) -> None:
    hub.commit("org/repo", adapter("there"))
    for uri in ("hf://org/other", "hf://org/repo@v9", "hf://org/repo/no/folder"):
        with pytest.raises(OriginDenied, match="404"):
            await listed(uri)


async def test_too_many_files_are_rejected(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.hub.PAGE", 1000)
    hub.commit("org/repo", {f"{number}.txt": b"" for number in range(MAX_FILES + 1)})
    with pytest.raises(AdapterRejected, match=f"may have {MAX_FILES}"):
        await listed("hf://org/repo")


async def test_a_list_that_goes_on_elsewhere_is_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("org/repo", adapter("there") | {f"{number}.txt": b"" for number in range(5)})
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint.replace("127.0.0.1", "localhost"))
    with pytest.raises(OriginError, match=r"at another host, 127\.0\.0\.1"):
        await listed("hf://org/repo")


async def test_what_no_hub_listed_is_not_read(hub: Hub) -> None:
    origins = Origins(Settings())
    origin = origins.open("hf://org/repo")
    for etag in ("", '"abc"', "sha256:" + "0" * 64, "sha256:x@main"):
        with pytest.raises(OriginChanged, match="not listed by a hub"):
            await origin.read(RemoteFile(path="x", size=1, etag=etag), 0, 1, lambda _: None)
    await origins.close()


async def test_the_hubs_own_client_understands_the_stub(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    files = adapter("client") | {"sub/ü b.txt": b"text"}
    commit = hub.commit("org/repo", files)
    program = (
        "import sys, huggingface_hub\n"
        "print(huggingface_hub.snapshot_download('org/repo', cache_dir=sys.argv[1], token='hf_secret'))\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), env=environment, stdout=PIPE, stderr=PIPE
    )
    out, err = await client.communicate()
    assert client.returncode == 0, err.decode()
    snapshot = Path(out.decode().strip().splitlines()[-1])
    assert snapshot.name == commit
    assert content(str(snapshot)) == files
