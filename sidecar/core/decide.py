"""Which revision of an adapter the pool wants, when its spec pins none.

The first live target in rank reads the origin and publishes what it found; everyone takes the decision with the highest
refresh number for that source, the smaller revision on a tie. Only the first in rank raises the number.
"""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.model import Adapter, Decision, Listing, RemoteFile


def better(left: Decision | None, right: Decision | None) -> Decision | None:
    """The one of two decisions about one source that the pool follows."""
    if left is None or right is None:
        return left or right
    if left.refresh != right.refresh:
        return left if left.refresh > right.refresh else right
    if left.revision != right.revision:
        return left if left.revision < right.revision else right
    return left if left.listing else right


def decided(adapter: Adapter, known: Iterable[Decision | None]) -> Decision | None:
    """The pool's decision for `adapter` among those that are known; decisions about another source don't count.

    A pinned digest is the decision, whatever others say; a listing that others read for it is kept. The status's
    revision serves only when no worker knows one.
    """
    source_id = adapter.source_id
    pinned = adapter.source.digest
    best: Decision | None = None
    for decision in known:
        if decision is None or decision.source_id != source_id:
            continue
        if pinned is None or decision.revision == pinned:
            best = better(best, decision)
    if best is None and (pinned or adapter.status_revision):
        return Decision(source_id=source_id, refresh=0, revision=pinned or adapter.status_revision or "")
    return best


def same_content(listing: Listing, decision: Decision) -> bool:
    """Whether a fresh listing is the one that was decided on: path, size and ETag of every file.

    Without any ETag a listing can't tell new content from old: then it counts as different.
    """
    return same_files(listing.files, decision.listing)


def same_files(now: tuple[RemoteFile, ...], before: tuple[RemoteFile, ...]) -> bool:
    """Whether two lists name the same content; without any ETag that can't be told."""
    if not before or any(not f.etag for f in now):
        return False
    return {(f.path, f.size, f.etag) for f in now} == {(f.path, f.size, f.etag) for f in before}
