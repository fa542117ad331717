"""Origin `s3://`: AWS and everything that speaks its protocol.

boto3's import costs 20 MiB, so it happens with the first S3 adapter. Bytes come by `get_object` and a loop of 1 MiB
reads on one thread a range, which measures at the speed of a bare socket; boto3's own transfer threads cost four times
the CPU and 50 MiB more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from sidecar import __version__
from sidecar.core.sources import S3Source, is_archive
from sidecar.edges.origins import BLOCK, Sink, listing_of, too_many
from sidecar.edges.threads import in_thread
from sidecar.model import MAX_FILES, Listing, RemoteFile
from sidecar.ports import AdapterRejected, OriginChanged, OriginDenied, OriginError

CONNECT_SECONDS = 5
READ_SECONDS = 20
# A page has at most 1,000 keys. More pages than this are directory markers, or no adapter.
MAX_PAGES = 4
# Short-lived credentials are others every hour; the clients of old ones must not pile up.
MAX_CLIENTS = 16


class S3Clients:
    """One client for each set of credentials: making one takes 100 ms of CPU, and they share connections."""

    def __init__(self, most: int = MAX_CLIENTS) -> None:
        """Keeps the `most` that were used last."""
        self._most = most
        self._clients: dict[tuple[tuple[str, str], ...], S3Client] = {}
        self._making = threading.Lock()

    def get(self, credentials: Mapping[str, str], where: str) -> S3Client:
        """The client for a Secret's data, or with none of it for the AWS chain's. Blocking: imports, may ask STS.

        Raises OriginError, naming `where`.
        """
        key = tuple(sorted(credentials.items()))
        with self._making:
            client = self._clients.pop(key, None) or S3Client(credentials, where)
            self._clients[key] = client  # as the one used last
            while len(self._clients) > self._most:
                # Whoever is using it still holds it.
                del self._clients[next(iter(self._clients))]
            return client

    def forget(self, client: S3Client) -> None:
        """Make a new one next time: its credentials were refused and may have been rotated where they came from."""
        for key in [key for key, known in list(self._clients.items()) if known is client]:
            self._clients.pop(key, None)

    def close(self) -> None:
        """Drop all connections."""
        for client in list(self._clients.values()):
            client.raw.close()
        self._clients.clear()


class S3Client:
    """A boto3 client, and the words for its failures."""

    def __init__(self, credentials: Mapping[str, str], where: str) -> None:
        import boto3

        from sidecar.edges.origins.s3_errors import RAISED, S3Failures

        try:
            session = boto3.session.Session(
                aws_access_key_id=credentials.get("AWS_ACCESS_KEY_ID"),
                aws_secret_access_key=credentials.get("AWS_SECRET_ACCESS_KEY"),
                aws_session_token=credentials.get("AWS_SESSION_TOKEN"),
                region_name=_setting(credentials, "AWS_REGION", "AWS_DEFAULT_REGION"),
            )
            found = session.get_credentials()
            self.raw: Any = _client(session, credentials, signed=found is not None)
            self.failures = S3Failures.for_credentials(found, self.raw.meta.endpoint_url)
        except RAISED as error:
            secrets = tuple(value for name, value in credentials.items() if "URL" not in name and "REGION" not in name)
            raise S3Failures(identity="an unknown identity", secrets=secrets).of(error, where) from None


def _client(session: Any, credentials: Mapping[str, str], *, signed: bool) -> Any:
    """A client of few retries and short waits (the download has its own), addressing buckets as the endpoint needs."""
    from botocore import UNSIGNED
    from botocore.config import Config

    endpoint = _setting(credentials, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"total_max_attempts": 2, "mode": "standard"},
        tcp_keepalive=True,
        max_pool_connections=16,
        # Other makers' servers don't know AWS's newer checksums; every file is hashed here anyway.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra=f"lora-sidecar/{__version__}",
        signature_version=None if signed else UNSIGNED,
    )
    # Bucket names as host names need a wildcard DNS entry, which other makers' servers seldom have.
    by_path = config.merge(Config(s3={"addressing_style": "path"}))
    if endpoint:
        return session.client("s3", endpoint_url=endpoint, config=config if _is_aws(endpoint) else by_path)
    client = session.client("s3", config=config)
    if _is_aws(client.meta.endpoint_url):
        return client
    return session.client("s3", config=by_path)  # the endpoint comes from an AWS configuration file


def _setting(credentials: Mapping[str, str], *names: str) -> str | None:
    for source in (credentials, os.environ):
        for name in names:
            if source.get(name):
                return source[name]
    return None


class S3Origin:
    """See Origin. `s3://b/loras/1` is the archive of that key, or what is under `loras/1/`, never `loras/10/…`."""

    def __init__(self, source: S3Source, clients: S3Clients, credentials: Mapping[str, str]) -> None:
        self._bucket = source.bucket
        self._key = source.key
        self._where = str(source)
        self._clients = clients
        self._credentials = credentials

    async def listing(self) -> Listing:
        """See Origin."""
        return await in_thread(self._list)

    async def read(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        """See Origin."""
        open_bodies: list[Any] = []
        try:
            await in_thread(lambda: self._read(file, start, stop, sink, open_bodies))
        except asyncio.CancelledError:
            # The thread may be waiting for bytes that nobody wants any more.
            for body in open_bodies:
                _interrupt(body)
            raise

    def _list(self) -> Listing:
        with self._failures() as client:
            if self._key and is_archive(self._key):
                archive = self._head(client)
                if archive is not None:
                    return listing_of([archive], self._where, archive=True)
            files = list(self._objects(client))
            if not files:
                raise self._nothing(client)
        return listing_of(files, self._where)

    def _head(self, client: S3Client) -> RemoteFile | None:
        """The object of exactly this key, None if there is none."""
        from botocore.exceptions import ClientError

        try:
            head = client.raw.head_object(Bucket=self._bucket, Key=self._key)
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
                return None
            raise
        return RemoteFile(path=self._key.rpartition("/")[2], size=head["ContentLength"], etag=head.get("ETag", ""))

    def _objects(self, client: S3Client) -> Iterator[RemoteFile]:
        prefix = f"{self._key}/" if self._key else ""
        pages = client.raw.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
        count = 0
        for number, page in enumerate(pages, start=1):
            for found in page.get("Contents", ()):
                if found["Key"].endswith("/") and found["Size"] == 0:
                    continue  # a "directory" as consoles and gateways make them
                count += 1
                if count > MAX_FILES:
                    raise AdapterRejected(too_many(self._where, f"more than {MAX_FILES}"))
                yield RemoteFile(path=found["Key"][len(prefix) :], size=found["Size"], etag=found.get("ETag", ""))
            if number >= MAX_PAGES and page.get("IsTruncated"):
                raise AdapterRejected(f"{self._where} holds more than {MAX_PAGES * 1000} empty directories")

    def _nothing(self, client: S3Client) -> OriginDenied:
        """Why a prefix without objects is not an adapter."""
        if not self._key:
            return OriginDenied(f"bucket {self._bucket!r} is empty (looked for any object)")
        looked = f"no object under the prefix {self._key + '/'!r} in bucket {self._bucket!r}"
        if self._head(client) is not None:
            return OriginDenied(
                f"{looked}: {self._key!r} is one object, but no .tar.gz, .tgz, .tar or .zip archive"
                " (name the prefix above the adapter's files, or an archive)"
            )
        also = f", and no object {self._key!r}" if is_archive(self._key) else ""
        return OriginDenied(f"{looked}{also} ({client.failures.endpoint})")

    def _read(self, file: RemoteFile, start: int, stop: int, sink: Sink, open_bodies: list[Any]) -> None:
        whole = start == 0 and stop == file.size
        wanted = {} if whole else {"Range": f"bytes={start}-{stop - 1}"}
        if file.etag:
            wanted["IfMatch"] = file.etag
        with self._failures(reading=file) as client:
            response = client.raw.get_object(Bucket=self._bucket, Key=self._object_key(file), **wanted)
            body = response["Body"]
            open_bodies.append(body)
            try:
                self._same(file, response, stop - start, whole)
                left = stop - start
                while left > 0:
                    block = body.read(min(BLOCK, left))
                    if not block:
                        raise OriginError(f"{self._where}: {file.path}: the answer ended {left} bytes early")
                    sink(block)
                    left -= len(block)
            finally:
                body.close()

    def _same(self, file: RemoteFile, response: Mapping[str, Any], length: int, whole: bool) -> None:
        total = response.get("ContentLength") if whole else response.get("ContentRange", "").rpartition("/")[2]
        if str(total) != str(file.size) or response.get("ContentLength") != length:
            raise OriginChanged(f"{self._where}: {file.path} has {total} bytes now, {file.size} when it was listed")

    def _object_key(self, file: RemoteFile) -> str:
        name = self._key.rpartition("/")[2]
        if is_archive(self._key) and file.path == name:
            return self._key
        return f"{self._key}/{file.path}" if self._key else file.path

    @contextlib.contextmanager
    def _failures(self, reading: RemoteFile | None = None) -> Iterator[S3Client]:
        """The client, with everything that it raises turned into the ports' errors."""
        from sidecar.edges.origins.s3_errors import RAISED

        client = self._clients.get(self._credentials, self._where)
        where = self._where if reading is None else f"{self._where}: {reading.path}"
        try:
            yield client
        except RAISED as error:
            failure = client.failures.of(error, where, reading=reading is not None)
            if isinstance(failure, OriginDenied):
                self._clients.forget(client)
            raise failure from None


def _is_aws(endpoint: str) -> bool:
    host = endpoint.partition("://")[2].partition("/")[0].partition(":")[0]
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _interrupt(body: Any) -> None:
    """Wake a thread that waits on this response's socket."""
    shutdown = getattr(getattr(body, "_raw_stream", None), "shutdown", None)
    if shutdown is not None:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            shutdown()
