"""Peers asked over real sockets: other agents' servers, and servers that are none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise

import msgspec
import pytest
import structlog
from aiohttp import web

from sidecar.edges import peers_http
from sidecar.edges.peers_http import Timing
from sidecar.model import Head, Member, Record
from sidecar.ports import Peers, PeerUnreachable
from tests.edges.agent_view import StaticView, serving
from tests.edges.peer_servers import HASTY, Answer, Watch, agents, answering, at, record


def plain(one: Record) -> Answer:
    return lambda _: web.Response(body=msgspec.json.encode(one))


def test_it_is_the_port() -> None:
    peers: Peers = Watch().peers
    assert peers.view() == {}


async def test_members_records_appear_by_the_names_in_them() -> None:
    async with agents([record("a"), record("b")]) as ((first, _), (second, _)):
        watch = Watch((at(first), at(second)))
        async with watch.running() as peers:
            await watch.until(lambda: watch.alive() == {"a": True, "b": True})
            assert peers.view()["a"].record == record("a")
            assert peers.problems() == ()


async def test_nobody_but_the_members_is_asked() -> None:
    async with answering(plain(record("b"))) as (_, asked), agents([record("a")]) as ((address, _),):
        watch = Watch((at(address),))
        async with watch.running():
            await watch.until(lambda: bool(watch.alive()))
        assert asked.times == []


async def test_unchanged_answers_are_304_and_no_news() -> None:
    held = record("a")
    body, statuses = msgspec.json.encode(held), []

    def answer(request: web.Request) -> web.StreamResponse:
        same = request.headers.get("If-None-Match") == '"t"'
        statuses.append(304 if same else 200)
        return web.Response(status=304) if same else web.Response(body=body, headers={"ETag": '"t"'})

    async with answering(answer) as (address, asked):
        watch = Watch((at(address),))
        async with watch.running() as peers:
            await watch.until(lambda: bool(watch.alive()))
            told, before = watch.told, peers.view()["a"].heard
            await asked.wait(5)
            assert peers.view()["a"].heard > before
            assert watch.told == told == 1
    assert statuses[0] == 200
    assert set(statuses[1:]) == {304}


async def test_the_same_content_without_an_etag_is_no_news_either() -> None:
    async with answering(plain(record("a"))) as (address, asked):
        watch = Watch((at(address),))
        async with watch.running():
            await watch.until(lambda: bool(watch.alive()))
            await asked.wait(5)
            assert watch.told == 1


async def test_new_content_is_news() -> None:
    async with agents([record("a")]) as ((address, view),):
        watch = Watch((at(address),))
        async with watch.running() as peers:
            await watch.until(lambda: bool(watch.alive()))
            view.own = record("a", version=2)
            await watch.until(lambda: peers.view()["a"].record.version == 2)
            assert watch.told == 2


async def test_a_peer_that_stops_is_dead_after_the_window_and_alive_when_it_is_back() -> None:
    async with AsyncExitStack() as stack:
        serve = await stack.enter_async_context(AsyncExitStack())
        address = await serve.enter_async_context(serving(StaticView(own=record("a"))))
        watch = Watch((at(address),), HASTY)
        with structlog.testing.capture_logs() as logs:
            async with watch.running() as peers:
                await watch.until(lambda: watch.alive() == {"a": True})
                await serve.aclose()
                await watch.until(lambda: watch.alive() == {"a": False})
                assert peers.view()["a"].record == record("a")
                (problem,) = peers.problems()
                assert address in problem.message
                assert "1 of 1 don't answer" in problem.message
                await stack.enter_async_context(serving(StaticView(own=record("a")), address))
                await watch.until(lambda: watch.alive() == {"a": True})
                assert peers.problems() == ()
    transitions = [line["event"] for line in logs if line["event"].startswith("peer_")]
    assert transitions == ["peer_unreachable", "peer_reachable"]


async def test_a_hung_peer_is_dead_after_the_window_too() -> None:
    """It takes the connection and the question, and never answers: no event ever comes from it."""
    hung = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if hung.is_set():
            await asyncio.sleep(3600)
        return web.Response(body=msgspec.json.encode(record("a")))

    app = web.Application()
    app.router.add_get("/v1/record", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        watch = Watch((at(f"127.0.0.1:{runner.addresses[0][1]}"),), HASTY)
        async with watch.running() as peers:
            await watch.until(lambda: watch.alive() == {"a": True})
            hung.set()
            await watch.until(lambda: watch.alive() == {"a": False})
            with pytest.raises(PeerUnreachable, match=r"doesn't answer within 0\.3 s"):
                await peers.ask("a")
    finally:
        await runner.cleanup()


def too_big(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b" " * (peers_http.MAX_RECORD_BYTES + 1))


def endless(_: web.Request) -> web.StreamResponse:
    async def parts() -> AsyncIterator[bytes]:
        while True:
            yield b" " * (1 << 20)

    return web.Response(body=parts())


WRONG: list[tuple[str, Answer, str]] = [
    ("another pool", plain(record("a", pool="other")), "belongs to pool 'other', this agent to 'p'"),
    ("no uid", plain(Record(head=Head(uid="", name="a", pool="p"))), "no uid"),
    ("no json", lambda _: web.Response(text="<html>"), "gives a wrong record: JSON is malformed"),
    ("no record", lambda _: web.Response(text='{"version": 1}'), "missing required field `head`"),
    ("wrong type", lambda _: web.Response(text='{"head": {"uid": 1, "name": "a"}}'), "Expected `str`, got `int`"),
    ("bad utf-8", lambda _: web.Response(body=b'{"head": {"uid": "\xff"}}'), "gives a wrong record"),
    ("deep", lambda _: web.Response(text='{"x":' + "[" * 100_000), "gives a wrong record"),
    ("long name", plain(record("a" * 300)), "length <= 253"),
    ("not found", lambda _: web.Response(status=404), "answers HTTP 404 to GET /v1/record"),
    ("redirect", lambda _: web.Response(status=302, headers={"Location": "/elsewhere"}), "answers HTTP 302"),
    ("unasked 304", lambda _: web.Response(status=304), "answers HTTP 304"),
    ("too big", too_big, "larger than 8388608 bytes"),
    ("endless", endless, "larger than 8388608 bytes"),
    ("own copy", plain(record("me", uid="uid-me", generation=9)), "this agent's own identity"),
]


@pytest.mark.parametrize(("answer", "reason"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
async def test_what_is_no_member_s_record_is_not_believed_and_named(answer: Answer, reason: str) -> None:
    async with answering(answer) as (address, asked):
        watch = Watch((at(address),))
        watch.peers.announce(record("me", uid="uid-me"))
        async with watch.running() as peers:
            await asked.wait(2)
            with pytest.raises(PeerUnreachable, match=address):
                await peers.ask(address)
            assert watch.alive() == {}
            (problem,) = peers.problems()
            assert problem.where == f"peer {address}"
            assert reason in problem.message
            assert watch.told == 0
        assert {path for path, _ in asked.times} == {"/v1/record"}


async def test_one_wrong_peer_hides_no_other() -> None:
    async with answering(endless) as (wrong, _), agents([record("a")]) as ((right, view),):
        watch = Watch((at(wrong), at(right), at("127.0.0.1:1"), at("not an address"), at("[::1:9")))
        async with watch.running() as peers:
            await watch.until(lambda: watch.alive() == {"a": True})
            view.own = record("a", version=2)
            await watch.until(lambda: peers.view()["a"].record.version == 2)


async def test_many_problems_are_summed_up() -> None:
    watch = Watch(tuple(at(f"127.0.0.1:{port}") for port in range(1, 13)))
    async with watch.running() as peers:
        for member in watch.members or ():
            with pytest.raises(PeerUnreachable, match="can't be reached"):
                await peers.ask(member.name)
        (problem,) = peers.problems()
    assert problem.message.startswith("12 of 12 don't answer: 127.0.0.1:1 can't be reached: connection refused; ")
    assert problem.message.endswith("; and 7 more")


async def test_the_own_record_is_no_peer() -> None:
    own = record("me", uid="uid-me")
    async with agents([own, record("a")]) as ((mine, _), (other, _)):
        watch = Watch((at(mine), at(other)))
        watch.peers.announce(own)
        async with watch.running() as peers:
            await watch.until(lambda: watch.alive() == {"a": True})
            assert peers.own == own
            assert peers.problems() == ()
            assert peers.namesake() is None


async def test_who_was_never_heard_is_named_until_a_record_comes() -> None:
    own = record("me", uid="uid-me")
    async with agents([own, record("a"), record("b", pool="other")]) as ((mine, _), (other, _), (wrong, view)):
        watch = Watch((at(mine), at(other), at(wrong), at("127.0.0.1:1")))
        assert watch.peers.unheard() == {mine, other, wrong, "127.0.0.1:1"}
        async with watch.running() as peers:
            await watch.until(lambda: peers.unheard() == {wrong, "127.0.0.1:1"})
            view.own = record("b")
            await watch.until(lambda: peers.unheard() == {"127.0.0.1:1"})
            watch.members = (at(mine), at(other))
            assert peers.unheard() == set()


async def test_a_listed_pod_that_was_never_heard_goes_by_its_name() -> None:
    watch = Watch(
        (Member(name="vllm-0", address="127.0.0.1:1", uid="u"), Member(name="me", address="x:1", uid="uid-me"))
    )
    assert watch.peers.unheard() == {"vllm-0"}


async def test_the_own_answer_alone_is_news() -> None:
    """A first agent must not wait for peers when all that is listed is itself."""
    async with agents([record("me", uid="uid-me")]) as ((mine, _),):
        watch = Watch((at(mine),))
        async with watch.running() as peers:
            await watch.until(lambda: peers.unheard() == set())
            assert watch.told == 1


async def test_the_own_pod_is_not_asked_and_a_pod_in_two_slices_once() -> None:
    async with (
        answering(plain(record("me", uid="uid-me"))) as (mine, asked),
        agents([record("a")]) as ((first, _),),
        answering(plain(record("a"))) as (second, again),
    ):
        pods = (("me", mine, "uid-me"), ("a", first, "uid-a"), ("a", second, "uid-a"))
        watch = Watch(tuple(Member(name=name, address=address, uid=uid) for name, address, uid in pods))
        async with watch.running():
            await watch.until(lambda: watch.alive() == {"a": True})
        assert asked.times == again.times == []


async def test_another_pod_on_a_listed_address_is_not_that_pod() -> None:
    async with agents([record("b")]) as ((address, view),):
        watch = Watch((Member(name="a", address=address, uid="uid-a"),))
        async with watch.running() as peers:
            with pytest.raises(PeerUnreachable, match=r"is 'b' \(uid uid-b\), not 'a'"):
                await peers.ask("a")
            assert watch.alive() == {}
            view.own = record("a")
            assert (await peers.ask("a")).head.uid == "uid-a"


async def test_a_pod_that_is_listed_no_more_is_gone() -> None:
    async with agents([record("a"), record("b")]) as ((first, _), (second, _)):
        pods = (Member(name="a", address=first, uid="uid-a"), Member(name="b", address=second, uid="uid-b"))
        watch = Watch(pods)
        async with watch.running():
            await watch.until(lambda: watch.alive() == {"a": True, "b": True})
            watch.members = pods[:1]
            await watch.until(lambda: watch.alive() == {"a": True})


async def test_an_unknown_list_takes_nobody_away() -> None:
    async with agents([record("a")]) as ((address, view),):
        watch = Watch(None)
        async with watch.running() as peers:
            assert watch.alive() == {}
            watch.members = (Member(name="a", address=address, uid="uid-a"),)
            await watch.until(lambda: watch.alive() == {"a": True})
            watch.members = None
            view.own = record("a", version=2)
            await watch.until(lambda: peers.view()["a"].record.version == 2)


async def test_ask_reads_afresh() -> None:
    async with agents([record("a")]) as ((address, view),):
        slow = Timing(near_interval=3600, near_window=7200, near_timeout=5, tick=0.02)
        watch = Watch((at(address),), slow)
        async with watch.running() as peers:
            await watch.until(lambda: watch.alive() == {"a": True})
            view.own = record("a", version=2)
            assert (await peers.ask("a")).version == 2
            assert peers.view()["a"].record.version == 2
            await watch.until(lambda: watch.told == 2)
            before = peers.view()["a"].heard
            assert (await peers.ask("a")).version == 2
            assert peers.view()["a"].heard > before


async def test_ask_of_nobody_we_know_and_of_one_who_left() -> None:
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(StaticView(own=record("a"))))
        watch = Watch((at(address),))
        async with watch.running() as peers:
            await watch.until(lambda: watch.alive() == {"a": True})
            with pytest.raises(PeerUnreachable, match="no member of the pool is called 'nobody'"):
                await peers.ask("nobody")
            await stack.aclose()
            with pytest.raises(PeerUnreachable, match=f"{address} can't be reached"):
                await peers.ask("a")
        with pytest.raises(PeerUnreachable, match="isn't running"):
            await peers.ask("a")


async def test_ask_says_when_the_address_has_another_name_now() -> None:
    async with agents([record("a")]) as ((address, view),):
        watch = Watch((at(address),), Timing(near_interval=3600, near_window=7200, near_timeout=5, tick=0.02))
        async with watch.running() as peers:
            await watch.until(lambda: watch.alive() == {"a": True})
            view.own = record("b")
            with pytest.raises(PeerUnreachable, match="answers as 'b', not 'a'"):
                await peers.ask("a")
            assert watch.alive() == {"a": False, "b": True}


async def test_two_agents_with_this_worker_s_name() -> None:
    async with agents([record("me", uid="uid-x", generation=1)]) as ((address, view),):
        watch = Watch((at(address),))
        watch.peers.announce(record("me", uid="uid-me", generation=5))
        async with watch.running() as peers:
            await watch.until(lambda: peers.namesake() is not None)
            assert "the later one, at me:1 (this agent), holds no targets" in peers.problems()[0].message
            view.own = record("me", uid="uid-x", generation=6)
            await watch.until(lambda: peers.namesake() is None)
            assert watch.alive() == {}
            assert f"the later one, at {address}, holds no targets" in peers.problems()[0].message


async def test_many_peers_are_asked_evenly_over_the_interval() -> None:
    """Everybody at the start, then each at a phase of its own, and never sooner than the interval allows."""
    asked: dict[str, list[float]] = {}

    def answer(request: web.Request) -> web.StreamResponse:
        asked.setdefault(request.host, []).append(time.monotonic())
        return web.Response(body=msgspec.json.encode(record(request.host)))

    async with answering(answer, hosts=30) as (addresses, counter):
        assert len(addresses.split()) == 30
        timing = Timing(few=20, far_interval=0.5, far_window=20, far_timeout=5, tick=0.02)
        watch = Watch(tuple(at(address) for address in addresses.split()), timing)
        start = time.monotonic()
        async with watch.running():
            await watch.until(lambda: len(watch.alive()) == 30)
            async with asyncio.timeout(20), counter.again:
                await counter.again.wait_for(lambda: min(len(times) for times in asked.values()) >= 4)
    assert max(times[0] for times in asked.values()) - start < 0.4
    second = sorted(times[1] - times[0] for times in asked.values())
    assert second[7] < 0.25 < second[-8]
    assert min(later - earlier for times in asked.values() for earlier, later in pairwise(times[1:])) > 0.3
