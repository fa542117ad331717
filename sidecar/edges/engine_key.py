"""The engine's API key, from a file that may change while the agent runs. The key is never logged or shown."""

from __future__ import annotations

import os

from sidecar.ports import REASON_UNAUTHORIZED, EngineRefused

_MAX_KEY = 4096
_SHORTEST_REDACTED = 4


class EngineKey:
    """`--engine-api-key-file`, read again when the file changes; no file, no key.

    A file that vanishes after it has been read once (a Secret being swapped) leaves the last key in force.
    """

    def __init__(self, path: str, known: str = "") -> None:
        """`known` is the key that serves when no file is given."""
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._key = "" if path else known

    def header(self) -> dict[str, str]:
        """The Authorization header, empty without a key. Raises EngineRefused if there is no usable key in the file."""
        if self._path:
            self._refresh()
        if not self._key:
            return {}
        return {"Authorization": f"Bearer {self._key}"}

    def redact(self, text: str) -> str:
        """`text` without the key, should the engine have sent it back."""
        return text.replace(self._key, "***") if len(self._key) >= _SHORTEST_REDACTED else text

    def advice(self) -> str:
        """What a person can do about a 401."""
        if self._path:
            return f"The engine refuses the key in --engine-api-key-file {self._path}"
        return "The engine wants an API key: put the one it was started with into a file for --engine-api-key-file"

    def _refresh(self) -> None:
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            with open(self._path, "rb") as file:
                raw = file.read(_MAX_KEY + 1)
        except OSError as error:
            if self._stamp is not None:
                return
            raise EngineRefused(
                f"--engine-api-key-file {self._path} can't be read: {error.strerror}", REASON_UNAUTHORIZED
            ) from None
        key = raw.strip()
        if not key or len(raw) > _MAX_KEY or any(not 0x21 <= byte <= 0x7E for byte in key):
            raise EngineRefused(
                f"--engine-api-key-file {self._path} must hold one key of 1 to {_MAX_KEY} printable ASCII characters "
                f"without blanks; it has {len(raw)} bytes",
                REASON_UNAUTHORIZED,
            )
        self._key, self._stamp = key.decode("ascii"), stamp
