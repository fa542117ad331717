"""One download for everybody who wants a content, as long as anybody does."""

from __future__ import annotations

import asyncio
import threading

from sidecar.edges.content import OtherContent
from sidecar.edges.download import Download
from sidecar.model import Adapter
from sidecar.ports import Fetched, Progress

PROGRESS_SECONDS = 0.25


class Waiter:
    """One caller of fetch: which revision it takes (None: any), and whom to tell how far things are."""

    def __init__(self, wanted: str | None, progress: Progress) -> None:
        self.wanted = wanted
        self.progress = progress


class Job:
    """One download, for everybody who wants this content."""

    task: asyncio.Task[Fetched]

    def __init__(self, waiter: Waiter) -> None:
        self.waiters = {waiter}
        self.stop = threading.Event()

    def tell(self, done: int, total: int) -> None:
        """All waiters."""
        for waiter in self.waiters:
            waiter.progress(done, total)

    async def report(self, download: Download, total: int) -> None:
        """Tell again and again, until cancelled."""
        while True:
            self.tell(download.bytes_done, total)
            await asyncio.sleep(PROGRESS_SECONDS)

    def accept(self, adapter: Adapter, revision: str) -> None:
        """Raises OtherContent if nobody who waits takes this revision."""
        waiters = tuple(self.waiters)
        if waiters and all(waiter.wanted not in (None, revision) for waiter in waiters):
            raise OtherContent(adapter, revision)
