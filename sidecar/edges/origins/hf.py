"""Origin `hf://`: a model repository on the Hugging Face hub, or on what HF_ENDPOINT names.

The revision is resolved to a commit once, at the listing; a file's ETag carries the commit, so that all later reads, by
whichever worker, are of exactly that one: `sha256:<hex>@<commit>` for large files, whose hash the hub tells, and
`git:<blob id>@<commit>` for the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Annotated, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from sidecar.core.sources import HubSource
from sidecar.edges.origins import Sink, listing_of, too_many
from sidecar.edges.origins.web import Web, pour, total_size
from sidecar.model import MAX_FILES, Frozen, Listing, RemoteFile
from sidecar.ports import AdapterRejected, OriginChanged, OriginDenied, OriginError

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_ANSWER = 4 * 1024 * 1024
MAX_PAGES = 4

T = TypeVar("T")

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Revision(Frozen, frozen=True):
    sha: str


class _Lfs(Frozen, frozen=True):
    oid: str
    size: Annotated[int, msgspec.Meta(ge=0)]


class _Entry(Frozen, frozen=True):
    type: str
    path: str
    oid: Annotated[str, msgspec.Meta(max_length=128)] = ""
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    lfs: _Lfs | None = None


class HubOrigin:
    """See Origin."""

    def __init__(self, source: HubSource, web: Web, credentials: Mapping[str, str]) -> None:
        self._source = source
        self._web = web
        self._endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        token = (credentials.get("HF_TOKEN") or credentials.get("token") or os.environ.get("HF_TOKEN", "")).strip()
        self._secret = {"Authorization": f"Bearer {token}"} if token else {}
        self._where = f"{source} at {self._endpoint}{'' if token else ' (without HF_TOKEN)'}"

    async def listing(self) -> Listing:
        """See Origin."""
        revision = quote(self._source.revision, safe="")
        url = f"{self._endpoint}/api/models/{self._source.repo}/revision/{revision}"
        async with self._get(url) as response:
            commit = (await self._decoded(response, _Revision)).sha
        if not _COMMIT.fullmatch(commit):
            raise OriginError(f"{self._where}: the hub names no commit but {commit[:80]!r}")
        files = [file async for file in self._files(commit)]
        if not files:
            raise OriginDenied(f"{self._where}: no file at commit {commit[:12]}")
        return listing_of(files, self._where)

    async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        """See Origin."""
        kind, _, commit = file.etag.partition("@")
        if not _COMMIT.fullmatch(commit) or not kind.startswith(("sha256:", "git:")):
            raise OriginChanged(f"{self._where}: {file.path} was not listed by a hub ({file.etag[:80]!r})")
        path = f"{self._source.subfolder}/{file.path}" if self._source.subfolder else file.path
        url = f"{self._endpoint}/{self._source.repo}/resolve/{commit}/{quote(path)}"
        headers = {} if start == 0 and stop == file.size else {"Range": f"bytes={start}-{stop - 1}"}
        async with self._get(url, headers) as response:
            if response.status not in (200, 206) or total_size(response) != file.size:
                total = total_size(response)
                raise OriginChanged(
                    f"{self._where}: {file.path} at commit {commit[:12]}: {response.status} with {total} bytes,"
                    f" {file.size} when it was listed"
                )
            await pour(response, start, stop, self._where, sink)

    def _get(
        self, url: str, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._web.get(url, self._where, headers or {}, self._secret)

    async def _files(self, commit: str) -> AsyncIterator[RemoteFile]:
        """All files below the subfolder, page by page."""
        subfolder = f"/{quote(self._source.subfolder)}" if self._source.subfolder else ""
        url = f"{self._endpoint}/api/models/{self._source.repo}/tree/{commit}{subfolder}?recursive=true"
        count = 0
        for _ in range(MAX_PAGES):
            async with self._get(url) as response:
                entries = await self._decoded(response, list[_Entry])
                following = response.links.get("next")
            for entry in entries:
                if entry.type != "file":
                    continue
                count += 1
                if count > MAX_FILES:
                    raise AdapterRejected(too_many(self._where, f"more than {MAX_FILES}"))
                yield self._remote(entry, commit)
            if following is None:
                return
            url = self._same_host(str(following["url"]))
        raise AdapterRejected(f"{self._where} has more than {MAX_PAGES} pages of files and folders")

    def _remote(self, entry: _Entry, commit: str) -> RemoteFile:
        prefix = f"{self._source.subfolder}/" if self._source.subfolder else ""
        if not entry.path.startswith(prefix):
            raise OriginError(f"{self._where}: the hub lists {entry.path[:200]!r}, which is elsewhere")
        path = entry.path[len(prefix) :]
        if entry.lfs is not None and _SHA256.fullmatch(entry.lfs.oid):
            return RemoteFile(path=path, size=entry.lfs.size, etag=f"sha256:{entry.lfs.oid}@{commit}")
        return RemoteFile(path=path, size=entry.size, etag=f"git:{entry.oid}@{commit}")

    async def _decoded(self, response: aiohttp.ClientResponse, kind: type[T]) -> T:
        """An answer of the hub's API, of bounded size."""
        if response.status == 404:
            text = response.headers.get("X-Error-Message") or "not found"
            raise OriginDenied(
                f"{self._where}: 404 {text[:200]}"
                " (a private repository looks like this without a token that may read it)"
            )
        if response.status != 200:
            raise OriginError(f"{self._where}: {response.status}")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_ANSWER:
                raise OriginError(f"{self._where}: an answer of more than {MAX_ANSWER} bytes")
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise OriginError(f"{self._where}: not what a hub answers: {error}") from None

    def _same_host(self, url: str) -> str:
        if URL(url).origin() != URL(self._endpoint).origin():
            raise OriginError(f"{self._where}: the hub's list goes on at another host, {URL(url).host}")
        return url
