"""The gossip's key file: read at the start, and again whenever it changes."""

from __future__ import annotations

import os

import structlog

from sidecar.core.keyring import Keyring, parse_keys
from sidecar.ports import EdgeError

log = structlog.get_logger()

MAX_KEY_FILE = 64 * 1024


class KeyFileUnusable(EdgeError):
    """The key file is missing, unreadable, or holds no usable key. The text names the file, and no key."""


class KeyFile:
    """A key file that rotates while the agent runs (a mounted Secret is replaced as a whole)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: bytes | None = None
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why the file as it is now isn't used, "" if it is."""
        return self._reason

    def load(self) -> Keyring:
        """The keys in it. Blocks. Raises KeyFileUnusable."""
        try:
            data = self._read()
            found = _parse(data)
        except (OSError, ValueError) as error:
            raise KeyFileUnusable(f"--gossip-key-file {self._path}: {_text(error)}") from error
        self._seen, self._reason = data, ""
        return found

    def changed(self) -> Keyring | None:
        """The keys if the file holds others than at the last look; None if not, or if it can't be used. Blocks."""
        try:
            data = self._read()
            if data == self._seen:
                self._reason = ""
                return None
            found = _parse(data)
        except (OSError, ValueError) as error:
            if self._reason != _text(error):
                self._reason = _text(error)
                log.warning("gossip_keys_not_read", path=self._path, reason=self._reason)
            return None
        self._seen, self._reason = data, ""
        log.info("gossip_keys_read", path=self._path, keys=len(found.keys))
        return found

    def _read(self) -> bytes:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            data = file.read(MAX_KEY_FILE + 1)
        if len(data) > MAX_KEY_FILE:
            raise ValueError(f"is larger than {MAX_KEY_FILE} bytes; it needs one key a line")
        return data


def _parse(data: bytes) -> Keyring:
    try:
        return parse_keys(data.decode())
    except UnicodeDecodeError:
        raise ValueError("is no text; openssl rand -hex 32 makes a key") from None


def _text(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
