"""Origin `https://` (and `http://`, where it is allowed): one archive on a web server."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping

import aiohttp

from sidecar.core.sources import HttpSource
from sidecar.edges.origins import Sink, listing_of
from sidecar.edges.origins.web import Web, pour, total_size
from sidecar.model import Listing, RemoteFile
from sidecar.ports import OriginChanged, OriginDenied

MAX_ETAG = 500


class HttpOrigin:
    """See Origin. The file's ETag is the server's, or else `modified:` and its Last-Modified."""

    def __init__(self, source: HttpSource, web: Web, credentials: Mapping[str, str]) -> None:
        self._url = source.url
        self._name = source.name
        self._where = str(source)
        self._web = web
        self._secret = _authorization(credentials)

    async def listing(self) -> Listing:
        """See Origin. Asks for the first byte: signed URLs often permit no HEAD."""
        async with self._web.get(self._url, self._where, {"Range": "bytes=0-0"}, self._secret) as response:
            if response.status == 404:
                raise OriginDenied(f"{self._where}: 404, there is no such file")
            size = total_size(response)
            if size is None:
                raise OriginDenied(f"{self._where}: the server doesn't say the file's size ({response.status})")
            file = RemoteFile(path=self._name, size=size, etag=_validator(response))
        return listing_of([file], self._where, archive=True)

    async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        """See Origin. A server that knows no ranges sends all of it, of which the wanted part is taken."""
        headers = {} if start == 0 and stop == file.size else {"Range": f"bytes={start}-{stop - 1}"}
        if file.etag.startswith('"'):
            headers["If-Match"] = file.etag
        async with self._web.get(self._url, self._where, headers, self._secret) as response:
            same = response.status in (200, 206) and total_size(response) == file.size
            if not same or _validator(response) != file.etag:
                raise OriginChanged(f"{self._where} was changed since it was listed ({response.status})")
            await pour(response, start, stop, self._where, sink)


def _validator(response: aiohttp.ClientResponse) -> str:
    etag = response.headers.get("ETag", "")
    # Without quotes it is no ETag, and could pass for one of our own kinds.
    if len(etag) <= MAX_ETAG and etag.endswith('"') and etag.startswith(('"', 'W/"')):
        return etag
    modified = response.headers.get("Last-Modified", "")
    return f"modified:{modified}" if 0 < len(modified) < 100 else ""


def _authorization(credentials: Mapping[str, str]) -> dict[str, str]:
    """A Secret with `token`, or with `username` and `password` as in kubernetes.io/basic-auth."""
    if credentials.get("token"):
        return {"Authorization": f"Bearer {credentials['token']}"}
    if credentials.get("username") or credentials.get("password"):
        pair = f"{credentials.get('username', '')}:{credentials.get('password', '')}"
        return {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
    return {}
