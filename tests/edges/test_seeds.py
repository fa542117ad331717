"""Seeds: addresses and names, resolved again and again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping

import pytest

from sidecar.edges.seeds import Seeds, addresses_of, join_address, split_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("worker-1:9000", "worker-1", 9000),
        ("worker_1.pool.svc", "worker_1.pool.svc", 8790),
        ("10.0.0.1", "10.0.0.1", 8790),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:80", "::1", 80),
        ("[::1]", "::1", 8790),
        ("fd00::1", "fd00::1", 8790),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text", ["", ":80", "a:", "a:0", "a:65536", "a:b", "a b:1", "http://a:1", "a@b:1", "[zz]:1", "[a]:1"]
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="write host:port"):
        split_address(text)


class Names:
    """A resolver whose answers can be set; counts what it was asked."""

    def __init__(self, **hosts: list[str] | OSError) -> None:
        self.hosts = hosts
        self.asked = 0

    def __call__(self, host: str) -> Iterable[str]:
        self.asked += 1
        answer = self.hosts[host]
        if isinstance(answer, OSError):
            raise answer
        return answer


UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_ANSWER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


async def resolved(seeds: Seeds) -> dict[str, tuple[str, ...]]:
    """Run until every name was tried once and what was found is remembered."""
    done = asyncio.Event()
    remembered: dict[str, tuple[str, ...]] = {}
    loop = asyncio.get_running_loop()

    def remember(known: Mapping[str, tuple[str, ...]]) -> None:
        remembered.update(known)
        loop.call_soon_threadsafe(done.set)

    def changed() -> None:
        if seeds.problems:
            done.set()

    task = asyncio.create_task(seeds.run(changed, remember))
    async with asyncio.timeout(5):
        await done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return remembered


async def test_a_name_may_stand_for_many_members() -> None:
    seeds = Seeds(["pool:9000", "10.0.0.9:1"], "10.0.0.1:9000", None, Names(pool=["10.0.0.3", "10.0.0.1", "10.0.0.2"]))
    assert (seeds.members, seeds.fresh) == (("10.0.0.9:1", "pool:9000"), False)
    remembered = await resolved(seeds)
    assert seeds.members == ("10.0.0.2:9000", "10.0.0.3:9000", "10.0.0.9:1")
    assert seeds.fresh
    assert remembered == {"pool:9000": ("10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000")}


async def test_this_worker_is_left_out_whatever_it_is_called() -> None:
    names = Names(me=["10.0.0.1"], pool=["10.0.0.1", "10.0.0.2"])
    seeds = Seeds(["me:8790", "pool:8790"], "me:8790", None, names)
    await resolved(seeds)
    assert seeds.members == ("10.0.0.2:8790",)


async def test_without_an_answer_the_last_known_addresses_stay() -> None:
    seeds = Seeds(
        ["pool:1"], "10.0.0.1:1", {"pool:1": ["10.0.0.2:1"], "other:1": ["10.0.0.8:1"]}, Names(pool=NO_ANSWER)
    )
    assert seeds.members == ("10.0.0.2:1",)
    await resolved(seeds)
    assert seeds.members == ("10.0.0.2:1",)
    assert seeds.fresh
    assert "10.0.0.2:1" in seeds.problems[0].message


async def test_a_name_that_never_had_an_address_leaves_the_pool_unknown() -> None:
    seeds = Seeds(["pool:1"], "10.0.0.1:1", None, Names(pool=NO_ANSWER))
    await resolved(seeds)
    assert (seeds.members, seeds.fresh) == (("pool:1",), False)
    assert "--seeds" in seeds.problems[0].message


async def test_a_name_that_does_not_exist_is_a_member_that_is_not_there() -> None:
    seeds = Seeds(["pool:1"], "10.0.0.1:1", None, Names(pool=UNKNOWN))
    await resolved(seeds)
    assert (seeds.members, seeds.fresh) == (("pool:1",), True)
    assert "no such name" in seeds.problems[0].message


async def test_a_name_that_appears_is_found_soon() -> None:
    names = Names(pool=UNKNOWN)
    seeds = Seeds(["pool:1"], "10.0.0.1:1", None, names)
    event = asyncio.Event()
    task = asyncio.create_task(seeds.run(event.set, lambda known: None))
    async with asyncio.timeout(5):
        await event.wait()
        event.clear()
        names.hosts["pool"] = ["10.0.0.2"]
        await event.wait()
    task.cancel()
    assert seeds.members == ("10.0.0.2:1",)
    assert seeds.problems == ()


async def test_addresses_alone_need_no_resolver() -> None:
    names = Names()
    seeds = Seeds(["10.0.0.2:1", " ", "10.0.0.2:1 "], "10.0.0.1:1", None, names)
    assert (seeds.members, seeds.fresh) == (("10.0.0.2:1",), True)
    await seeds.run(lambda: None, lambda known: None)
    assert names.asked == 0


def test_the_systems_resolver_gives_each_worker_once() -> None:
    assert addresses_of("localhost") == ["127.0.0.1"]
