"""Who a standalone worker is, from start to start."""

from __future__ import annotations

from typing import cast

from sidecar.loops.identity import take_identity
from sidecar.ports import DiskFull, Store


class Kept:
    """What a store keeps of small files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.full = False

    def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    def save(self, name: str, data: bytes) -> None:
        if self.full:
            raise DiskFull("no room")
        self.files[name] = data


def test_the_uid_stays_and_the_generation_grows_whatever_the_clock() -> None:
    store = Kept()
    first, second = (take_identity(cast(Store, store), now) for now in (1000.0, 900.0))
    assert (first.generation, second.generation) == (1000, 1001)
    assert first.uid == second.uid
    store.files["identity.json"] = b"{half"
    assert take_identity(cast(Store, store), 2000.0).uid != first.uid


def test_a_full_disk_keeps_no_agent_from_starting() -> None:
    store = Kept()
    first = take_identity(cast(Store, store), 1000.0)
    store.full = True
    again = take_identity(cast(Store, store), 1005.0)
    assert (again.uid, again.generation) == (first.uid, 1005)
