"""What of a Secret's data is for an origin: which keys each kind of source takes, and what a value may look like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from sidecar.core.sources import FileSource, HttpSource, HubSource, ParsedSource, S3Source, refused_address

MAX_VALUE = 16 * 1024
"""Bytes; the longest in use are session tokens of about 2 KiB."""

_S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_S3_OPTIONS = ("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", *_ENDPOINTS)
# Everything else that may be in the data is about where to go, and may be shown.
_HIDDEN = frozenset({"AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "token", "password"})


class UnusableSecret(ValueError):
    """A Secret doesn't fit the source. The text names the key, never a value, and reads on from "the Secret X"."""


def credentials_of(source: ParsedSource, data: Mapping[str, bytes]) -> dict[str, str]:
    """The part of a Secret's data that this source takes; all other keys are left alone, unread.

    s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and if there AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL.
    hf: HF_TOKEN (or token). https: token, or username and password; and host, the only server that gets them: whoever
    may write an Adapter may not read the Secret, and must not have it sent to a server of their own. file: nothing.

    Raises UnusableSecret.
    """
    match source:
        case S3Source():
            found = _required(data, _S3_KEYS) | _present(data, _S3_OPTIONS)
            for name in _ENDPOINTS:
                _check_endpoint(name, found.get(name, ""))
            return found
        case HubSource():
            name = "token" if data.get("token") and not data.get("HF_TOKEN") else "HF_TOKEN"
            return {"HF_TOKEN": _required(data, (name,))[name]}
        case HttpSource():
            return _for_web(source, data)
        case FileSource():
            return {}


def without_secrets(text: str, credentials: Mapping[str, str]) -> str:
    """`text` with the secret ones of these values blotted out: servers may repeat what they were sent."""
    for name, value in credentials.items():
        if name in _HIDDEN and value:
            text = text.replace(value, "***")
    return text


def _for_web(source: HttpSource, data: Mapping[str, bytes]) -> dict[str, str]:
    split = urlsplit(source.url)
    if split.scheme != "https":
        raise UnusableSecret("is not sent over plain http://, where anyone on the way could read it; use https://")
    host = _required(data, ("host",))["host"]
    if _server(f"//{host}") != _server(source.url):
        raise UnusableSecret(f"is for the server {host!r} (its key 'host'), but the URI names {split.netloc!r}")
    if data.get("token"):
        return _present(data, ("token",))
    if data.get("username") or data.get("password"):
        return _required(data, ("username", "password"))
    raise UnusableSecret("has neither a key 'token' nor the keys 'username' and 'password'")


def _server(url: str) -> tuple[str | None, int]:
    """Host and port of an https URL."""
    try:
        split = urlsplit(url)
        return split.hostname, split.port or 443
    except ValueError:
        raise UnusableSecret("names no server under 'host'; write name or name:port") from None


def _required(data: Mapping[str, bytes], names: tuple[str, ...]) -> dict[str, str]:
    missing = [name for name in names if not data.get(name)]
    if missing:
        raise UnusableSecret(f"has no key {' and no key '.join(map(repr, missing))}, or it is empty")
    return _present(data, names)


def _present(data: Mapping[str, bytes], names: Iterable[str]) -> dict[str, str]:
    return {name: _text(name, data[name]) for name in names if data.get(name)}


def _text(name: str, value: bytes) -> str:
    if len(value) > MAX_VALUE:
        raise UnusableSecret(f"has {len(value)} bytes under {name!r}, the limit is {MAX_VALUE}")
    try:
        # `kubectl create secret --from-file` keeps the line's end.
        text = value.decode().strip(" \r\n")
    except UnicodeDecodeError:
        raise UnusableSecret(f"holds no text under {name!r}") from None
    if not text or any(ord(c) < 0x20 or ord(c) == 0x7F for c in text):
        raise UnusableSecret(f"holds {'control characters' if text else 'nothing'} under {name!r}")
    return text


def _check_endpoint(name: str, url: str) -> None:
    if not url:
        return
    try:
        split = urlsplit(url)
        host = split.hostname or ""
    except ValueError:
        host = ""
    if not host or split.scheme not in ("http", "https"):
        raise UnusableSecret(f"holds no http:// or https:// URL under {name!r}")
    if refused_address(host):
        raise UnusableSecret(f"names a link-local or metadata address under {name!r}, where no adapter comes from")
