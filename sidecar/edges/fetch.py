"""The fetcher: from an adapter and a listing to a published revision, one download per content at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog
from msgspec.structs import replace

from sidecar.core.preflight import Limits, Refused, check_files
from sidecar.core.sources import shown
from sidecar.edges.archive import unpack
from sidecar.edges.content import OtherContent, Unverified, compare, compare_known, content_key
from sidecar.edges.credentials import Credentials, SecretOrigin
from sidecar.edges.download import Download, ReadRange
from sidecar.edges.flights import Flight, Present
from sidecar.edges.inspection import inspect_adapter
from sidecar.edges.jobs import Job, Waiter
from sidecar.edges.origins import Origin, Origins, Sink, listing_of
from sidecar.edges.partial import FILES, PartialContent
from sidecar.edges.slots import Slots
from sidecar.edges.threads import in_thread, uninterrupted
from sidecar.model import Adapter, Listing, RemoteFile, StoredFile, revision_of
from sidecar.ports import (
    AdapterRejected,
    Fetched,
    OriginChanged,
    OriginError,
    Progress,
    SourceKind,
)
from sidecar.settings import Settings

log = structlog.get_logger()

LISTING_SECONDS = 60.0
LISTINGS_AT_ONCE = 16


class PeerBytes(Protocol):
    """Other workers as a source of bytes, asked before the origin, and as readers of what comes."""

    def share(self, adapter: Adapter, listing: Listing, root: Path, present: Present) -> AbstractContextManager[Flight]:
        """Let other workers read a download below `root`, while the context lasts and, if it ends well, a little on."""

    def refuted(self, adapter: Adapter, listing: Listing) -> None:
        """What has been read has the wrong hash as a whole: who gave all of it is not asked for it again."""

    async def published(self, adapter: Adapter, listing: Listing) -> Listing | None:
        """The files of the revision that this listing becomes, if other workers hold it, as a listing of its own; each
        file's ETag is its hash. None if nobody holds it, or what it will be isn't known."""

    async def read(
        self,
        adapter: Adapter,
        listing: Listing,
        file: RemoteFile,
        start: int,
        stop: int,
        sink: Sink,
        origin: ReadRange | None,
    ) -> int:
        """Give `sink` as much of [start, stop) as peers deliver in good time, from the start and in order.

        When they keep it waiting, a piece is read from `origin` beside them. Returns the position reached; the origin
        gives the rest. Raises nothing but what `sink` raises.
        """


class ContentStore(Protocol):
    """What the fetcher needs of the adapters directory. All block, but `revisions`; all may raise DiskFull."""

    def revisions(self) -> Mapping[str, str]:
        """Revision -> directory, of all that are published."""

    def staging(self, key: str) -> Path:
        """The directory of this download, kept over a restart."""

    def discard(self, key: str) -> None:
        """Drop a download."""

    def release(self, key: str) -> None:
        """Keep what a download has brought, until its room is needed, but not what was promised to it."""

    def reuse(self, sha256: str, target: Path) -> bool:
        """Link content that is already here to `target`."""

    def need(self, size: int, key: str = "") -> None:
        """Hold room for a download."""

    def publish(self, staged: Path, files: Sequence[StoredFile]) -> tuple[str, Path]:
        """Make a revision, and drop the download."""


class OriginFetcher:
    """See ports.Fetcher."""

    def __init__(
        self,
        settings: Settings,
        store: ContentStore,
        *,
        limits: Callable[[], Limits] | None = None,
        credentials: Credentials | None = None,
        peers: PeerBytes | None = None,
        received: Callable[[SourceKind, int], None] = lambda kind, size: None,
    ) -> None:
        """`received` is told of bytes from the origin and from local files; it is called on any thread."""
        self._settings = settings
        self._store = store
        self._origins = Origins(settings)
        self._limits = limits or self._limits_of_settings
        self._credentials = credentials
        self._peers = peers
        self._received = received
        self._slots = Slots(settings.fetch_concurrency)
        self._listings = Slots(LISTINGS_AT_ONCE)
        self._jobs: dict[str, Job] = {}

    async def close(self) -> None:
        """Stop all downloads, keeping what is whole."""
        jobs = [job.task for job in self._jobs.values()]
        for task in jobs:
            task.cancel()
        if jobs:
            await asyncio.wait(jobs, timeout=1)
        await self._origins.close()

    async def listing(self, adapter: Adapter) -> Listing:
        """See ports.Fetcher."""
        origin = self._open(adapter)
        try:
            async with asyncio.timeout(LISTING_SECONDS):
                listing = await self._listings.run(origin.listing, lambda: 0)
        except TimeoutError:
            raise OriginError(f"{shown(adapter.source.uri)}: no list of files within {LISTING_SECONDS:.0f} s") from None
        return self._bounded(adapter, listing)

    async def fetch(self, adapter: Adapter, listing: Listing, revision: str | None, progress: Progress) -> Fetched:
        """See ports.Fetcher."""
        digest = adapter.source.digest
        if digest and revision:
            compare(adapter, None, revision)
        wanted = digest or revision
        present = self._store.revisions().get(wanted) if wanted else None
        if wanted and present is not None:
            warnings = await in_thread(partial(self._inspect, adapter, Path(present)))
            return Fetched(revision=wanted, path=present, listing=listing, warnings=warnings)
        listing = self._bounded(adapter, listing)
        self._check_names(adapter, listing)
        waiter = Waiter(wanted, progress)
        job = self._join(adapter, listing, waiter)
        try:
            fetched = await asyncio.shield(job.task)
        except OtherContent as error:
            compare(adapter, revision, error.found)
            raise
        finally:
            job.waiters.discard(waiter)
            if not job.waiters:
                job.task.cancel()
        compare(adapter, revision, fetched.revision)
        return fetched

    def _join(self, adapter: Adapter, listing: Listing, waiter: Waiter) -> Job:
        """The job for this content, a new one if there is none that anybody still waits for."""
        key = content_key(adapter, listing)
        job = self._jobs.get(key)
        if job is not None and job.waiters:
            job.waiters.add(waiter)
            return job
        fresh = self._jobs[key] = Job(waiter)
        fresh.task = asyncio.create_task(self._run(key, fresh, adapter, listing, job.task if job else None))

        def done(task: asyncio.Task[Fetched]) -> None:
            if self._jobs.get(key) is fresh:
                del self._jobs[key]
            if not task.cancelled():
                task.exception()  # seen, even if all who waited have gone

        fresh.task.add_done_callback(done)
        return fresh

    async def _run(
        self, key: str, job: Job, adapter: Adapter, listing: Listing, previous: asyncio.Task[Fetched] | None
    ) -> Fetched:
        if previous is not None:
            await asyncio.wait({previous})  # it was cancelled, and lets go of the same directory
        origin = self._open(adapter)
        if self._peers is not None:
            unpacked = await self._unpacked(self._peers, job, adapter, listing) if listing.archive else None
            if unpacked is not None:
                return unpacked
            try:
                return await self._bring(
                    key, job, adapter, listing, self._from_peers(self._from_origin(origin), adapter, listing)
                )
            except Unverified as error:
                self._refused(self._peers, adapter, listing, error)
        try:
            return await self._bring(key, job, adapter, listing, self._from_origin(origin))
        except Unverified as error:
            raise error.reason from None

    async def _unpacked(self, peers: PeerBytes, job: Job, adapter: Adapter, listing: Listing) -> Fetched | None:
        """What others have made of an archive, from them; None if they don't give it."""
        found = await peers.published(adapter, listing)
        if found is None:
            return None
        key = content_key(adapter, found)
        try:
            found = self._bounded(adapter, found)
            self._check_names(adapter, found)
            fetched = await self._bring(key, job, adapter, found, self._from_peers(None, adapter, found))
        except Unverified as error:
            self._refused(peers, adapter, found, error)
        except (OriginError, AdapterRejected) as error:
            log.info("not_from_peers", adapter=adapter.key, reason=str(error))
            await in_thread(partial(self._store.discard, key))
        else:
            return replace(fetched, listing=listing)
        return None

    @staticmethod
    def _refused(peers: PeerBytes, adapter: Adapter, listing: Listing, error: Unverified) -> None:
        if isinstance(error.reason, OriginError):  # what isn't fit to be served may well be what the origin has
            peers.refuted(adapter, listing)
        log.warning("peers_bytes_refused", adapter=adapter.key, reason=str(error.reason))

    async def _bring(self, key: str, job: Job, adapter: Adapter, listing: Listing, read: ReadRange) -> Fetched:
        """Download, verify, publish. Raises Unverified, having dropped the download, if the content is wrong.

        What a failure or a cancellation leaves on the disk is gone on with later, but takes no room from others.
        """
        try:
            return await self._bring_in_room(key, job, adapter, listing, read)
        except BaseException:
            await uninterrupted(in_thread(partial(self._store.release, key)))
            raise

    async def _bring_in_room(self, key: str, job: Job, adapter: Adapter, listing: Listing, read: ReadRange) -> Fetched:
        started = asyncio.get_running_loop().time()
        # An archive lies beside what it unpacks to until that is published.
        needed = listing.size * (2 if listing.archive else 1)
        await uninterrupted(in_thread(partial(self._store.need, needed, key)))
        content = await uninterrupted(in_thread(partial(self._content, key, listing)), undo=PartialContent.close)
        try:
            with self._shared(adapter, listing, content, read) as shared:
                download = Download(content, shared, self._slots, where=shown(adapter.source.uri))
                already = download.bytes_done
                reports = asyncio.create_task(job.report(download, listing.size))
                try:
                    files = await download.run()
                finally:
                    reports.cancel()
        finally:
            await in_thread(content.close)
        finishing = in_thread(partial(self._finish, key, job, adapter, listing, files))
        fetched = await uninterrupted(finishing, stop=job.stop.set)
        job.tell(listing.size, listing.size)
        took = asyncio.get_running_loop().time() - started
        log.info(
            "adapter_fetched",
            adapter=adapter.key,
            revision=fetched.revision,
            bytes=listing.size - already,
            resumed=already,
            seconds=round(took, 3),
        )
        return fetched

    def _content(self, key: str, listing: Listing) -> PartialContent:
        return PartialContent(self._store.staging(key), listing, self._reuse)

    def _reuse(self, sha256: str, target: Path) -> bool:
        """See ContentStore. Runs on a thread."""
        if not self._store.reuse(sha256, target):
            return False
        self._received("local", target.lstat().st_size)
        return True

    def _finish(self, key: str, job: Job, adapter: Adapter, listing: Listing, files: tuple[StoredFile, ...]) -> Fetched:
        """Blocking. Nothing is published before all of it has been verified and checked."""
        staging = self._store.staging(key)
        root = staging / FILES
        try:
            compare_known(adapter, listing, files)
            if listing.archive:
                archive, root = root / listing.files[0].path, staging / "unpacked"
                files = unpack(archive, root, self._limits(), name=shown(adapter.source.uri), stop=job.stop)
            revision = revision_of(files)
            job.accept(adapter, revision)
            warnings = self._inspect(adapter, root)
        except (OriginError, AdapterRejected) as error:
            self._store.discard(key)
            raise Unverified(error) from None
        _, path = self._store.publish(root, files)
        return Fetched(revision=revision, path=str(path), listing=listing, warnings=warnings)

    def _inspect(self, adapter: Adapter, directory: Path) -> tuple[str, ...]:
        """The warnings. Raises AdapterRejected."""
        try:
            return inspect_adapter(directory, self._limits())
        except AdapterRejected as error:
            raise AdapterRejected(f"{shown(adapter.source.uri)}: {error}") from None

    def _bounded(self, adapter: Adapter, listing: Listing) -> Listing:
        """The listing, which may come from another worker. Raises AdapterRejected."""
        where = shown(adapter.source.uri)
        listing = listing_of(listing.files, where, archive=listing.archive)
        limit = self._settings.max_adapter_bytes
        if listing.size > limit:
            raise AdapterRejected(f"{where} holds {listing.size} bytes, the limit for one adapter is {limit}")
        return listing

    def _check_names(self, adapter: Adapter, listing: Listing) -> None:
        """Raises AdapterRejected for what the names and sizes alone tell, before a byte is read."""
        where = shown(adapter.source.uri)
        if listing.archive and len(listing.files) != 1:
            raise AdapterRejected(f"{where}: an archive is one file, not {len(listing.files)}")
        if not listing.archive:
            try:
                check_files({file.path: file.size for file in listing.files}, self._limits())
            except Refused as error:
                raise AdapterRejected(f"{where}: {error}") from None

    def _limits_of_settings(self) -> Limits:
        return Limits(
            max_lora_rank=self._settings.max_lora_rank,
            allow_pickle=self._settings.allow_pickle,
            max_bytes=self._settings.max_adapter_bytes,
        )

    def _open(self, adapter: Adapter) -> Origin:
        uri = adapter.source.uri
        if not adapter.source.secret:
            return self._origins.open(uri)
        if self._credentials is None:
            raise AdapterRejected(
                f"{shown(uri)}: spec.source.secretRef names the Secret {adapter.source.secret!r}, and Secrets are read"
                " only in Kubernetes; remove it, and give the agent credentials by its own environment"
            )
        return SecretOrigin(adapter, self._credentials, lambda found: self._origins.open(uri, found))

    @contextmanager
    def _shared(
        self, adapter: Adapter, listing: Listing, content: PartialContent, read: ReadRange
    ) -> Iterator[ReadRange]:
        """`read`, whose bytes other workers can read in turn."""
        if self._peers is None:
            yield read
            return
        spans = {file.remote.path: [file.span(part) for part in file.done] for file in content.files}
        with self._peers.share(adapter, listing, content.root, lambda file: spans[file.path]) as flight:

            async def teed(file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
                await read(file, start, stop, flight.tee(file, start, sink))

            yield teed

    def _from_origin(self, origin: Origin) -> ReadRange:
        async def read(file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
            def counted(block: bytes) -> None:
                sink(block)
                self._received("origin", len(block))

            await origin.read(file, start, stop, counted)

        return read

    def _from_peers(self, origin: ReadRange | None, adapter: Adapter, listing: Listing) -> ReadRange:
        """From peers first, and without an origin from nobody else."""
        peers = self._peers
        assert peers is not None

        async def read(file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
            reached = await peers.read(adapter, listing, file, start, stop, sink, origin)
            if reached < stop and origin is None:
                raise OriginChanged(f"{file.path}: no peer gives it any more")
            if reached < stop and origin is not None:
                await origin(file, reached, stop, sink)

        return read
