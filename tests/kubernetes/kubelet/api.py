"""The kubelet's way to the API server: raw JSON, and a watch that never gives up."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

Json = dict[str, Any]
RETRY_SECONDS = 0.3


class Api:
    """Requests as an admin. Raises aiohttp.ClientError (and its ClientResponseError with a status)."""

    def __init__(self, server: str, ca_file: str, token: str) -> None:
        self.server = server
        self._context = ssl.create_default_context(cafile=ca_file)
        self._headers = {"Authorization": f"Bearer {token}", "User-Agent": "test-kubelet"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(self, method: str, path: str, body: Json | None = None, media: str = "application/json") -> Json:
        """One request, at most 5 s."""
        assert self._session is not None
        async with asyncio.timeout(5):
            async with self._session.request(
                method,
                self.server + path,
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": media},
                ssl=self._context,
            ) as response:
                text = await response.text()
                if response.status >= 300:
                    raise aiohttp.ClientResponseError(
                        response.request_info, response.history, status=response.status, message=text[:500]
                    )
                return json.loads(text)

    async def get(self, path: str) -> Json:
        """GET an object or a list."""
        return await self.request("GET", path)

    async def merge(self, path: str, body: Json) -> Json:
        """PATCH by a merge patch."""
        return await self.request("PATCH", path, body, "application/merge-patch+json")

    async def apply(self, path: str, body: Json) -> Json:
        """Server-side apply."""
        return await self.request(
            "PATCH", f"{path}?fieldManager=test-kubelet&force=true", body, "application/apply-patch+yaml"
        )

    async def watch(self, path: str) -> AsyncIterator[tuple[str, Json]]:
        """("LISTED", the list) at the start and after every interruption, then (event type, object) for ever."""
        while True:
            try:
                listed = await self.get(path)
                yield "LISTED", listed
                version = listed["metadata"]["resourceVersion"]
                async for event in self._events(f"{path}?watch=true&resourceVersion={version}"):
                    if event["type"] == "ERROR":
                        break
                    yield event["type"], event["object"]
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(RETRY_SECONDS)

    async def _events(self, path: str) -> AsyncIterator[Json]:
        assert self._session is not None
        async with self._session.get(
            self.server + path, ssl=self._context, read_bufsize=1 << 22, timeout=aiohttp.ClientTimeout(sock_connect=2)
        ) as response:
            response.raise_for_status()
            buffer = b""
            async for chunk in response.content.iter_any():
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    yield json.loads(line)
