"""A copy of one worker's record that can say what is newer than a version, and take such a delta.

A record is a list of items (its head, its suspicions, one for each adapter), each stamped with the version that
changed it; no two have the same stamp. So whoever has version v lacks exactly the items stamped higher, and any prefix
of them in the order of stamps is again a version. The law: (generation, version) of a copy never falls.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from sidecar.core.messages import (
    MAX_REMOVED,
    Delta,
    EntryItem,
    HeadItem,
    Item,
    PackedDelta,
    RemovedItem,
    SuspicionsItem,
    encode,
)
from sidecar.model import MAX_ENTRIES, Head, Record, State

# A larger item (a decision with a long file list) is told by its version alone, and fetched over HTTP.
MAX_ITEM = 600

_HEAD_KEY = "\0head"
_SUSPICIONS_KEY = "\0suspicions"


class Applied(Enum):
    """What became of a delta."""

    CHANGED = "changed"
    OLD = "old"  # nothing in it is news
    GAP = "gap"  # it begins above what is here
    BROKEN = "broken"  # it contradicts the rules above


class Replica:
    """A copy of the record of `uid` as its process `generation` wrote it; version 0 is nothing yet."""

    __slots__ = ("_record", "_removed", "floor", "generation", "items", "uid", "version")

    def __init__(self, uid: str, generation: int) -> None:
        self.uid = uid
        self.generation = generation
        self.version = 0
        # Below this version it isn't known any more what was removed: whoever is there needs the whole.
        self.floor = 0
        self.items: dict[str, Item] = {}  # in the order of stamps
        self._removed = 0
        self._record: Record | None = None

    @property
    def head(self) -> Head | None:
        """The record's head, None while there is nothing yet."""
        item = self.items.get(_HEAD_KEY)
        return item.head if isinstance(item, HeadItem) else None

    def record(self) -> Record | None:
        """The record, the same object as long as nothing changed."""
        head = self.head
        if self._record is None and head is not None:
            found = self.items.get(_SUSPICIONS_KEY)
            self._record = Record(
                head=head,
                version=self.version,
                entries=tuple(item.entry for item in self.items.values() if isinstance(item, EntryItem)),
                suspicions=found.suspicions if isinstance(found, SuspicionsItem) else (),
            )
        return self._record

    def write(self, record: Record) -> bool:
        """Make the own copy say what `record` says; True if that is anything new. Only the record's owner may."""
        head = msgspec.structs.replace(record.head, generation=self.generation)
        removed = set(self.items).difference(entry.adapter for entry in record.entries)
        before = self.version
        if self.head != head:
            self._stamp(HeadItem(self.version + 1, head))
        found = self.items.get(_SUSPICIONS_KEY)
        if record.suspicions != (found.suspicions if isinstance(found, SuspicionsItem) else ()):
            self._stamp(SuspicionsItem(self.version + 1, record.suspicions))
        for key in sorted(removed):
            if isinstance(self.items[key], EntryItem):
                self._stamp(RemovedItem(self.version + 1, key))
        # What is lost goes first: a copy cut short then promises too little rather than too much.
        for entry in sorted(record.entries, key=lambda entry: entry.state == State.LOADED):
            item = self.items.get(entry.adapter)
            if not isinstance(item, EntryItem) or item.entry != entry:
                self._stamp(EntryItem(self.version + 1, entry))
        self._prune()
        return self.version != before

    def reborn(self, generation: int) -> None:
        """Go on as a later process. Only the record's owner may."""
        self.generation = generation
        head = self.head
        if head is not None:
            self._stamp(HeadItem(self.version + 1, msgspec.structs.replace(head, generation=generation)))

    def since(self, base: int) -> tuple[int, list[Item]]:
        """The base that a delta can start from (`base`, or 0 if that is too long ago), and its items."""
        if base < self.floor or base > self.version:
            base = 0
        if base == 0:
            return 0, [item for item in self.items.values() if not isinstance(item, RemovedItem)]
        found: list[Item] = []
        for item in reversed(self.items.values()):
            if item.stamp <= base:
                break
            found.append(item)
        found.reverse()
        return base, found

    def delta(self, base: int) -> Delta:
        """Everything newer than `base`."""
        base, items = self.since(base)
        return Delta(self.uid, self.generation, base, self.version, self.version, tuple(items))

    def pack(self, base: int, room: int) -> tuple[int, msgspec.Raw] | None:
        """A delta from `base` cut to `room` bytes, encoded, and the version to which it leads.

        It leads nowhere (that version is `base`) and only tells the newest version when the next item is too large
        for any datagram, or when a first copy doesn't fit whole. None when there is no room for the next item, or for
        any delta at all, now.
        """
        start, items = self.since(base)
        empty = encode(PackedDelta(self.uid, self.generation, start, self.version, self.version))
        room -= len(empty) + 2  # a longer list needs two more bytes for its length
        if room < 0:
            return None
        packed: list[msgspec.Raw] = []
        reached = start
        for item in items:
            data = encode(item)
            room -= len(data)
            if len(data) > MAX_ITEM or room < 0:
                return self._cut(base, start, reached, packed, fits=len(data) <= MAX_ITEM)
            packed.append(msgspec.Raw(data))
            reached = item.stamp
        return self.version, self._packed(start, self.version, packed)

    def apply(self, delta: Delta) -> Applied:
        """Take what is newer. A first copy, and a later process's, are only taken whole."""
        if delta.generation < self.generation:
            return Applied.OLD
        new = delta.generation > self.generation or self.version == 0
        if new:
            return self._replace(delta) if delta.base == 0 and delta.version else Applied.GAP
        if delta.version <= self.version:
            return Applied.OLD
        if delta.base == 0:
            return self._replace(delta)
        if delta.base > self.version:
            return Applied.GAP
        fresh = [item for item in delta.items if item.stamp > self.version]
        if not self._sound(delta) or len(self.items) + len(fresh) > MAX_ENTRIES + MAX_REMOVED + 2:
            return Applied.BROKEN
        for item in fresh:
            self._put(item)
        self.version = delta.version
        self._prune()
        return Applied.CHANGED

    def _cut(
        self, base: int, start: int, reached: int, packed: list[msgspec.Raw], fits: bool
    ) -> tuple[int, msgspec.Raw] | None:
        """The prefix `packed`; else the newest version alone, or None if the next item `fits` another datagram."""
        if packed and start:
            return reached, self._packed(start, reached, packed)
        if fits and not packed:
            return None
        return base, self._packed(0, 0, ())

    def _packed(self, base: int, version: int, items: list[msgspec.Raw] | tuple[()]) -> msgspec.Raw:
        delta = PackedDelta(self.uid, self.generation, base, version, self.version, items)
        return msgspec.Raw(encode(delta))

    def _replace(self, delta: Delta) -> Applied:
        if not self._sound(delta):
            return Applied.BROKEN
        items = {item.key: item for item in delta.items}
        found = items.get(_HEAD_KEY)
        if not isinstance(found, HeadItem) or found.head.uid != self.uid:
            return Applied.BROKEN
        self.generation = delta.generation
        self.items = items
        self.version = self.floor = delta.version
        self._removed = 0
        self._record = None
        return Applied.CHANGED

    @staticmethod
    def _sound(delta: Delta) -> bool:
        """Stamps ascend within (base, version]."""
        last = delta.base
        for item in delta.items:
            if item.stamp <= last:
                return False
            last = item.stamp
        return last <= delta.version <= delta.latest

    def _stamp(self, item: Item) -> None:
        self._put(item)
        self.version = item.stamp

    def _put(self, item: Item) -> None:
        """The newest item stands last, so that `since` needs to look at what it returns alone."""
        old = self.items.pop(item.key, None)
        self._removed += isinstance(item, RemovedItem) - isinstance(old, RemovedItem)
        self.items[item.key] = item
        self._record = None

    def _prune(self) -> None:
        """Forget the older half of what was removed when that is too much to remember."""
        if self._removed <= MAX_REMOVED:
            return
        for item in [item for item in self.items.values() if isinstance(item, RemovedItem)][: MAX_REMOVED // 2]:
            del self.items[item.key]
            self._removed -= 1
            self.floor = max(self.floor, item.stamp)
