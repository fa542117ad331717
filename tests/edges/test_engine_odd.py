"""The engine's edge against servers that are not quite vLLM, or hardly a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from sidecar.core.metrics_vllm import Traffic
from sidecar.edges.engine import IDENTIFY_TIMEOUT, MAX_ANSWER, VllmEngine
from sidecar.edges.engine_url import base_url
from sidecar.ports import EngineDisconnected, EngineRefused, EngineTimeout, EngineUnavailable
from sidecar.settings import Settings
from tests.edges.scripted import Scripted, raw, scripted

MODELS = b'{"object":"list","data":[{"id":"tiny","root":"/m","parent":null}]}'
METRICS = b"process_start_time_seconds 5.0\n"
LOAD = "POST /v1/load_lora_adapter"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def connect(session: aiohttp.ClientSession, url: str, key: Path | None = None, timeout: float = 5.0) -> VllmEngine:
    settings = Settings(
        engine_url=url, engine_api_key_file=str(key or ""), load_timeout=timeout, unload_timeout=timeout
    )
    return VllmEngine(session, settings, lambda: 1_000.0)


@pytest.mark.parametrize(
    "answer",
    [
        (500, b"Internal Server Error"),
        (503, b""),
        (404, b'{"detail":"Not Found"}'),
        (200, b"<html>hello</html>"),
        (200, b""),
        (200, b'{"data":null}'),
        (301, b""),
        (204, b""),
    ],
)
async def test_a_look_at_anything_but_a_list_is_unknown_and_not_empty(
    session: aiohttp.ClientSession, answer: tuple[int, bytes]
) -> None:
    async with scripted({"GET /v1/models": answer}) as server:
        with pytest.raises(EngineUnavailable, match="not a list of models"):
            await connect(session, server.url).look()


@pytest.mark.parametrize("body", [b'{"object":"list","data":[]}', b'{"data":[1,null,{"id":5}]}'])
async def test_a_list_that_all_at_once_lacks_the_base_model_is_unknown_and_not_empty(
    session: aiohttp.ClientSession, body: bytes
) -> None:
    async with scripted({"GET /v1/models": (200, MODELS), "GET /metrics": (200, METRICS)}) as server:
        engine = connect(session, server.url)
        assert (await engine.look()).base_models
        server.answers["GET /v1/models"] = (200, body)
        with pytest.raises(EngineUnavailable, match="not a list of models"):
            await engine.look()


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x00\x05",
    ],
)
async def test_a_broken_answer_is_no_answer(session: aiohttp.ClientSession, reply: bytes) -> None:
    async with raw(reply) as url:
        engine = connect(session, url)
        with pytest.raises(EngineUnavailable):
            await engine.look()
        with pytest.raises(EngineDisconnected, match="broke during POST"):
            await engine.load("a", "/r/a")
        with pytest.raises(EngineDisconnected):
            await engine.unload("a")
        assert await engine.in_flight() is None
        assert await engine.limits() is None


async def test_no_answer_to_a_call_in_time(session: aiohttp.ClientSession) -> None:
    async with raw(None) as url:
        engine = connect(session, url, timeout=0.1)
        with pytest.raises(EngineTimeout, match=r"no answer to POST /v1/load_lora_adapter for 'a' in 0\.1 s"):
            await engine.load("a", "/r/a")
        with pytest.raises(EngineTimeout):
            await engine.unload("a")


async def test_a_connection_that_is_refused_has_sent_nothing(session: aiohttp.ClientSession) -> None:
    async with raw(b"") as url:
        pass
    for call in (connect(session, url).load("a", "/r/a"), connect(session, url).unload("a")):
        with pytest.raises(EngineUnavailable, match="no connection") as unavailable:
            await call
        assert not isinstance(unavailable.value, EngineDisconnected)


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "http://", "127.0.0.1:8000", "ftp://h", "http://h:99999", "http://[::1", "http://u:secret@h"],
)
def test_an_address_that_cannot_be_one(url: str) -> None:
    with pytest.raises(ValueError, match="--engine-url") as error:
        base_url(url)
    assert "secret" not in str(error.value)


async def test_a_host_that_has_no_address(session: aiohttp.ClientSession) -> None:
    with pytest.raises(EngineUnavailable, match="no connection"):
        await connect(session, "http://host.invalid:1").look()


async def test_the_key_follows_no_redirect_and_no_message(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame-open")
    async with scripted({}) as elsewhere:

        async def redirect(request: web.Request) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": f"{elsewhere.url}{request.path}"})

        async def echo(request: web.Request) -> web.StreamResponse:
            text = f"you sent {request.headers['Authorization']}"
            return web.json_response({"error": {"message": text, "type": "x", "code": 400}}, status=400)

        async with scripted({"GET /v1/models": redirect, LOAD: echo}) as server:
            engine = connect(session, server.url, key)
            with pytest.raises(EngineUnavailable):
                await engine.look()
            with pytest.raises(EngineRefused, match=r"you sent Bearer \*\*\*"):
                await engine.load("a", "/r/a")
            assert [r.headers["Authorization"] for r in server.seen] == ["Bearer sesame-open"] * 2
        assert elsewhere.seen == []


async def test_an_endless_answer_is_cut(session: aiohttp.ClientSession) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2 * MAX_ANSWER // 65536 + 2):
            await response.write(b"x" * 65536)
        return response

    async with scripted({LOAD: endless}) as server:
        with pytest.raises(EngineUnavailable, match=f"longer than {MAX_ANSWER} bytes"):
            await connect(session, server.url).load("a", "/r/a")


async def test_every_call_has_a_connection_of_its_own(session: aiohttp.ClientSession) -> None:
    ok = (200, b"Success")
    async with scripted({"GET /v1/models": (200, MODELS), "GET /metrics": (200, METRICS), LOAD: ok}) as server:
        engine = connect(session, server.url)
        await engine.look()
        await engine.load("a", "/r/a")
        await engine.look()
        assert len(server.connections) == len(server.seen) >= 4


@pytest.mark.parametrize("answer", [(404, b""), (200, b"# nothing about the process\n")])
async def test_without_a_start_time_the_process_is_unknown(
    session: aiohttp.ClientSession, answer: tuple[int, bytes]
) -> None:
    async with scripted({"GET /v1/models": (200, MODELS), "GET /metrics": answer}) as server:
        view = await connect(session, server.url).look()
        assert (view.process, view.version) == (None, "")
        assert view.base_models[0].id == "tiny"


async def test_the_list_is_read_again_when_the_process_turns_out_to_be_new(session: aiohttp.ClientSession) -> None:
    """The list is asked for first: of the old process, if the new one answers the question who it was."""
    lists = [{"a": "/r/a", "b": "/r/b"}, {"a": "/r/a"}, {"new": "/r/n"}]
    starts = [b"5.0", b"6.0"]

    async def models(request: web.Request) -> web.StreamResponse:
        data = [{"id": name, "root": root, "parent": "tiny"} for name, root in lists.pop(0).items()]
        return web.json_response({"data": data})

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"process_start_time_seconds " + starts.pop(0) + b"\n")

    async with scripted({"GET /v1/models": models, "GET /metrics": metrics}) as server:
        engine = connect(session, server.url)
        assert (await engine.look()).process == "5.0"
        view = await engine.look()
        assert (view.process, view.adapters) == ("6.0", {"new": "/r/n"})


def alternating(*lists: dict[str, str]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Several API servers behind one port: each connection reaches the next."""
    turn = 0

    async def models(request: web.Request) -> web.StreamResponse:
        nonlocal turn
        turn += 1
        adapters = lists[turn % len(lists)]
        data = [{"id": name, "root": root, "parent": "tiny"} for name, root in adapters.items()]
        return web.json_response({"data": data})

    return models


