"""A worker that has the pool's key, and answers those who ask it for bytes as it likes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from sidecar.core.flight import span
from sidecar.core.wire import AUTH_HEADER, UNCOVERED, HttpAnswer, HttpRequest, Opened, body_hash
from sidecar.edges.peer_files import CHUNK_HEADER, PROGRESS_HEADER
from sidecar.model import StoredFile
from tests.adapters import Files

BLOCK = 64 * 1024


@dataclass
class Ask:
    """One request for bytes: `data` is what an honest worker would give, and `start` where that lies in its file."""

    request: web.Request
    side: Any
    opened: Opened
    files: Files
    data: bytes
    start: int
    size: int
    sent: int = 0

    @property
    def is_chunk(self) -> bool:
        return "/flight/" in self.request.path

    def sign(self, status: int, fields: tuple[str, ...], digest: bytes = UNCOVERED) -> str:
        header: str = self.side.sign_answer(self.opened, HttpAnswer(status=status, fields=fields), digest)
        return header

    def plain(self, status: int, body: bytes = b"") -> web.Response:
        return web.Response(status=status, body=body, headers={AUTH_HEADER: self.sign(status, (), body_hash(body))})

    async def begin(self, length: int | None, digest: bytes = b"", content_range: str = "") -> web.StreamResponse:
        """An answer signed as it should be; without a length it is sent in HTTP's own chunks."""
        if self.is_chunk:
            said = (digest or hashlib.sha256(self.data).digest()).hex()
            response = web.StreamResponse(headers={CHUNK_HEADER: said})
            response.headers[AUTH_HEADER] = self.sign(200, (said, "" if length is None else str(length)))
        else:
            content_range = content_range or f"bytes {self.start}-{self.start + len(self.data) - 1}/{self.size}"
            response = web.StreamResponse(status=206, headers={"Content-Range": content_range})
            response.headers[AUTH_HEADER] = self.sign(206, (content_range,))
        response.content_length = length
        await response.prepare(self.request)
        return response

    async def send(self, response: web.StreamResponse, data: bytes) -> web.StreamResponse:
        for at in range(0, len(data), BLOCK):
            await response.write(data[at : at + BLOCK])
            self.sent += len(data[at : at + BLOCK])
        return response


Lie = Callable[[Ask], Awaitable[web.StreamResponse]]


@dataclass
class Liar:
    """`routes` go into its server. Everything about `files` that it is asked is answered by `lie`."""

    files: Files
    lie: Lie
    asked: list[Ask] = field(default_factory=list)

    def routes(self, side: Any) -> list[web.RouteDef]:
        async def chunk(request: web.Request) -> web.StreamResponse:
            number = int(request.match_info["file"])
            data = self.files[sorted(self.files)[number]]
            start, stop = span(len(data), int(request.match_info["chunk"]))
            return await self._answer(request, side, data, start, stop)

        async def blob(request: web.Request) -> web.StreamResponse:
            data = next(data for data in self.files.values() if sha256(data) == request.match_info["hex"])
            first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
            return await self._answer(request, side, data, int(first), int(last) + 1)

        async def rest(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, side, b"", 0, 0)

        return [
            web.get(r"/peer/flight/{id}/{file}/{chunk:\d+}", chunk),
            web.get("/peer/blobs/sha256/{hex}", blob),
            web.get("/peer/revisions/{hex}", rest),
            web.get("/peer/flight/{id}/{file}/hashes", rest),
        ]

    async def _answer(self, request: web.Request, side: Any, data: bytes, start: int, stop: int) -> web.StreamResponse:
        opened = side.admit(
            request.headers.get(AUTH_HEADER, ""),
            HttpRequest(method="GET", path=request.rel_url.raw_path, range=request.headers.get("Range", "")),
        )
        assert isinstance(opened, Opened)
        ask = Ask(request, side, opened, self.files, data[start:stop], start, len(data))
        if request.path.endswith("/hashes"):
            return ask.plain(404)
        self.asked.append(ask)
        if "/revisions/" in request.path and not getattr(self.lie, "about_lists", False):
            return ask.plain(200, listed(self.files))
        return await self.lie(ask)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def listed(files: Files) -> bytes:
    """The list of these files as a peer gives it."""
    found = [StoredFile(path=path, size=len(data), sha256=sha256(data)) for path, data in sorted(files.items())]
    return msgspec.json.encode(found)


