"""`lora-sidecar explain` against a real server."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from sidecar.cli import explain
from tests.edges.agent_view import StaticView, serving

ANSWER: dict[str, Any] = {
    "adapter": "ns/sql",
    "servedName": "Org/Sql.v1",
    "wanted": 1,
    "workers": [
        {"worker": "w1", "score": "ff", "zone": "a", "up": True, "rank": 0, "why": "target 1 of 1 wanted"},
        {"worker": "w0", "score": "0f", "zone": "", "up": False, "rank": None, "why": "it is not heard"},
    ],
    "also": [],
}


@pytest.fixture
async def view() -> StaticView:
    return StaticView()


@pytest.fixture
async def address(view: StaticView) -> AsyncIterator[str]:
    async with serving(view) as where:
        yield where


async def call(*words: str) -> int:
    """The command as the program would run it, beside the server's loop."""
    parser = argparse.ArgumentParser()
    explain.add_parser(parser.add_subparsers(dest="command"))
    return await asyncio.to_thread(explain.run, parser.parse_args(["explain", *words]))


async def test_a_table_in_the_order_of_the_answer(
    view: StaticView, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view.explained["Org/Sql.v1"] = ANSWER
    capsys.readouterr()
    assert await call("Org/Sql.v1", "--address", address) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ns/sql, served as Org/Sql.v1, wanted on 1",
        "",
        "RANK  WORKER  SCORE  ZONE  UP   WHY",
        "0     w1      ff     a     yes  target 1 of 1 wanted",
        "-     w0      0f     -     no   it is not heard",
    ]


async def test_json_is_the_answer_itself(view: StaticView, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    view.explained["a b?"] = ANSWER
    capsys.readouterr()
    assert await call("a b?", "-o", "json", "--address", f"http://{address}/") == 0
    assert json.loads(capsys.readouterr().out) == ANSWER


async def test_what_else_there_is_to_say(view: StaticView, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    view.explained["a"] = {
        "adapter": "x/a",
        "rejected": "taken by y/a",
        "isolated": True,
        "workers": [],
        "also": ["y/a"],
    }
    capsys.readouterr()
    assert await call("a", "--address", address) == 0
    out = capsys.readouterr().out
    assert "not placed: taken by y/a" in out
    assert "less than half of the pool" in out
    assert "no workers known" in out
    assert "also fits: y/a" in out


async def test_a_terminal_is_not_steered_by_names(
    view: StaticView, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view.explained["a"] = {"adapter": "a\x1b[2J", "workers": [{"worker": "w\x07\nx", "why": "\x9b31m"}]}
    capsys.readouterr()
    assert await call("a", "--address", address) == 0
    out = capsys.readouterr().out
    assert all(char.isprintable() for char in out.replace("\n", ""))
    assert out.count("\n") == 4


async def test_an_unknown_name_names_the_nearest(
    view: StaticView, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view.rows = [{"namespace": "ns", "name": name} for name in ("sql", "chat", "summary")]
    assert await call("ns/sqll", "--address", address) == 1
    assert capsys.readouterr().err.endswith("no adapter is known as 'ns/sqll'; among the 3 known: ns/sql\n")
    view.rows = []
    assert await call("x", "--address", address) == 1
    assert "knows none at all" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["127.0.0.1:1", "no.such.host.invalid:1", "a..b:1", "%s:1" % ("x" * 70)])
async def test_no_agent_there(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await call("a", "--address", where) == 1
    assert f"no answer from {where}: " in capsys.readouterr().err


@pytest.mark.parametrize("where", ["host:x", "https://host:1", "", "[::1:2", ":1"])
async def test_no_address(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await call("a", "--address", where) == 1
    assert f"--address {where!r} is not HOST:PORT" in capsys.readouterr().err


def test_the_port_may_be_left_out() -> None:
    assert explain._parsed("worker-0") == ("worker-0", 8790)
    assert explain._parsed("[::1]:9") == ("::1", 9)


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (200, "<html>", "HTTP 200, but not as an agent"),
        (200, "[]", "not as an agent"),
        (500, '{"error": "KeyError in the agent"}', "HTTP 500: KeyError in the agent"),
        (404, '{"error": "nothing is here"}', "HTTP 404: nothing is here"),
        (200, "\xff", "not as an agent"),
    ],
)
async def test_an_answer_of_another_kind(
    status: int, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=text.encode("latin-1"))

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        assert await call("a", "--address", f"127.0.0.1:{runner.addresses[0][1]}") == 1
    finally:
        await runner.cleanup()
    assert reason in capsys.readouterr().err