async def looks(server: Scripted, session: aiohttp.ClientSession, count: int) -> str | None:
    engine = connect(session, server.url)
    for _ in range(count):
        await engine.look()
    return engine.contradiction


async def test_servers_that_contradict_each_other_are_named(session: aiohttp.ClientSession) -> None:
    answers = {"GET /v1/models": alternating({"a": "/r/a"}, {}), "GET /metrics": (200, METRICS)}
    async with scripted(answers) as server:
        message = await looks(server, session, 4)
        assert message is not None
        assert "--api-server-count 1" in message
        assert "about a:" in message
    async with scripted({**answers, "GET /v1/models": alternating({"a": "/r/a"})}) as server:
        assert await looks(server, session, 4) is None


async def test_already_loaded_without_being_listed_is_refused(session: aiohttp.ClientSession) -> None:
    body = json.dumps({"error": {"message": "The lora adapter 'a' has already been loaded.", "code": 400}}).encode()
    async with scripted({"GET /v1/models": (200, MODELS), LOAD: (400, body)}) as server:
        with pytest.raises(EngineRefused, match="it isn't listed"):
            await connect(session, server.url).load("a", "/r/a")


def in_flight(running: int, waiting: int, *names: str) -> bytes:
    counts = {"running": running, "waiting": waiting}
    gauges = "".join(f'vllm:num_requests_{kind}{{engine="0"}} {count}\n' for kind, count in counts.items())
    label = ",".join(names)
    series = f'vllm:lora_requests_info{{running_lora_adapters="{label}",waiting_lora_adapters=""}} 9.0\n'
    return METRICS + gauges.encode() + series.encode()


