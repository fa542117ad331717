"""Lists kept current against a scripted API server: what the real one does only now and then."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from sidecar.core.retry import Backoff
from sidecar.edges.kubernetes.api import Api, ApiError
from sidecar.edges.kubernetes.watch import EventType, Pace, Watch

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
PACE = Pace(retry=Backoff(first=0.02, cap=0.05), silence=0.3)


class Recorder:
    """A sink that remembers what it was told."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self.events: list[tuple[str, str]] = []
        self.failures: list[int] = []
        self.currents = 0
        self.doubts = False
        self._event = asyncio.Event()

    async def listed(self, items: Sequence[msgspec.Raw]) -> None:
        self.lists.append([json.loads(bytes(i))["metadata"]["name"] for i in items])
        self._event.set()

    def event(self, kind: EventType, item: msgspec.Raw) -> None:
        self.events.append((kind, json.loads(bytes(item))["metadata"]["name"]))
        self._event.set()

    def current(self) -> None:
        self.currents += 1
        self._event.set()

    def failed(self, error: ApiError) -> None:
        self.failures.append(error.code)
        self._event.set()

    def doubtful(self) -> bool:
        return self.doubts

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._event.clear()
                await self._event.wait()


class Server:
    """Answers each request by the next of `script`, the last one again and again; `queries` are what was asked."""

    def __init__(self, *script: Answer) -> None:
        self._script = list(script)
        self.queries: list[dict[str, str]] = []
        self.tokens: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization", ""))
        answer = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        return await answer(request)


def obj(name: str, version: str, padding: int = 0) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": version, "annotations": {"x": "y" * padding}}}


def listing(version: str, *names: str, following: str = "") -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        meta = {"resourceVersion": version} | ({"continue": following} if following else {})
        return web.json_response({"metadata": meta, "items": [obj(n, version) for n in names]})

    return answer


def refusing(code: int) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "Status", "message": f"no: {code}", "code": code}, status=code)

    return answer


def watching(*events: dict[str, Any], stay: bool = True) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        if stay:
            await asyncio.sleep(30)
        return response

    return answer


def event(kind: str, name: str, version: str, padding: int = 0) -> dict[str, Any]:
    return {"type": kind, "object": obj(name, version, padding)}


GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}


@contextlib.asynccontextmanager
async def serving(*script: Answer) -> AsyncIterator[tuple[Server, Api]]:
    server = Server(*script)
    app = web.Application()
    app.router.add_get("/things", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def authorize(again: bool) -> str:
        return "Bearer new" if again else "Bearer old"

    api = Api(f"http://127.0.0.1:{runner.addresses[0][1]}", aiohttp.ClientSession(read_bufsize=2**21), authorize)
    try:
        yield server, api
    finally:
        await api.close()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def watched(*script: Answer, doubts: bool = False) -> AsyncIterator[tuple[Server, Recorder]]:
    async with serving(*script) as (server, api):
        sink = Recorder()
        sink.doubts = doubts
        task = asyncio.create_task(Watch(api, "/things", sink, query={"labelSelector": "a=b"}, pace=PACE).run())
        try:
            yield server, sink
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_it_lists_in_pages_and_watches_from_there() -> None:
    script = (listing("", "a", following="more"), listing("7", "b"), watching(event("ADDED", "c", "8")))
    async with watched(*script) as (server, sink):
        await sink.until(lambda: sink.events)
    assert sink.lists == [["a", "b"]]
    assert sink.events == [("ADDED", "c")]
    assert server.queries[1]["continue"] == "more"
    assert (server.queries[2]["watch"], server.queries[2]["resourceVersion"]) == ("true", "7")
    assert server.queries[2]["allowWatchBookmarks"] == "true"
    assert {q["labelSelector"] for q in server.queries} == {"a=b"}


async def test_it_resumes_where_it_was_bookmarks_included() -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}}}
    script = (
        listing("7"),
        watching(event("ADDED", "c", "8"), bookmark, stay=False),
        watching(event("DELETED", "c", "21")),
    )
    async with watched(*script) as (server, sink):
        await sink.until(lambda: len(sink.events) == 2)
    assert server.queries[2]["resourceVersion"] == "20"
    assert (len(sink.lists), sink.failures) == (1, [])


