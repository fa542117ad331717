"""The shared keys of a pool's agents: several at once, so that keys rotate without a gap."""

from __future__ import annotations

import hashlib

from sidecar.model import Frozen

MAX_KEYS = 16
MIN_KEY_CHARACTERS = 16


class Key(Frozen, frozen=True):
    """One shared key: 4 bytes that name it on the wire, and the secret that the MAC uses."""

    id: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Key({self.id.hex()})"


class Keyring(Frozen, frozen=True):
    """The first key signs, all of them verify."""

    keys: tuple[Key, ...]

    def find(self, key_id: bytes) -> Key | None:
        """The key of that name."""
        return next((key for key in self.keys if key.id == key_id), None)


def make_key(text: str) -> Key:
    """A key from one line of a key file."""
    secret = hashlib.sha256(b"lora-sidecar gossip key 1\0" + text.encode()).digest()
    return Key(hashlib.sha256(b"lora-sidecar gossip key id 1\0" + secret).digest()[:4], secret)


# Without a key the MAC only finds damage: everyone knows this one.
INSECURE = Keyring((make_key("no key: everyone is trusted"),))


def parse_keys(text: str) -> Keyring:
    """The keys in a key file: one a line; empty lines and lines that begin with `#` don't count.

    Raises:
        ValueError: no key, too many, or one that is too short to be a secret. The text holds no key.
    """
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if len(line) < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"line {number} has {len(line)} characters; a gossip key needs at least {MIN_KEY_CHARACTERS} "
                "(openssl rand -hex 32 makes one)"
            )
        keys.append(make_key(line))
    if not keys:
        raise ValueError("no key in it; write one a line (openssl rand -hex 32 makes one)")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys)} keys in it, at most {MAX_KEYS} are allowed; remove old ones")
    return Keyring(tuple(keys))
