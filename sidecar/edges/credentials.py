"""Origins that are read with the credentials of an adapter's Secret."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from sidecar.core.credentials import without_secrets
from sidecar.edges.origins import Origin, Sink
from sidecar.model import Adapter, Listing, RemoteFile
from sidecar.ports import OriginChanged, OriginDenied, OriginError

T = TypeVar("T")


class Credentials(Protocol):
    """Where the credentials of adapters with spec.source.secretRef come from."""

    async def __call__(self, adapter: Adapter, /, refused: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """What the origin takes of the adapter's Secret; empty stands for the process's own credentials.

        `refused` are credentials that the origin refused: they are looked up anew rather than given again.
        Raises OriginError.
        """


class SecretOrigin:
    """See Origin. The Secret is read when the origin is first asked, so whoever has all bytes from peers reads none.

    Credentials that are refused may have been rotated since they were read: then it is tried once more, with the new.
    """

    def __init__(
        self, adapter: Adapter, credentials: Credentials, open_with: Callable[[Mapping[str, str]], Origin]
    ) -> None:
        self._adapter = adapter
        self._credentials = credentials
        self._open_with = open_with

    async def listing(self) -> Listing:
        """See Origin."""
        return await self._asked(lambda origin: origin.listing(), lambda: True)

    async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        """See Origin."""
        blocks = 0

        def counted(block: bytes) -> None:
            nonlocal blocks
            blocks += 1
            sink(block)

        await self._asked(lambda origin: origin.read(file, start, stop, counted), lambda: blocks == 0)

    async def _asked(self, ask: Callable[[Origin], Awaitable[T]], from_the_start: Callable[[], bool]) -> T:
        used = await self._credentials(self._adapter)
        try:
            return await ask(self._open_with(used))
        except OriginDenied as error:
            renewed = await self._credentials(self._adapter, refused=used)
            if renewed == used or not from_the_start():
                raise self._named(error, used) from None
        except OriginError as error:
            raise self._named(error, used) from None
        try:
            return await ask(self._open_with(renewed))
        except OriginError as error:
            raise self._named(error, renewed) from None

    def _named(self, error: OriginError, used: Mapping[str, str]) -> OriginError:
        """The same error, without what a server repeated of the credentials; a refusal names the Secret."""
        text = without_secrets(str(error), used)
        if isinstance(error, OriginDenied):
            return OriginDenied(f"{text} (with the Secret {self._adapter.source.secret!r})" if used else text)
        return OriginChanged(text) if isinstance(error, OriginChanged) else OriginError(text)