@pytest.mark.parametrize("forgotten", [watching(GONE), refusing(410)])
async def test_a_version_that_is_too_old_is_listed_anew(forgotten: Answer) -> None:
    async with watched(listing("7", "a"), forgotten, listing("30", "b"), watching()) as (server, sink):
        await sink.until(lambda: len(sink.lists) == 2)
        await sink.until(lambda: sink.currents >= 3)
    assert sink.lists == [["a"], ["b"]]
    assert sink.failures == []
    assert server.queries[3]["resourceVersion"] == "30"


async def test_a_watch_on_which_nothing_comes_is_opened_anew_from_where_it_was() -> None:
    async with watched(listing("7"), watching(), watching(event("ADDED", "c", "8"))) as (server, sink):
        await sink.until(lambda: sink.events)
    assert sink.failures == [0]
    assert [q.get("resourceVersion") for q in server.queries] == [None, "7", "7"]


@pytest.mark.parametrize("code", [403, 404])
async def test_a_list_that_is_no_longer_ours_is_told_and_read_anew(code: int) -> None:
    async with watched(listing("7"), refusing(code), listing("9"), watching()) as (_, sink):
        await sink.until(lambda: len(sink.lists) == 2)
    assert sink.failures == [code]


async def test_a_busy_server_is_asked_again_without_a_new_list() -> None:
    async with watched(listing("7"), refusing(503), refusing(429), watching(event("ADDED", "c", "8"))) as (_, sink):
        await sink.until(lambda: sink.events)
    assert (sink.failures, len(sink.lists)) == ([503, 429], 1)


async def test_who_doubts_a_deletion_lists_anew_after_a_watch_has_ended() -> None:
    script = (listing("7", "a"), watching(event("DELETED", "a", "8"), stay=False), listing("9"), watching())
    async with watched(*script, doubts=True) as (_, sink):
        await sink.until(lambda: len(sink.lists) == 2)


async def test_a_watch_that_ends_at_once_is_not_opened_in_a_hurry() -> None:
    async with watched(listing("7"), watching(stay=False)) as (server, _):
        await asyncio.sleep(0.5)
    assert 5 < len(server.queries) < 40


@pytest.mark.parametrize(("lasting", "row"), [(0.15, [1, 1, 1, 1]), (0.0, [1, 2, 3, 4])])
async def test_an_idle_watch_that_is_cut_again_and_again_is_opened_again_soon(lasting: float, row: list[int]) -> None:
    waits: list[int] = []

    class Noted(Backoff, frozen=True):
        def delay(self, failures: int, unit_random: float) -> float:
            waits.append(failures)
            return super().delay(failures, unit_random)

    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(lasting)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(listing("7"), cut) as (_, api):
        sink = Recorder()
        pace = Pace(retry=Noted(first=0.01, cap=0.1), silence=5)
        task = asyncio.create_task(Watch(api, "/things", sink, pace=pace).run())
        await sink.until(lambda: len(sink.failures) > len(row))
        task.cancel()
        await asyncio.wait([task])
    assert waits[: len(row)] == row


async def test_what_cannot_be_read_is_told_and_listed_anew() -> None:
    async def garbage(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"<html>a proxy's page</html>")

    async with watched(garbage, listing("7"), watching()) as (_, sink):
        await sink.until(lambda: sink.lists)
    assert sink.failures == [0]


async def test_an_object_as_large_as_etcd_allows_comes_through() -> None:
    async with watched(listing("7"), watching(event("ADDED", "big", "8", 1_500_000))) as (_, sink):
        await sink.until(lambda: sink.events)
    assert sink.events == [("ADDED", "big")]


async def test_a_refused_token_is_read_anew_once() -> None:
    async with serving(refusing(401), listing("7")) as (server, api):
        assert b'"items"' in await api.request("GET", "/things")
    assert server.tokens == ["Bearer old", "Bearer new"]
    async with serving(refusing(401)) as (server, api):
        with pytest.raises(ApiError, match="no: 401") as refused:
            await api.request("GET", "/things")
    assert refused.value.code == 401
    assert len(server.tokens) == 2


async def test_no_server_is_no_answer() -> None:
    async with serving(listing("7")) as (_, api):
        host = api.host
    session = aiohttp.ClientSession()

    async def nobody(again: bool) -> str:
        return ""

    gone = Api(host, session, nobody)
    with pytest.raises(ApiError, match="can't be reached") as error:
        await gone.request("GET", "/things")
    assert error.value.code == 0
    await gone.close()
