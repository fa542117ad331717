"""Adapters with a Secret of their own, against a real S3 server: whose credentials are used, how they are renewed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest

from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.edges.origins.s3 import S3Clients
from sidecar.model import Adapter
from sidecar.ports import OriginDenied
from sidecar.settings import Settings
from tests.adapters import adapter, revision
from tests.edges.fetching import fetched, ignore, proxy, s3, store, upload, wanted
from tests.edges.test_fetch import SomePeers
from tests.s3proxy import Proxy
from tests.s3server import S3Server

__all__ = ["proxy", "s3", "store"]

WRONG = "wrong-and-secret"


class Vault:
    """Secrets that a test changes; what is refused is looked up anew, as everything else is not."""

    def __init__(self, **data: Mapping[str, str]) -> None:
        self.data = dict(data)
        self.known: dict[str, Mapping[str, str]] = {}
        self.reads = 0

    async def __call__(self, adapter: Adapter, refused: Mapping[str, str] | None = None) -> Mapping[str, str]:
        name = adapter.source.secret or ""
        if name not in self.known or refused is not None:
            self.reads += 1
            self.known[name] = self.data[name]
        return self.known[name]


def keys(s3: S3Server, **other: str) -> dict[str, str]:
    return {name: s3.env[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")} | other


@pytest.fixture
async def vault() -> Vault:
    return Vault()


@pytest.fixture
async def fetcher(vault: Vault, store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OriginFetcher]:
    """One whose process has credentials that the server refuses."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-process-has-another")
    running = OriginFetcher(Settings(), store, credentials=vault)
    yield running
    await running.close()


def needs_signatures(s3: S3Server) -> None:
    if not s3.checks_signatures:
        pytest.skip("moto's server accepts any key")


async def test_the_credentials_of_a_secret_are_used_for_its_adapters_alone(
    s3: S3Server, vault: Vault, fetcher: OriginFetcher
) -> None:
    needs_signatures(s3)
    files = adapter("secret")
    uri = upload(s3, "secret", files)
    vault.data = {"right": keys(s3), "wrong": keys(s3, AWS_SECRET_ACCESS_KEY=WRONG)}
    assert (await fetched(fetcher, wanted(uri, secret="right"))).revision == revision(files)
    for other in (wanted(uri), wanted(uri, secret="wrong")):
        with pytest.raises(OriginDenied, match="SignatureDoesNotMatch") as raised:
            await fetcher.listing(other)
        assert WRONG not in str(raised.value)
        assert ("(with the Secret 'wrong')" in str(raised.value)) == (other.source.secret == "wrong")
    assert (await fetcher.listing(wanted(uri, secret="right"))).files


async def test_rotated_credentials_are_read_again_and_used_at_once(
    s3: S3Server, proxy: Proxy, vault: Vault, fetcher: OriginFetcher
) -> None:
    needs_signatures(s3)
    files = adapter("rotated")
    one = wanted(upload(s3, "rotated", files), secret="s")
    vault.data = {"s": keys(s3, AWS_SECRET_ACCESS_KEY=WRONG)}
    with pytest.raises(OriginDenied, match="SignatureDoesNotMatch"):
        await fetcher.listing(one)
    assert vault.reads == 2  # the second time to see whether it was changed; unchanged, so not tried again
    vault.data = {"s": keys(s3)}
    listing = await fetcher.listing(one)
    assert vault.reads == 3
    # Between the listing and the download too.
    vault.known = {"s": keys(s3, AWS_SECRET_ACCESS_KEY=WRONG)}
    assert (await fetcher.fetch(one, listing, None, ignore)).revision == revision(files)


async def test_a_download_that_peers_serve_reads_no_secret(s3: S3Server, vault: Vault, store: AdapterStore) -> None:
    files = adapter("known")
    one = wanted(upload(s3, "known", files), secret="s")
    peers = SomePeers(files, 1.0)
    fetcher = OriginFetcher(Settings(), store, credentials=vault, peers=peers)
    vault.data = {"s": keys(s3)}
    listing = await fetcher.listing(one)
    vault.known, vault.reads = {}, 0
    assert (await fetcher.fetch(one, listing, None, ignore)).revision == revision(files)
    assert vault.reads == 0
    await fetcher.close()
    peers.close()


def test_each_set_of_credentials_has_a_client_of_its_own_and_old_ones_are_let_go(s3: S3Server) -> None:
    clients = S3Clients(most=2)
    first = keys(s3, AWS_SESSION_TOKEN="first")
    client = clients.get(first, "here")
    other = clients.get(keys(s3, AWS_SESSION_TOKEN="other"), "here")
    assert clients.get(dict(first), "here") is client
    assert clients.get({}, "here") not in (client, other)
    assert clients.get(first, "here") is client
    assert clients.get(keys(s3, AWS_SESSION_TOKEN="other"), "here") is not other
    frozen = client.raw._request_signer._credentials.get_frozen_credentials()
    assert (frozen.access_key, frozen.token) == (s3.env["AWS_ACCESS_KEY_ID"], "first")
    clients.close()
