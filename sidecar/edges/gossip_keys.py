"""The gossip's key file: read at the start, and again whenever it changes."""

from __future__ import annotations

import asyncio
import os

import structlog

from sidecar.core.keyring import Keyring, parse_keys
from sidecar.model import Problem
from sidecar.ports import EdgeError

log = structlog.get_logger()

MAX_KEY_FILE = 64 * 1024
# A mounted Secret appears about a minute after it was made.
LOOK_SECONDS = 10.0
_APPEARED = "the key is there now; this agent began without it, and gossip begins at the agent's next start"


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

    def load_if_there(self) -> Keyring | None:
        """The keys in it, None if there is no such file. Blocks. Raises KeyFileUnusable."""
        try:
            return self.load()
        except KeyFileUnusable as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

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


class AwaitedKeyFile:
    """A key file that wasn't there when the agent started, which therefore does without gossip until its next start."""

    def __init__(self, path: str, *, missed: bool, look: float = LOOK_SECONDS) -> None:
        """`missed` says whether its absence is worth a word to people."""
        self._path, self._missed, self._look = path, missed, look
        self._appeared = False

    async def run(self) -> None:
        """Look for it until it is there, then rest for ever: gossip isn't begun in mid-life."""
        while not self._appeared:
            await asyncio.sleep(self._look)
            if await asyncio.to_thread(os.path.exists, self._path):
                self._appeared = True
                log.warning("gossip_key_appeared", path=self._path, reason=_APPEARED)
        await asyncio.Event().wait()

    def problems(self) -> tuple[Problem, ...]:
        """That it is there by now, or that it still isn't."""
        where = f"--gossip-key-file {self._path}"
        if self._appeared:
            return (Problem(where=where, message=_APPEARED),)
        missing = "there is no such file, so that gossip is off: make one with a key (openssl rand -hex 32), and start "
        return (Problem(where=where, message=f"{missing}the agent again"),) if self._missed else ()
