"""New content on a whole pool: one worker after the other, while a client asks all the time."""

from __future__ import annotations

import json

from tests.kubernetes.controlplane import wait_until
from tests.kubernetes.pool import ADAPTER_LABEL, Pool


def revisions(pool: Pool, adapter: str) -> list[str]:
    """What each worker says it serves."""
    texts = [pod["metadata"].get("annotations", {}).get(f"{ADAPTER_LABEL}/{adapter}") for pod in pool.pods()]
    return [json.loads(text)["revision"] if text else "" for text in texts]


def test_a_new_source_is_taken_over_while_it_serves(pool: Pool) -> None:
    pool.install(2)
    pool.apply("a")
    pool.until_loaded("a", 2)
    wait_until(lambda: pool.ready("a"), "its status is written")
    old = pool.adapter("a")["status"]["revision"]
    with pool.watched("a"):
        pool.apply("a", source={"uri": pool.origin.uri("a-new")})
        wait_until(lambda: pool.adapter("a")["status"].get("revision", old) != old, "the pool decides on the new", 30)
        new = pool.adapter("a")["status"]["revision"]
        wait_until(lambda: revisions(pool, "a") == [new, new], "both serve the new", 60)
        pool.until_loaded("a", 2)
    wait_until(lambda: pool.ready("a"), "its status says so")
