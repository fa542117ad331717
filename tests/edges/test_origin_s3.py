"""Origin s3:// against a real S3 server, and against scripted answers that a healthy server doesn't give."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web
from pytest_aiohttp import AiohttpServer

from sidecar.edges.origins import BLOCK, Origin, Origins
from sidecar.model import MAX_FILES, Listing, RemoteFile
from sidecar.ports import AdapterRejected, OriginChanged, OriginDenied, OriginError
from sidecar.settings import Settings
from tests.s3server import S3Server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(autouse=True)
def environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)


def opened(uri: str, credentials: dict[str, str] | None = None) -> Origin:
    return Origins(Settings()).open(uri, credentials)


async def content(origin: Origin, file: RemoteFile, start: int = 0, stop: int | None = None) -> bytes:
    blocks: list[bytes] = []
    await origin.read(file, start, file.size if stop is None else stop, blocks.append)
    assert all(0 < len(block) <= BLOCK for block in blocks)
    return b"".join(blocks)


def sizes(listing: Listing) -> dict[str, int]:
    return {file.path: file.size for file in listing.files}


async def test_a_prefix_is_listed_without_its_longer_namesakes_and_directory_markers(s3: S3Server) -> None:
    s3.put("prefixes", "loras/1/adapter_config.json", b"{}")
    s3.put("prefixes", "loras/1/sub/ü b", b"123")
    s3.put("prefixes", "loras/1/empty/", b"")
    s3.put("prefixes", "loras/10/adapter_config.json", b"{}{}")
    for uri in ("s3://prefixes/loras/1", "s3://prefixes/loras/1/"):
        listing = await opened(uri).listing()
        assert (sizes(listing), listing.archive) == ({"adapter_config.json": 2, "sub/ü b": 3}, False)
        assert all(file.etag for file in listing.files)
    assert await content(opened("s3://prefixes/loras/1"), listing.files[1]) == b"123"


async def test_ranges_come_in_order_and_whole(s3: S3Server) -> None:
    data = os.urandom(3 * BLOCK + 77)
    s3.put("ranges", "x/weights", data)
    origin = opened("s3://ranges/x")
    (file,) = (await origin.listing()).files
    assert await content(origin, file) == data
    assert await content(origin, file, 5, 2 * BLOCK + 9) == data[5 : 2 * BLOCK + 9]
    assert await content(origin, file, file.size - 1) == data[-1:]


async def test_an_archive_is_one_object(s3: S3Server) -> None:
    s3.put("archives", "loras/1.tar.gz", b"packed")
    s3.put("archives", "loras/1.tar.gz.sig", b"")
    origin = opened("s3://archives/loras/1.tar.gz")
    listing = await origin.listing()
    assert (sizes(listing), listing.archive) == ({"1.tar.gz": 6}, True)
    assert await content(origin, listing.files[0]) == b"packed"


async def test_a_prefix_may_be_named_like_an_archive(s3: S3Server) -> None:
    s3.put("archives", "named.zip/adapter_config.json", b"{}")
    origin = opened("s3://archives/named.zip")
    listing = await origin.listing()
    assert (sizes(listing), listing.archive) == ({"adapter_config.json": 2}, False)
    assert await content(origin, listing.files[0]) == b"{}"


async def test_a_bucket_may_be_one_adapter(s3: S3Server) -> None:
    s3.put("whole-bucket", "adapter_config.json", b"{}")
    origin = opened("s3://whole-bucket")
    listing = await origin.listing()
    assert await content(origin, listing.files[0]) == b"{}"


async def test_too_many_files_are_rejected_with_the_limit(s3: S3Server) -> None:
    for number in range(MAX_FILES + 1):
        s3.put("many", f"loras/{number}/x", b"")
    with pytest.raises(AdapterRejected, match=f"s3://many/loras .*may have {MAX_FILES}"):
        await opened("s3://many/loras").listing()


@pytest.mark.parametrize(
    ("uri", "looked_for"),
    [
        ("s3://prefixes/loras/2", "no object under the prefix 'loras/2/' in bucket 'prefixes'"),
        ("s3://prefixes/loras/2.zip", "and no object 'loras/2.zip'"),
        ("s3://prefixes/loras/1/adapter_config.json", "is one object, but no .tar.gz"),
        ("s3://no-such-bucket/x", "NoSuchBucket"),
    ],
)
async def test_nothing_there_says_what_was_looked_for(s3: S3Server, uri: str, looked_for: str) -> None:
    s3.put("prefixes", "loras/1/adapter_config.json", b"{}")
    with pytest.raises(OriginDenied) as raised:
        await opened(uri).listing()
    assert looked_for in str(raised.value)
    assert s3.endpoint in str(raised.value) or "is one object" in looked_for


async def test_a_wrong_key_is_denied_with_the_code_and_without_the_secret(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not s3.checks_signatures:
        pytest.skip("moto's server accepts any key")
    s3.put("prefixes", "loras/1/adapter_config.json", b"{}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")
    origins = Origins(Settings())
    origin = origins.open("s3://prefixes/loras/1")
    with pytest.raises(OriginDenied) as raised:
        await origin.listing()
    text = str(raised.value)
    for part in ("s3://prefixes/loras/1", "403", "SignatureDoesNotMatch", "the access key from env"):
        assert part in text
    assert "wrong-and-secret" not in text
    # Rotated where they came from: no restart is needed.
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.env["AWS_SECRET_ACCESS_KEY"])
    assert sizes(await origin.listing())["adapter_config.json"] == 2


async def test_credentials_of_a_secret_go_before_the_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("prefixes", "loras/1/adapter_config.json", b"{}")
    for name in s3.env:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert (await opened("s3://prefixes/loras/1", s3.env).listing()).files


async def test_without_any_credentials_the_request_is_anonymous_and_says_so(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not s3.checks_signatures:
        pytest.skip("moto's server accepts anonymous requests")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(OriginDenied, match="anonymous, since no AWS credentials were found"):
        await opened("s3://prefixes/loras/1").listing()


async def test_an_object_changed_since_its_listing_is_not_read(s3: S3Server) -> None:
    s3.put("changes", "a/x", b"first")
    s3.put("changes", "a/y", b"first")
    origin = opened("s3://changes/a")
    x, y = (await origin.listing()).files
    s3.put("changes", "a/x", b"other")
    s3.delete("changes", "a/y")
    with pytest.raises(OriginChanged, match="x was changed since it was listed"):
        await content(origin, x)
    with pytest.raises(OriginChanged, match="y was changed since it was listed"):
        await content(origin, y)


async def test_another_size_is_a_change_where_there_is_no_etag(s3: S3Server) -> None:
    s3.put("changes", "b/x", b"first")
    origin = opened("s3://changes/b")
    for size, stop in ((4, 4), (6, 6), (6, 3)):
        with pytest.raises(OriginChanged, match="5 bytes now"):
            await content(origin, RemoteFile(path="x", size=size), 0, stop)


async def test_an_endpoint_that_is_not_there_is_an_error_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OriginError, match=r"s3://prefixes/loras/1 at http://127\.0\.0\.1:1: EndpointConn") as raised:
        await opened("s3://prefixes/loras/1").listing()
    assert not isinstance(raised.value, OriginDenied)


async def test_an_endpoint_that_is_no_url_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    with pytest.raises(OriginDenied, match=r"s3://prefixes/loras/1.*Invalid endpoint"):
        await opened("s3://prefixes/loras/1").listing()


def _page(keys: list[str]) -> web.Response:
    contents = "".join(f'<Contents><Key>{key}</Key><Size>1</Size><ETag>"e"</ETag></Contents>' for key in keys)
    return web.Response(text=f"<ListBucketResult>{contents}</ListBucketResult>", content_type="application/xml")


def _fault(status: int, code: str) -> web.Response:
    text = f"<Error><Code>{code}</Code><Message>said {code}</Message></Error>"
    return web.Response(text=text, status=status, content_type="application/xml")


async def answered(
    answer: Callable[[], web.Response], aiohttp_server: AiohttpServer, monkeypatch: pytest.MonkeyPatch
) -> Listing:
    """The listing that comes of this one answer to everything."""

    async def handle(_: web.Request) -> web.Response:
        return answer()

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    server = await aiohttp_server(application)
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(server.make_url("")))
    return await opened("s3://bucket/p").listing()


@pytest.mark.parametrize("key", ["p/../../x", "p//x", "p/./x", "p/a\\..\\x", "p//etc/passwd", "p/dir/"])
async def test_keys_that_leave_the_prefix_are_rejected(
    key: str, aiohttp_server: AiohttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AdapterRejected, match="s3://bucket/p"):
        await answered(lambda: _page(["p/adapter_config.json", key]), aiohttp_server, monkeypatch)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", OriginError),
        (500, "InternalError", OriginError),
        (429, "TooManyRequests", OriginError),
        (400, "RequestTimeout", OriginError),
        (403, "AccessDenied", OriginDenied),
        (403, "RequestTimeTooSkewed", OriginDenied),
        (400, "AuthorizationHeaderMalformed", OriginDenied),
        (404, "NoSuchBucket", OriginDenied),
    ],
)
async def test_answers_are_sorted_into_the_moments_and_ours(
    status: int,
    code: str,
    kind: type[OriginError],
    aiohttp_server: AiohttpServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OriginError, match=code) as raised:
        await answered(lambda: _fault(status, code), aiohttp_server, monkeypatch)
    assert type(raised.value) is kind
    assert "s3://bucket/p" in str(raised.value)


async def test_a_server_that_is_no_s3_is_named(aiohttp_server: AiohttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OriginDenied, match=r"s3://bucket/p at http://127\.0\.0\.1:\d+: 404 Not Found"):
        await answered(lambda: web.Response(text="welcome", status=404), aiohttp_server, monkeypatch)
    with pytest.raises(OriginError, match=r"s3://bucket/p at http://127\.0\.0\.1:\d+: 500"):
        await answered(lambda: web.Response(text="<html><br></html>"), aiohttp_server, monkeypatch)


async def test_an_endpoint_that_redirects_everything_is_denied(
    aiohttp_server: AiohttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OriginDenied, match="redirects every request"):
        await answered(lambda: _fault(301, "PermanentRedirect"), aiohttp_server, monkeypatch)
