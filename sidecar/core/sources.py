"""Source URIs: what `spec.source.uri` may say, as typed values.

Pure and strict: a URI that parses names exactly one place, and a URI that doesn't says which part is wrong. S3 keys are
taken literally (`?`, `#` and `%` are ordinary characters of a key); the other schemes are percent-decoded as usual.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, unquote, urlsplit

from sidecar.model import Frozen

ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")
SCHEMES = ("s3", "hf", "https", "http", "file")
KNOWN = "s3://bucket/prefix, hf://org/repo[@revision][/subfolder], https://host/archive.tar.gz, file:///absolute/path"
MAX_URI = 2048

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_REPO_PART = re.compile(r"[A-Za-z0-9_.-]{1,96}")
# The hub's own revisions that hold slashes; every other slash ends the revision (or is written %2F).
_HUB_REVISION = re.compile(r"(refs/(?:convert|pr)/[^/]+|[^/]+)(?:/(.*))?")
_MISTAKEN = {"huggingface": "hf", "hugging_face": "hf", "s3a": "s3", "s3n": "s3"}


class InvalidSource(ValueError):
    """The URI can't name a source. The text names the URI (without credentials), the fault and what is allowed."""


class S3Source(Frozen, frozen=True, kw_only=True):
    """An archive's key, or the objects under `key` + "/"; an empty key is the whole bucket."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


class HubSource(Frozen, frozen=True, kw_only=True):
    """A model repository on a Hugging Face hub. `revision` is a branch, tag or commit; `subfolder` "" is its root."""

    repo: str
    revision: str = "main"
    subfolder: str = ""

    def __str__(self) -> str:
        return f"hf://{self.repo}@{self.revision}" + (f"/{self.subfolder}" if self.subfolder else "")


class HttpSource(Frozen, frozen=True, kw_only=True):
    """One archive on a web server. `url` may carry a signed query, so show `str(source)`, which leaves it out."""

    url: str
    host: str
    name: str

    def __str__(self) -> str:
        return self.url.partition("?")[0]


class FileSource(Frozen, frozen=True, kw_only=True):
    """A directory or an archive on this machine, by absolute path."""

    path: str

    def __str__(self) -> str:
        return f"file://{self.path}"


ParsedSource = S3Source | HubSource | HttpSource | FileSource


def is_archive(path: str) -> bool:
    """Whether the name says that this is an archive which gets unpacked."""
    return path.lower().endswith(ARCHIVE_SUFFIXES)


def parse_source(uri: str, *, allow_http: bool = False) -> ParsedSource:
    """The place that `uri` names. Raises InvalidSource."""
    if not uri or len(uri) > MAX_URI:
        raise InvalidSource(f"source URI of {len(uri)} characters: 1 to {MAX_URI} are allowed; known are {KNOWN}")
    if uri != uri.strip() or any(ord(c) < 0x20 or ord(c) == 0x7F for c in uri):
        raise InvalidSource(f"source URI {uri!r}: leading, trailing or control characters are not part of any URI")
    scheme, colon, rest = uri.partition("://")
    if not colon:
        raise InvalidSource(f"source URI {shown(uri)!r} has no scheme{_schemeless_hint(uri)}; known are {KNOWN}")
    if scheme not in SCHEMES:
        better = _MISTAKEN.get(scheme.lower(), scheme.lower())
        hint = f" (did you mean {better}://?)" if better in SCHEMES else ""
        raise InvalidSource(f"source URI {shown(uri)!r}: unknown scheme {scheme!r}{hint}; known are {KNOWN}")
    if scheme == "s3":
        return _parse_s3(uri, rest)
    if scheme == "hf":
        return _parse_hub(uri, rest)
    if scheme == "file":
        return _parse_file(uri, rest)
    if scheme == "http" and not allow_http:
        raise InvalidSource(
            f"source URI {shown(uri)!r}: plain http:// is off, since anyone on the way could change the files;"
            " use https://, or start the agent with --allow-http"
        )
    return _parse_web(uri)


def shown(uri: str) -> str:
    """The URI for messages, without what may be secret: what is before an '@' in its first part, a web URL's query."""
    scheme, colon, rest = uri.partition("://")
    if not colon:
        return uri
    first, slash, path = rest.partition("/")
    if scheme in ("http", "https"):
        path = re.split("[?#]", path, maxsplit=1)[0]
    return f"{scheme}://{first.rpartition('@')[2]}{slash}{path}"


def refused_address(address: str) -> bool:
    """Whether an IP address is one that adapters never come from: link-local (cloud metadata), multicast, unspecified.

    IPv4 addresses hidden in IPv6 ones (mapped, 6to4, NAT64) count as what they hide. A name that is no address
    is not refused here: the resolver's answer is.
    """
    try:
        ip = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or _nat64(ip) or ip
    return ip.is_link_local or ip.is_multicast or ip.is_unspecified or str(ip) in _METADATA


