"""Origins https:// and http://: archives on web servers of every kind, redirects, certificates, addresses."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from sidecar.edges.disk import AdapterStore
from sidecar.edges.fetch import OriginFetcher
from sidecar.edges.origins import BLOCK, Origin, Origins
from sidecar.edges.origins.web import GuardedResolver, RefusedAddress
from sidecar.model import RemoteFile
from sidecar.ports import AdapterRejected, OriginChanged, OriginDenied, OriginError
from sidecar.settings import Settings
from tests.adapters import adapter, revision, tar_gz
from tests.edges.fetching import fetched, store, wanted

__all__ = ["store"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """A web server; `answer` is set by the test. Everything that was asked is in `requests`."""

    def __init__(self) -> None:
        self.requests: list[web.BaseRequest] = []
        self.url = ""
        self.answer: Handler = self.missing
        self._runners: list[web.AppRunner] = []

    async def missing(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    async def serve(self, tls: ssl.SSLContext | None = None) -> str:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.requests.append(request)
            return await self.answer(request)

        application = web.Application()
        application.router.add_get("/{path:.*}", handle, allow_head=False)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
        return self.url

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    running = Site()
    await running.serve()
    yield running
    await running.close()


@pytest.fixture
async def origins() -> AsyncIterator[Origins]:
    opened = Origins(Settings(allow_http=True))
    yield opened
    await opened.close()


async def content(origin: Origin, file: RemoteFile, start: int = 0, stop: int | None = None) -> bytes:
    blocks: list[bytes] = []
    await origin.read(file, start, file.size if stop is None else stop, blocks.append)
    assert all(0 < len(block) <= BLOCK for block in blocks)
    return b"".join(blocks)


def file_server(path: Path) -> Handler:
    """With ranges, ETag, Last-Modified, If-Match: aiohttp's own."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.FileResponse(path)

    return answer