@pytest.mark.parametrize(
    ("completion", "metrics", "expected"),
    [
        ((200, b"{}"), in_flight(0, 0), Traffic.NONE),
        ((200, b"{}"), in_flight(1, 0, "b"), Traffic.NONE),
        ((200, b"{}"), in_flight(1, 1, "b"), Traffic.PERHAPS),
        ((200, b"{}"), in_flight(1, 0, "a"), Traffic.SOME),
        ((200, b"{}"), b"", Traffic.UNKNOWN),
        # Models that embed or classify generate nothing: what the metrics tell by themselves has to do.
        ((404, b"{}"), in_flight(1, 0, "b"), Traffic.NONE),
        ((400, b"{}"), in_flight(1, 1, "b"), Traffic.PERHAPS),
    ],
)
async def test_traffic(
    session: aiohttp.ClientSession, completion: tuple[int, bytes], metrics: bytes, expected: Traffic
) -> None:
    answers = {"GET /v1/models": (200, MODELS), "GET /metrics": (200, metrics), "POST /v1/completions": completion}
    async with scripted(answers) as server:
        engine = connect(session, server.url)
        await engine.look()
        assert await engine.traffic("a") is expected
        asked = [request.path for request in server.seen]
        assert asked.index("/v1/completions") < len(asked) - 1
        assert asked[-1] == "/metrics"


async def test_traffic_of_an_engine_that_gives_no_token_in_time(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr("sidecar.edges.engine.OVERTAKE_TIMEOUT", 0.1)
    answers = {"GET /v1/models": (200, MODELS), "GET /metrics": (200, in_flight(0, 0)), "POST /v1/completions": hang}
    async with scripted(answers) as server:
        engine = connect(session, server.url)
        await engine.look()
        assert await engine.traffic("a") is Traffic.PERHAPS


async def test_traffic_of_an_engine_that_takes_its_time_for_metrics(session: aiohttp.ClientSession) -> None:
    """Under load that is seconds; who it is must be known in one, whose requests run need not."""
    answered = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answered.wait(), IDENTIFY_TIMEOUT + 0.3)
        return web.Response(body=in_flight(1, 0, "a"))

    answers = {"GET /v1/models": (200, MODELS), "GET /metrics": slow, "POST /v1/completions": (200, b"{}")}
    async with scripted(answers) as server:
        engine = connect(session, server.url)
        answered.set()
        await engine.look()
        answered.clear()
        assert await engine.traffic("a") is Traffic.SOME