# Instance metadata outside the link-local range: AWS by IPv6, Alibaba Cloud, Oracle Cloud, Azure's wire server.
_METADATA = frozenset({"fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _nat64(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None


def _schemeless_hint(uri: str) -> str:
    if uri.startswith("/"):
        return f" (a path on this machine is file://{uri})"
    if uri.count("/") == 1 and all(_REPO_PART.fullmatch(part) for part in uri.split("/")):
        return f" (a Hugging Face repository is hf://{uri})"
    return ""


def _no_dots(uri: str, path: str) -> None:
    if any(part in (".", "..") for part in path.split("/")):
        raise InvalidSource(f"source URI {shown(uri)!r}: '.' and '..' are not allowed as a part of the path")


def _parse_s3(uri: str, rest: str) -> S3Source:
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidSource(
            f"source URI {shown(uri)!r}: {bucket.rpartition('@')[2]!r} is no bucket name"
            " (3 to 255 letters, digits, '.', '-', '_'); write s3://bucket/prefix"
        )
    _no_dots(uri, key)
    return S3Source(bucket=bucket, key=key.rstrip("/"))


def _parse_hub(uri: str, rest: str) -> HubSource:
    parts = rest.split("/", 2)
    organisation = parts[0]
    if organisation in ("datasets", "spaces"):
        raise InvalidSource(f"source URI {shown(uri)!r}: adapters live in model repositories, not in {organisation}")
    name, at, revision = (parts[1] if len(parts) > 1 else "").partition("@")
    subfolder = parts[2] if len(parts) > 2 else ""
    if at:
        matched = _HUB_REVISION.fullmatch("/".join((revision, *parts[2:])))
        if matched is None:
            raise InvalidSource(
                f"source URI {shown(uri)!r}: nothing after '@'; name a branch, tag or commit, or leave '@' out"
            )
        revision, subfolder = unquote(matched[1]), matched[2] or ""
    for what, part in (("organisation", organisation), ("repository", name)):
        if not _REPO_PART.fullmatch(part) or ".." in part or part == ".":
            raise InvalidSource(
                f"source URI {shown(uri)!r}: {part.rpartition('@')[2]!r} is no {what} name"
                " (1 to 96 letters, digits, '.', '-', '_');"
                " write hf://org/repo[@revision][/subfolder]"
            )
    subfolder = unquote(subfolder).strip("/")
    _no_dots(uri, subfolder)
    _no_dots(uri, revision)
    return HubSource(repo=f"{organisation}/{name}", revision=revision or "main", subfolder=subfolder)


def _parse_file(uri: str, rest: str) -> FileSource:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost"):
        raise InvalidSource(
            f"source URI {shown(uri)!r}: {host!r} would be a host; a path is absolute: file:///absolute/path"
        )
    path = slash + unquote(path).rstrip("/")
    if path in ("", "/"):
        raise InvalidSource(f"source URI {shown(uri)!r} names no directory; write file:///absolute/path")
    if "\0" in path:
        raise InvalidSource(f"source URI {shown(uri)!r}: a path can't hold a zero byte")
    _no_dots(uri, path)
    return FileSource(path=path)


def _split_web(uri: str) -> SplitResult:
    try:
        split = urlsplit(uri)
        _ = split.port
    except ValueError as error:
        raise InvalidSource(f"source URI {shown(uri)!r}: {error}") from None
    return split


def _parse_web(uri: str) -> HttpSource:
    split = _split_web(uri)
    if split.username is not None or split.password is not None:
        raise InvalidSource(
            f"source URI {shown(uri)!r} holds a user or password, which everyone who reads the resource could see;"
            " use spec.source.secretRef"
        )
    if not split.hostname:
        raise InvalidSource(f"source URI {shown(uri)!r} names no host")
    if refused_address(split.hostname):
        raise InvalidSource(
            f"source URI {shown(uri)!r}: {split.hostname} is a link-local, metadata, multicast or unspecified address,"
            " where no adapter comes from"
        )
    if split.fragment:
        raise InvalidSource(f"source URI {shown(uri)!r}: a '#' part means nothing to a server; write it as %23")
    name = unquote(split.path).rpartition("/")[2]
    if not is_archive(name):
        raise InvalidSource(
            f"source URI {shown(uri)!r}: a web server can't list files, so the path must end in"
            f" {', '.join(ARCHIVE_SUFFIXES[:-1])} or {ARCHIVE_SUFFIXES[-1]}"
        )
    return HttpSource(url=uri, host=split.hostname, name=name)
