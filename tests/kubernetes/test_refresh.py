"""New content behind the same URI on a whole pool: found once, taken over one worker after the other."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sidecar.edges.sample_adapter import write_adapter
from tests.adapters import tar_gz
from tests.kubernetes.controlplane import API_HOST, ControlPlane, wait_until
from tests.kubernetes.pool import BASE_MODEL, Pool
from tests.kubernetes.test_pool_update import revisions

pytestmark = pytest.mark.slow

Json = dict[str, Any]
REFRESH_SECONDS = 2.0


class Archive(ThreadingHTTPServer):
    """A web server with one archive, replaced in one step; `reads` counts whole downloads by ETag."""

    def __init__(self, directory: Path) -> None:
        super().__init__((API_HOST, 0), _Handler)
        self._directory = directory
        self.reads: list[str] = []
        self.content, self.etag = b"", ""
        threading.Thread(target=self.serve_forever, args=(0.1,)).start()

    def put(self, seed: int) -> None:
        """Other content for another seed."""
        made = write_adapter(self._directory / str(seed), seed, base=BASE_MODEL)
        content = tar_gz({path.name: path.read_bytes() for path in made.iterdir()})
        self.content, self.etag = content, f'"{hashlib.sha256(content).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    server: Archive

    def do_GET(self) -> None:
        content, etag = self.server.content, self.server.etag
        wanted = self.headers.get("Range", "")
        begin, _, end = wanted.removeprefix("bytes=").partition("-")
        piece = content[int(begin) : int(end) + 1] if wanted else content
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{end}/{len(content)}")
        self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)
        if len(piece) == len(content):
            self.server.reads.append(etag)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def archive(cluster: ControlPlane, tmp_path: Path) -> Iterator[Archive]:
    """Where every pod reaches it."""
    made = Archive(tmp_path)
    yield made
    made.shutdown()
    made.server_close()


def calls(pod: Json) -> list[Json]:
    """Loads and unloads that the pod's engine has answered."""
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8000/stub/calls", timeout=10) as response:
        found: list[Json] = json.load(response)
    return found


def decisions(pool: Pool) -> list[tuple[int, str]]:
    """Refresh number and revision that each agent takes for the pool's."""
    rows = [pool.ask(pod, "/v1/adapters")["adapters"][0] for pod in pool.pods()]
    return [(row["refresh"], row["wantedRevision"]) for row in rows]


def test_new_content_is_taken_over_by_one_worker_after_the_other(pool: Pool, archive: Archive) -> None:
    archive.put(1)
    pool.agent_env["LORA_SIDECAR_ALLOW_HTTP"] = "true"
    pool.install(3)
    uri = f"http://{API_HOST}:{archive.server_port}/a.tar.gz"
    pool.apply("a", source={"uri": uri, "refreshInterval": f"{REFRESH_SECONDS:g}s"})
    pool.until_loaded("a", 3)
    wait_until(lambda: pool.ready("a"), "its status is written")
    old = pool.adapter("a")["status"]["revision"]
    wait_until(lambda: decisions(pool) == [(0, old)] * 3, "all take the first's decision")
    with pool.watched("a"):
        archive.put(2)
        wait_until(lambda: {old, ""}.isdisjoint(revisions(pool, "a")), "all have the new content", 60)
        pool.until_loaded("a", 3)
        (new,) = set(revisions(pool, "a"))
        wait_until(lambda: pool.adapter("a")["status"]["revision"] == new and pool.ready("a"), "its status says so")
        # The same content is no news, however often it is looked at.
        time.sleep(2 * REFRESH_SECONDS)
    assert decisions(pool) == [(1, new)] * 3
    # Nobody read the new content twice.
    assert archive.reads.count(archive.etag) <= 3
    changes = []
    for pod in pool.pods():
        first, unloaded, again = calls(pod)
        assert [call["kind"] for call in (first, unloaded, again)] == ["load", "unload", "load"]
        changes.append((unloaded["at"], again["at"]))
    changes.sort()
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(changes)), changes
