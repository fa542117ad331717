"""The agent's endpoints over real sockets."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from yarl import URL

from sidecar.edges.metrics import Metrics
from sidecar.edges.server import Server, parse_listen
from sidecar.model import Entry, Head, Problem, Record, State
from sidecar.ports import ListenFailed
from tests.edges.agent_view import StaticView, serving


@pytest.fixture
async def view() -> StaticView:
    return StaticView()


@pytest.fixture
async def url(view: StaticView) -> AsyncIterator[str]:
    async with serving(view) as address:
        yield f"http://{address}"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def raw(url: str, text: bytes) -> bytes:
    """What the server answers to these very bytes, until it closes."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(text)
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_health_and_readiness_with_reasons(view: StaticView, url: str, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{url}/healthz") as answer:
        assert (answer.status, await answer.json()) == (200, {"healthy": True, "loops": {"reconcile": 0.1}})
    view.is_healthy = False
    async with http.get(f"{url}/healthz") as answer:
        assert (answer.status, (await answer.json())["healthy"]) == (503, False)
    async with http.get(f"{url}/readyz") as answer:
        assert (answer.status, await answer.json()) == (200, {"ready": True, "reasons": []})
    view.missing = ("the engine has not answered yet",)
    async with http.get(f"{url}/readyz") as answer:
        assert answer.status == 503
        assert await answer.json() == {"ready": False, "reasons": ["the engine has not answered yet"]}


async def test_metrics_in_the_scraper_s_format(url: str, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{url}/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "lora_sidecar_build_info{" in await answer.text()
    async with http.get(f"{url}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")


async def test_adapters_with_the_problems(view: StaticView, url: str, http: aiohttp.ClientSession) -> None:
    view.rows = [{"name": "a", "namespace": "ns", "state": State.LOADED, "targets": ("w",), "rank": None}]
    view.found = [Problem(where="a.yaml", message="unknown field 'x'")]
    async with http.get(f"{url}/v1/adapters") as answer:
        assert answer.headers["Content-Type"] == "application/json"
        assert await answer.json() == {
            "adapters": [{"name": "a", "namespace": "ns", "state": "Loaded", "targets": ["w"], "rank": None}],
            "problems": [{"where": "a.yaml", "message": "unknown field 'x'"}],
        }


async def test_peers(view: StaticView, url: str, http: aiohttp.ClientSession) -> None:
    view.workers = [{"name": "w", "self": True}]
    async with http.get(f"{url}/v1/peers") as answer:
        assert await answer.json() == {"peers": [{"name": "w", "self": True}]}


NAMES = [
    "ns/a",
    "a",
    "Org/Model.v1-LoRA",
    "with space",
    "100%",
    "a%2Fb",
    "a/explain",
    "a//b",
    "ü/ñ",
    "q?x=1#y",
    "a+b",
    "explain",
    "a/../b",
    "semi;colon,&=",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slashes", ["encoded", "plain"])
async def test_explain_takes_any_name(
    view: StaticView, url: str, http: aiohttp.ClientSession, name: str, slashes: str
) -> None:
    view.explained[name] = {"adapter": name}
    path = quote(name, safe="/" if slashes == "plain" else "")
    async with http.get(URL(f"{url}/v1/adapters/{path}/explain", encoded=True)) as answer:
        assert view.asked == [name]
        assert (answer.status, await answer.json()) == (200, {"adapter": name})


async def test_explain_of_a_name_in_lower_case_percent_escapes(view: StaticView, url: str) -> None:
    view.explained["ns/a"] = {}
    answer = await raw(url, b"GET /v1/adapters/ns%2fa/explain HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert view.asked == ["ns/a"]


async def test_explain_of_an_unknown_name_names_some_known(
    view: StaticView, url: str, http: aiohttp.ClientSession
) -> None:
    view.rows = [{"name": f"a{number:03}", "namespace": "ns"} for number in range(200)]
    async with http.get(f"{url}/v1/adapters/nope/explain") as answer:
        assert answer.status == 404
        body = await answer.json()
    assert "'nope'" in body["error"]
    assert body["knownTotal"] == 200
    assert body["known"] == [f"ns/a{number:03}" for number in range(50)]


async def test_a_very_long_unknown_name_is_not_given_back_whole(url: str, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{url}/v1/adapters/{'x' * 5000}/explain") as answer:
        assert answer.status == 404
        assert len(await answer.read()) < 600


@pytest.mark.parametrize(
    "path", ["/nope", "/v1", "/v1/adapters/", "/v1/adapters/a", "/peer/", "/peer/record", "/v1/adapters//explain"]
)
async def test_what_isn_t_there_is_404_as_json(url: str, http: aiohttp.ClientSession, path: str) -> None:
    async with http.get(f"{url}{path}") as answer:
        assert answer.status == 404
        assert path in (await answer.json())["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/v1/adapters", "/v1/adapters/a/explain", "/v1/drained"])
async def test_other_methods_are_405_as_json(
    view: StaticView, url: str, http: aiohttp.ClientSession, method: str, path: str
) -> None:
    async with http.request(method, f"{url}{path}", data=b"x" * 1000) as answer:
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET, HEAD"
        assert method in (await answer.json())["error"]
    assert view.asked == []


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics", "/v1/adapters", "/v1/record", "/v1/matrix"])
async def test_head_is_get_without_the_body(url: str, http: aiohttp.ClientSession, path: str) -> None:
    async with http.get(f"{url}{path}") as answer:
        size = len(await answer.read())
    async with http.head(f"{url}{path}") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Length"] == str(size)
        assert await answer.read() == b""


async def test_a_body_is_refused_unread(url: str, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{url}/v1/adapters", data=b"x" * 100) as answer:
        assert answer.status == 413
        assert "body" in (await answer.json())["error"]
    answer = await raw(url, b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


async def test_oversized_and_broken_requests_get_400_and_no_log(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    for request in (
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n",
    ):
        assert (await raw(url, request)).startswith(b"HTTP/1.") or request.startswith(b"\x16")
    assert capfd.readouterr() == ("", "")


async def test_a_fault_in_the_view_is_500_as_json_and_in_the_log(
    view: StaticView, url: str, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    del view.rows
    async with http.get(f"{url}/v1/adapters") as answer:
        assert answer.status == 500
        assert "AttributeError" in (await answer.json())["error"]
    logged = capsys.readouterr()
    assert "request_failed" in logged.out + logged.err
    async with http.get(f"{url}/healthz") as answer:
        assert answer.status == 200


async def test_drained_answers_when_the_view_does(view: StaticView, url: str, http: aiohttp.ClientSession) -> None:
    asking = asyncio.create_task(http.get(f"{url}/v1/drained"))
    async with http.get(f"{url}/healthz") as answer:
        assert answer.status == 200
    assert not asking.done()
    view.is_drained.set()
    async with await asking as answer:
        assert (answer.status, await answer.json()) == (200, {"drained": True, "waiting": []})


async def test_drained_has_a_limit_of_its_own(view: StaticView, http: aiohttp.ClientSession) -> None:
    async with serving(view, drained_limit=0.05) as address, http.get(f"http://{address}/v1/drained") as answer:
        assert answer.status == 200
        assert (await answer.json())["drained"] is False
    assert view.cancelled.is_set()


async def test_who_hangs_up_ends_the_wait(view: StaticView, url: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.2)) as http:
        with pytest.raises(TimeoutError):
            await http.get(f"{url}/v1/drained")
    async with asyncio.timeout(5):
        await view.cancelled.wait()


def one_record(text: str) -> Record:
    return Record(
        head=Head(uid="uid-w", name="w", pool="p", generation=3, base_models=("b",)),
        version=7,
        entries=(Entry(adapter="ns/a", state=State.LOADED, revision="sha256:ab", message=text),),
    )


async def test_the_record_is_what_peers_decode(view: StaticView, url: str, http: aiohttp.ClientSession) -> None:
    view.own = one_record("é")
    async with http.get(f"{url}/v1/record") as answer:
        assert answer.headers["Content-Type"] == "application/json"
        assert msgspec.json.decode(await answer.read(), type=Record) == view.own


async def test_an_unchanged_record_is_304(view: StaticView, url: str, http: aiohttp.ClientSession) -> None:
    view.own = one_record("x")
    async with http.get(f"{url}/v1/record") as answer:
        tag = answer.headers["ETag"]
    view.own = one_record("x")
    for asked in (tag, f'"other", {tag}'):
        async with http.get(f"{url}/v1/record", headers={"If-None-Match": asked}) as answer:
            assert (answer.status, await answer.read(), answer.headers["ETag"]) == (304, b"", tag)


async def test_any_other_content_has_another_tag(view: StaticView, url: str, http: aiohttp.ClientSession) -> None:
    """With an equal version too: another agent on this address, or one that forgot, must not pass for unchanged."""
    tags = set()
    for record in (one_record("x"), one_record("y"), Record(head=Head(uid="u2", name="w", pool="p"), version=7)):
        view.own = record
        async with http.get(f"{url}/v1/record") as answer:
            tags.add(answer.headers["ETag"])
    assert len(tags) == 3
    async with http.get(f"{url}/v1/record", headers={"If-None-Match": "*"}) as answer:
        assert answer.status in {200, 304}


@pytest.mark.parametrize("path", ["/", "/v1/adapters", "/nope", "/metrics", "/v1/record"])
async def test_answers_are_not_sniffed(url: str, http: aiohttp.ClientSession, path: str) -> None:
    async with http.get(f"{url}{path}") as answer:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0:8790", ("0.0.0.0", 8790)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::]:8790", ("::", 8790)),
        ("[::1]:1", ("::1", 1)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_listen_is_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize(
    "text", ["", "8790", ":8790", "host", "host:", "host:x", "host:65536", "host:-1", "::1:8790", "[]:1", "a:²"]
)
def test_any_other_listen_is_refused_by_name(text: str) -> None:
    with pytest.raises(ListenFailed, match=r"--listen '.*(8790|65535)"):
        parse_listen(text)


async def test_a_port_in_use_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenFailed, match=f"--listen {listen}: the port is in use"):
            await Server(StaticView(), Metrics(process=False), listen).start()


async def test_an_address_that_isn_t_here_names_the_flag() -> None:
    with pytest.raises(ListenFailed, match=r"--listen 192\.0\.2\.1:0: this machine has no such address"):
        await Server(StaticView(), Metrics(process=False), "192.0.2.1:0").start()
    with pytest.raises(ListenFailed, match=r"--listen no\.such\.host\.invalid:0: "):
        await Server(StaticView(), Metrics(process=False), "no.such.host.invalid:0").start()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_all_of_ipv6_takes_ipv4_too(http: aiohttp.ClientSession) -> None:
    async with serving(StaticView(), "[::]:0") as address:
        host, port = address.rsplit(":", 1)
        assert host == "[::]"
        for loopback in ("127.0.0.1", "[::1]"):
            async with http.get(f"http://{loopback}:{port}/healthz") as answer:
                assert answer.status == 200


async def test_the_port_is_free_again_after_stop_and_stop_twice_is_harmless(http: aiohttp.ClientSession) -> None:
    first = Server(StaticView(), Metrics(process=False), "127.0.0.1:0")
    assert first.address == ""
    await first.start()
    async with http.get(f"http://{first.address}/healthz") as answer:
        assert answer.status == 200
    await first.stop()
    await first.stop()
    async with serving(StaticView(), first.address) as address:
        assert address == first.address


async def test_stop_cuts_who_waits_within_two_seconds(view: StaticView, http: aiohttp.ClientSession) -> None:
    server = Server(view, Metrics(process=False), "127.0.0.1:0")
    await server.start()
    waiting = asyncio.create_task(http.get(f"http://{server.address}/v1/drained"))
    idle = await asyncio.open_connection(*server.address.split(":"))
    async with asyncio.timeout(5):
        await view.entered.wait()
    before = time.monotonic()
    await server.stop()
    assert time.monotonic() - before < 2
    with pytest.raises(aiohttp.ClientError):
        await waiting
    idle[1].close()
    assert view.cancelled.is_set()
