"""Which content is which: what makes two downloads one, and what makes one the wrong one."""

from __future__ import annotations

import hashlib

import msgspec

from sidecar.core.sources import shown
from sidecar.edges.partial import known_sha256
from sidecar.model import Adapter, Listing, StoredFile
from sidecar.ports import AdapterRejected, EdgeError, OriginChanged, OriginError


def content_key(adapter: Adapter, listing: Listing) -> str:
    """Names what is downloaded: two adapters of one URI share it, two versions or two sets of credentials don't."""
    secret = f"{adapter.namespace}/{adapter.source.secret}" if adapter.source.secret else ""
    framed = msgspec.json.encode((adapter.source.uri, secret, listing))
    return hashlib.sha256(framed).hexdigest()


def compare(adapter: Adapter, revision: str | None, found: str) -> None:
    """Raises AdapterRejected for another content than the pinned one, OriginChanged for another than the pool's."""
    where = shown(adapter.source.uri)
    digest = adapter.source.digest
    if digest and digest != found:
        raise AdapterRejected(f"{where}: the content is {found}, but spec.source.digest pins {digest}")
    if revision and revision != found:
        raise OriginChanged(f"{where}: the content is {found} now, but the pool has decided on {revision}")


def compare_known(adapter: Adapter, listing: Listing, files: tuple[StoredFile, ...]) -> None:
    """Raises OriginError if a file isn't what its origin says that it is."""
    for remote, stored in zip(listing.files, files, strict=True):
        known = known_sha256(remote)
        if known and known != stored.sha256:
            where = f"{shown(adapter.source.uri)}: {remote.path}"
            raise OriginError(f"{where}: its sha256 is {stored.sha256}, the origin lists {known}")


class OtherContent(OriginChanged):
    """The files are sound, but not the ones that were asked for."""

    def __init__(self, adapter: Adapter, found: str) -> None:
        super().__init__(f"{shown(adapter.source.uri)}: the content is {found} now")
        self.found = found


class Unverified(Exception):
    """The bytes are all here, but wrong. What came from peers may be right at the origin."""

    def __init__(self, reason: EdgeError) -> None:
        super().__init__(str(reason))
        self.reason = reason