def altered(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


async def right_bytes(ask: Ask) -> web.StreamResponse:
    return await ask.send(await ask.begin(len(ask.data)), ask.data)


async def other_bytes_under_the_right_hash(ask: Ask) -> web.StreamResponse:
    return await ask.send(await ask.begin(len(ask.data)), altered(ask.data))


async def other_bytes_under_their_own_hash(ask: Ask) -> web.StreamResponse:
    data = altered(ask.data)
    return await ask.send(await ask.begin(len(data), hashlib.sha256(data).digest()), data)


async def more_bytes(ask: Ask) -> web.StreamResponse:
    return await ask.send(await ask.begin(len(ask.data) + 1), ask.data + b"x")


async def fewer_bytes(ask: Ask) -> web.StreamResponse:
    return await ask.send(await ask.begin(len(ask.data) - 1), ask.data[:-1])


async def bytes_that_break_off(ask: Ask) -> web.StreamResponse:
    response = await ask.send(await ask.begin(len(ask.data)), ask.data[: len(ask.data) // 2])
    assert ask.request.transport is not None
    ask.request.transport.abort()
    return response


async def bytes_without_end(ask: Ask) -> web.StreamResponse:
    return await _for_ever(ask, await ask.begin(10**14))


async def bytes_without_end_or_length(ask: Ask) -> web.StreamResponse:
    return await _for_ever(ask, await ask.begin(None))


async def _for_ever(ask: Ask, response: web.StreamResponse) -> web.StreamResponse:
    try:
        while True:
            await ask.send(response, bytes(BLOCK))
    except ConnectionError:
        return response


async def drop_by_drop(ask: Ask) -> web.StreamResponse:
    response = await ask.begin(len(ask.data))
    try:
        for at in range(len(ask.data)):
            await response.write(ask.data[at : at + 1])
            ask.sent += 1
            await asyncio.sleep(0.02)
    except ConnectionError:
        pass
    return response


async def nothing_at_all(ask: Ask) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def the_way_elsewhere(ask: Ask) -> web.StreamResponse:
    response = ask.plain(302)
    response.headers["Location"] = "http://127.0.0.1:9/"
    return response


async def right_bytes_without_a_signature(ask: Ask) -> web.StreamResponse:
    return web.Response(body=ask.data, headers={CHUNK_HEADER: sha256(ask.data)})


async def a_progress_that_is_no_number(ask: Ask) -> web.StreamResponse:
    return web.Response(
        status=202, headers={AUTH_HEADER: ask.sign(202, ("soon",), body_hash(b"")), PROGRESS_HEADER: "soon"}
    )


async def another_range(ask: Ask) -> web.StreamResponse:
    content_range = f"bytes {ask.start + 1}-{ask.start + len(ask.data)}/{ask.size}"
    return await ask.send(await ask.begin(len(ask.data), content_range=content_range), ask.data)


async def another_size(ask: Ask) -> web.StreamResponse:
    content_range = f"bytes {ask.start}-{ask.start + len(ask.data) - 1}/{ask.size + 5}"
    return await ask.send(await ask.begin(len(ask.data), content_range=content_range), ask.data)


async def another_list(ask: Ask) -> web.StreamResponse:
    return ask.plain(200, listed({path: altered(data) for path, data in ask.files.items()}))


async def a_list_of_nonsense(ask: Ask) -> web.StreamResponse:
    return ask.plain(200, b'[{"path": 5}]')


async def a_list_without_end(ask: Ask) -> web.StreamResponse:
    response = web.StreamResponse(headers={AUTH_HEADER: ask.sign(200, ())})
    response.content_length = 10**12
    await response.prepare(ask.request)
    return await _for_ever(ask, response)


for lie in (another_list, a_list_of_nonsense, a_list_without_end):
    lie.about_lists = True  # type: ignore[attr-defined]  # a mark for Liar


async def slowly_but_surely(ask: Ask) -> web.StreamResponse:
    """Three seconds for a chunk: more than half the patience of those who test with four."""
    response = await ask.begin(len(ask.data))
    step = 512 * 1024
    for at in range(0, len(ask.data), step):
        await ask.send(response, ask.data[at : at + step])
        await asyncio.sleep(3.0 * step / (4 * 1024 * 1024))
    return response
