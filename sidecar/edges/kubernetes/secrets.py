"""Credentials of origins from Secrets: read by name when they are needed, and only where a Role names them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import quote

import msgspec

from sidecar.core.credentials import MAX_VALUE, UnusableSecret, credentials_of
from sidecar.core.sources import InvalidSource, parse_source
from sidecar.edges.kubernetes.api import Api, ApiError, PodIdentity
from sidecar.model import Adapter, Frozen
from sidecar.ports import AdapterRejected, OriginDenied, OriginError

ROLE = "lora-sidecar-secrets"
# Long enough for all files of a download, short enough that nobody waits for a rotation.
KEEP_SECONDS = 30.0
# A hundred adapters of one Secret that is refused, or of one that isn't there, ask once.
ASK_AGAIN_SECONDS = 2.0


class _Secret(Frozen, frozen=True):
    data: dict[str, str] | None = None


class _Known:
    """What is known of one Secret: its data still encoded, or why there is none; `at` is when it was read."""

    def __init__(self) -> None:
        self.reading = asyncio.Lock()
        self.at = float("-inf")
        self.data: Mapping[str, str] = {}
        self.failure: OriginError | None = None


class Secrets:
    """See edges.credentials.Credentials."""

    def __init__(
        self, api: Api, me: PodIdentity, *, allow_http: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` tells seconds."""
        self._api = api
        self._me = me
        self._allow_http = allow_http
        self._clock = clock
        self._known: dict[tuple[str, str], _Known] = {}

    async def __call__(self, adapter: Adapter, refused: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """See Credentials. Raises AdapterRejected too, for a source that is none."""
        name = adapter.source.secret or ""
        self._forget_old()
        known = self._known.setdefault((adapter.namespace, name), _Known())
        async with known.reading:
            if self._clock() - known.at > self._worth(known, refused is not None):
                await self._read(known, adapter.namespace, name)
        if known.failure is not None:
            raise type(known.failure)(str(known.failure))
        return self._for(adapter, known.data)

    def _worth(self, known: _Known, refused: bool) -> float:
        """Seconds for which what is known need not be asked again."""
        return ASK_AGAIN_SECONDS if refused or known.failure is not None else KEEP_SECONDS

    def _forget_old(self) -> None:
        """Keep no credentials in memory that nobody uses."""
        now = self._clock()
        for key, known in list(self._known.items()):
            if not known.reading.locked() and now - known.at > KEEP_SECONDS:
                del self._known[key]

    async def _read(self, known: _Known, namespace: str, name: str) -> None:
        known.data, known.failure = {}, None
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/secrets/{quote(name, safe='')}"
        try:
            known.data = msgspec.json.decode(await self._api.request("GET", path), type=_Secret).data or {}
        except ApiError as error:
            known.failure = self._failure(error, namespace, name)
        except msgspec.MsgspecError:
            # Its text could repeat a value.
            known.failure = OriginError(f"Secret {namespace}/{name}: the API server's answer is no Secret")
        known.at = self._clock()

    def _failure(self, error: ApiError, namespace: str, name: str) -> OriginError:
        if error.code == 403:
            account = f"{self._me.namespace}:{self._me.account}"
            return OriginDenied(
                f"Secret {namespace}/{name}: the ServiceAccount {account} may not read it; to allow it, bind to it the "
                f"Role {ROLE} with resourceNames [{name}] (deploy/samples/secrets-role.yaml)"
            )
        if error.code == 404:
            return OriginDenied(f"Secret {namespace}/{name} does not exist (spec.source.secretRef.name)")
        return OriginError(f"Secret {namespace}/{name} can't be read now: {error}")

    def _for(self, adapter: Adapter, encoded: Mapping[str, str]) -> Mapping[str, str]:
        """Raises OriginDenied for a Secret that doesn't fit the source."""
        try:
            source = parse_source(adapter.source.uri, allow_http=self._allow_http)
            return credentials_of(source, _Decoded(encoded))
        except InvalidSource as error:
            raise AdapterRejected(str(error)) from None
        except UnusableSecret as error:
            raise OriginDenied(f"Secret {adapter.namespace}/{adapter.source.secret} {error}") from None


class _Decoded(Mapping[str, bytes]):
    """A Secret's data, of which only what is asked for is decoded. Values too large to be any are cut behind that."""

    def __init__(self, encoded: Mapping[str, str]) -> None:
        self._encoded = encoded

    def __getitem__(self, name: str) -> bytes:
        try:
            return base64.b64decode(self._encoded[name][: 4 * MAX_VALUE], validate=True)
        except binascii.Error:
            raise UnusableSecret(f"holds no base64 under {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._encoded)

    def __len__(self) -> int:
        return len(self._encoded)
