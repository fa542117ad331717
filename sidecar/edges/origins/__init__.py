"""Origins: where source URIs point, all behind one small protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from sidecar.core.paths import contained_paths
from sidecar.core.refusal import Refused
from sidecar.core.sources import FileSource, HttpSource, HubSource, InvalidSource, S3Source, parse_source
from sidecar.model import MAX_FILES, Listing, RemoteFile
from sidecar.ports import AdapterRejected
from sidecar.settings import Settings

if TYPE_CHECKING:
    from sidecar.edges.origins.s3 import S3Clients
    from sidecar.edges.origins.web import Web

BLOCK = 1024 * 1024
"""Bytes handed to a sink at a time: large enough that Python's cost per block vanishes beside copying and hashing."""

Sink = Callable[[bytes], None]
"""Takes the next bytes of a range. Called in order, by one thread at a time, never on the event loop; it may block.
An EdgeError that it raises ends the read and is passed on; it raises nothing else."""


class Origin(Protocol):
    """One source, as it can be listed and read. All errors are OriginError and its subclasses or AdapterRejected, name
    the place, and hold no credentials."""

    async def listing(self) -> Listing:
        """What is there now, sorted by path. Raises AdapterRejected for what no adapter can look like."""

    async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        """Give bytes [start, stop) of `file` to `sink`, all or an error, from exactly the version that was listed.

        Raises OriginChanged when the origin holds another version now.
        """


class Origins:
    """Opens origins and keeps what they share: one S3 client for each set of credentials, one HTTP session."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._s3: S3Clients | None = None
        self._web: Web | None = None

    def open(self, uri: str, credentials: Mapping[str, str] | None = None) -> Origin:
        """The origin behind `uri`; `credentials`, a Secret's data, go before the process's. Raises AdapterRejected."""
        try:
            source = parse_source(uri, allow_http=self._settings.allow_http)
        except InvalidSource as error:
            raise AdapterRejected(str(error)) from None
        match source:
            case FileSource():
                from sidecar.edges.origins.file import FileOrigin

                return FileOrigin(source)
            case S3Source():
                from sidecar.edges.origins.s3 import S3Clients, S3Origin

                self._s3 = self._s3 or S3Clients()
                return S3Origin(source, self._s3, credentials or {})
            case HttpSource():
                from sidecar.edges.origins.http import HttpOrigin

                return HttpOrigin(source, self._web_session(), credentials or {})
            case HubSource():
                from sidecar.edges.origins.hf import HubOrigin

                return HubOrigin(source, self._web_session(), credentials or {})

    async def close(self) -> None:
        """Let go of connections."""
        if self._s3 is not None:
            self._s3.close()
        if self._web is not None:
            await self._web.close()

    def _web_session(self) -> Web:
        from sidecar.edges.origins.web import Web

        self._web = self._web or Web()
        return self._web


def listing_of(files: Iterable[RemoteFile], where: str, *, archive: bool = False) -> Listing:
    """A listing in the order of paths, within the limits. Raises AdapterRejected; `where` names the origin in it."""
    listed = list(files)
    if len(listed) > MAX_FILES:
        raise AdapterRejected(too_many(where, f"{len(listed)}"))
    try:
        contained_paths(file.path for file in listed)
    except Refused as error:
        raise AdapterRejected(f"{where}: {error}") from None
    listed.sort(key=lambda file: file.path.encode())
    return Listing(files=tuple(listed), archive=archive)


def too_many(where: str, count: str) -> str:
    """The refusal of a directory that can't be one adapter."""
    return f"{where} holds {count} files, an adapter may have {MAX_FILES}: does the URI point above the adapter?"