def plain(data: bytes, **headers: str) -> Handler:
    """Without ranges: it always sends everything."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=data, headers=headers)

    return answer


async def test_an_archive_becomes_a_revision(site: Site, tmp_path: Path, store: AdapterStore) -> None:
    files = adapter("web")
    (tmp_path / "a.tgz").write_bytes(tar_gz(files))
    site.answer = file_server(tmp_path / "a.tgz")
    fetcher = OriginFetcher(Settings(allow_http=True), store)
    result = await fetched(fetcher, wanted(f"{site.url}/some/a.tgz?signature=secret"))
    assert result.revision == revision(files)
    assert [file.path for file in result.listing.files] == ["a.tgz"]
    assert {request.query_string for request in site.requests} == {"signature=secret"}
    await fetcher.close()


async def test_ranges_are_asked_for_by_exactly_the_version_listed(site: Site, tmp_path: Path, origins: Origins) -> None:
    data = os.urandom(2 * BLOCK + 77)
    (tmp_path / "a.zip").write_bytes(data)
    site.answer = file_server(tmp_path / "a.zip")
    origin = origins.open(f"{site.url}/a.zip")
    (file,) = (await origin.listing()).files
    assert (file.path, file.size) == ("a.zip", len(data))
    assert await content(origin, file) == data
    assert await content(origin, file, 5, BLOCK + 9) == data[5 : BLOCK + 9]
    assert [request.headers.get("Range") for request in site.requests] == ["bytes=0-0", None, f"bytes=5-{BLOCK + 8}"]
    assert {request.headers.get("If-Match") for request in site.requests[1:]} == {file.etag}


async def test_a_server_without_ranges_or_etags_serves_as_well(site: Site, origins: Origins) -> None:
    data = os.urandom(2 * BLOCK)
    site.answer = plain(data, **{"Last-Modified": "Tue, 01 Dec 2026 00:00:00 GMT"})
    origin = origins.open(f"{site.url}/a.zip")
    (file,) = (await origin.listing()).files
    assert file.etag == "modified:Tue, 01 Dec 2026 00:00:00 GMT"
    assert await content(origin, file) == data
    assert await content(origin, file, BLOCK - 3, BLOCK + 9) == data[BLOCK - 3 : BLOCK + 9]


@pytest.mark.parametrize(
    "etags",
    [('"1"', '"2"'), ('W/"1"', 'W/"2"'), ('"1"', ""), ("", '"2"')],
)
async def test_another_etag_is_a_change_even_where_the_server_ignores_if_match(
    etags: tuple[str, str], site: Site, origins: Origins
) -> None:
    origin = origins.open(f"{site.url}/a.zip")
    site.answer = plain(b"first", **({"ETag": etags[0]} if etags[0] else {}))
    (file,) = (await origin.listing()).files
    site.answer = plain(b"other", **({"ETag": etags[1]} if etags[1] else {}))
    with pytest.raises(OriginChanged):
        await content(origin, file)


async def test_a_file_replaced_since_its_listing_is_not_read(site: Site, tmp_path: Path, origins: Origins) -> None:
    (tmp_path / "a.zip").write_bytes(b"first")
    site.answer = file_server(tmp_path / "a.zip")
    origin = origins.open(f"{site.url}/a.zip")
    (file,) = (await origin.listing()).files
    (tmp_path / "a.zip").write_bytes(b"another one")
    with pytest.raises(OriginChanged, match="412"):
        await content(origin, file)
    site.answer = site.missing
    with pytest.raises(OriginChanged, match="404"):
        await content(origin, file)


async def test_an_etag_that_looks_like_a_known_hash_is_none(site: Site, origins: Origins) -> None:
    site.answer = plain(b"x", ETag="sha256:" + "0" * 64)
    (file,) = (await origins.open(f"{site.url}/a.zip").listing()).files
    assert file.etag == ""


async def test_an_answer_that_ends_early_is_an_error_of_the_moment(site: Site, origins: Origins) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"x" * 10)
        assert request.transport is not None
        request.transport.close()
        return response

    site.answer = cut
    with pytest.raises(OriginError, match=r"a\.zip") as raised:
        await content(origins.open(f"{site.url}/a.zip"), RemoteFile(path="a.zip", size=1000))
    assert type(raised.value) is OriginError


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, OriginDenied),
        (403, OriginDenied),
        (401, OriginDenied),
        (410, OriginDenied),
        (503, OriginError),
        (429, OriginError),
    ],
)
async def test_statuses_are_sorted_into_the_moments_and_ours(
    status: int, kind: type[OriginError], site: Site, origins: Origins
) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status)

    site.answer = answer
    with pytest.raises(OriginError, match=f"/a.zip: {status}") as raised:
        await origins.open(f"{site.url}/a.zip?signature=secret").listing()
    assert type(raised.value) is kind
    assert "secret" not in str(raised.value)


async def test_a_size_that_is_not_told_is_denied(site: Site, origins: Origins) -> None:
    async def chunked(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"x")
        return response

    site.answer = chunked
    with pytest.raises(OriginDenied, match="doesn't say the file's size"):
        await origins.open(f"{site.url}/a.zip").listing()


async def test_a_server_that_is_not_there_is_an_error_of_the_moment(origins: Origins) -> None:
    with pytest.raises(OriginError, match=r"http://127\.0\.0\.1:1/a\.zip") as raised:
        await origins.open("http://127.0.0.1:1/a.zip").listing()
    assert type(raised.value) is OriginError


def redirect(*locations: str) -> Handler:
    """One after the other; behind the last there is the file."""
    left = list(locations)

    async def answer(_: web.Request) -> web.StreamResponse:
        if left:
            return web.Response(status=302, headers={"Location": left.pop(0)})
        return web.Response(body=b"data")

    return answer


async def test_redirects_are_followed_to_a_limit(site: Site, origins: Origins) -> None:
    site.answer = redirect("b", "/c/d", f"{site.url}/e?x=%2F+", "../f", "//" + site.url.partition("//")[2] + "/g")
    origin = origins.open(f"{site.url}/a.zip")
    assert (await origin.listing()).files[0].size == 4
    assert [request.raw_path for request in site.requests] == ["/a.zip", "/b", "/c/d", "/e?x=%2F+", "/f", "/g"]
    site.answer = redirect(*["/next"] * 6)
    with pytest.raises(OriginDenied, match="redirects more than 5 times"):
        await origin.listing()


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:169.254.169.254]/x",
        "http://2852039166/x",
        "http://0xa9fea9fe/x",
        "http://0251.0376.0251.0376/x",
        "file:///etc/passwd",
        "gopher://127.0.0.1/x",
    ],
)
async def test_redirects_to_where_no_adapter_comes_from_are_denied(location: str, site: Site, origins: Origins) -> None:
    site.answer = redirect(location)
    with pytest.raises(OriginDenied):
        await origins.open(f"{site.url}/a.zip").listing()
    assert len(site.requests) == 1


async def test_a_name_that_leads_to_such_an_address_is_refused_where_it_is_resolved() -> None:
    resolver = GuardedResolver()
    with pytest.raises(RefusedAddress, match=r"169\.254\.169\.254, a link-local"):
        await resolver.resolve("2852039166", 80)  # getaddrinfo takes this for a number
    assert [one["host"] for one in await resolver.resolve("localhost", 80)] == ["127.0.0.1"]
    await resolver.close()


async def test_credentials_of_a_secret_go_to_the_first_host_alone(site: Site, origins: Origins) -> None:
    other = Site()
    await other.serve()
    other.answer = plain(b"data")
    site.answer = redirect(f"{other.url}/b")
    await origins.open(f"{site.url}/a.zip", {"token": "secret"}).listing()
    site.answer = plain(b"data")
    await origins.open(f"{site.url}/a.zip", {"username": "joe", "password": "secret"}).listing()
    assert [request.headers.get("Authorization") for request in site.requests] == [
        "Bearer secret",
        "Basic am9lOnNlY3JldA==",
    ]
    assert [request.headers.get("Authorization") for request in other.requests] == [None]
    await other.close()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A self-signed certificate for 127.0.0.1, and a server's context with it."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context


async def test_https_never_leads_to_http(
    certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted, context = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    secure, insecure = Site(), Site()
    await insecure.serve()
    await secure.serve(context)
    origins = Origins(Settings(allow_http=True))
    origin = origins.open(f"{secure.url}/a.zip")
    secure.answer = plain(b"data")
    (file,) = (await origin.listing()).files
    assert await content(origin, file) == b"data"
    secure.answer = redirect(f"{insecure.url}/b.zip")
    with pytest.raises(OriginDenied, match=r"from https:// to plain http://127\.0\.0\.1"):
        await origin.listing()
    assert insecure.requests == []
    for each in (secure, insecure):
        await each.close()
    await origins.close()


async def test_a_certificate_that_is_not_trusted_is_denied(
    certificate: tuple[Path, ssl.SSLContext], origins: Origins
) -> None:
    secure = Site()
    await secure.serve(certificate[1])
    with pytest.raises(OriginDenied, match="certificate is not trusted"):
        await origins.open(f"{secure.url}/a.zip").listing()
    await secure.close()


async def test_plain_http_is_off_by_default(site: Site) -> None:
    with pytest.raises(AdapterRejected, match="--allow-http"):
        Origins(Settings()).open(f"{site.url}/a.zip")
