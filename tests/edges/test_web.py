"""The page's data, and the headers and text under which it is safe to show what others wrote."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import aiohttp
import msgspec
import pytest

from sidecar.edges.matrix import MAX_ADAPTERS, MAX_PROBLEMS, MAX_WORKERS, matrix
from sidecar.edges.page import Page
from sidecar.model import Problem
from sidecar.ports import Row
from tests.edges.agent_view import StaticView, serving


def adapter(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "namespace": "ns", "servedName": name, "targets": [], **fields}


def worker(name: str, *loaded: str, state: str = "alive", **fields: Any) -> dict[str, Any]:
    cells = {f"ns/{key}": {"state": "Loaded", "revision": "sha256:ab", "message": ""} for key in loaded}
    return {"name": name, "state": state, "adapters": cells, **fields}


def table(adapters: list[dict[str, Any]], workers: list[Row], wanted: str = "", problems: int = 0) -> Any:
    found = [Problem(where=str(number), message="") for number in range(problems)]
    made = matrix(pool="p", worker="w0", adapters=adapters, workers=workers, problems=found, wanted=wanted)
    return msgspec.json.decode(msgspec.json.encode(made))


def test_a_cell_for_each_adapter_and_worker_in_the_order_of_the_columns() -> None:
    made = table(
        [adapter("b", targets=["w1"]), adapter("a", targets=["w0", "w1"])], [worker("w1", "a"), worker("w0", "a", "b")]
    )
    assert [column["name"] for column in made["workers"]] == ["w0", "w1"]
    assert [row["key"] for row in made["adapters"]] == ["ns/a", "ns/b"]
    loaded = {"state": "Loaded", "revision": "sha256:ab", "message": ""}
    assert made["adapters"][0]["cells"] == [{**loaded, "target": True}, {**loaded, "target": True}]
    assert made["adapters"][1]["cells"] == [{**loaded, "target": False}, {"target": True}]
    assert [column["loaded"] for column in made["workers"]] == [2, 1]
    assert (made["alive"], made["counts"]) == (2, {"Loaded": 3})


def test_a_missing_worker_has_its_column_and_counts_for_nothing() -> None:
    made = table([adapter("a", targets=["w1"])], [worker("w0"), worker("w1", "a", state="dead"), {"name": "w2"}])
    assert [column["state"] for column in made["workers"]] == ["alive", "dead", "unknown"]
    assert made["adapters"][0]["cells"][1]["state"] == "Loaded"
    assert made["adapters"][0]["cells"][0::2] == [None, None]
    assert (made["alive"], made["counts"]) == (1, {})


def test_a_target_that_nobody_lists_is_no_fault() -> None:
    assert table([adapter("a", targets=["gone"])], [worker("w0")])["adapters"][0]["cells"] == [None]


def test_an_adapter_that_only_another_worker_knows_has_a_row() -> None:
    made = table([], [worker("w0"), worker("w1", "a")])
    assert [row["key"] for row in made["adapters"]] == ["ns/a"]


def test_empty_fields_are_no_fault() -> None:
    made = table([{"name": "a", "targets": None, "revision": None, "message": None, "bytesDone": None}], [])
    assert made["adapters"][0]["key"] == "a"
    assert made["workers"] == []


@pytest.mark.parametrize(
    ("wanted", "keys"),
    [("", ["ns/a1", "ns/b1"]), ("B1", ["ns/b1"]), ("org/", ["ns/a1"]), ("ns/", ["ns/a1", "ns/b1"]), ("zz", [])],
)
def test_a_name_narrows_the_rows(wanted: str, keys: list[str]) -> None:
    made = table([adapter("a1", servedName="Org/Thing"), adapter("b1")], [worker("w0")], wanted)
    assert [row["key"] for row in made["adapters"]] == keys
    assert made["total"] == {"adapters": 2, "matching": len(keys), "workers": 1}


def test_a_big_pool_is_cut_and_says_so() -> None:
    adapters = [adapter(f"a{number:04}") for number in range(MAX_ADAPTERS + 1)]
    workers: list[Row] = [worker(f"w{number:04}", state="dead") for number in range(MAX_WORKERS)]
    workers += [worker("x-alive"), worker("y-self", self=True, state="unknown")]
    made = table(adapters, workers, problems=MAX_PROBLEMS + 5)
    assert len(made["adapters"]) == MAX_ADAPTERS
    assert len(made["workers"]) == MAX_WORKERS
    assert {"x-alive", "y-self"} <= {column["name"] for column in made["workers"]}
    assert made["total"] == {"adapters": MAX_ADAPTERS + 1, "matching": MAX_ADAPTERS + 1, "workers": MAX_WORKERS + 2}
    assert (len(made["problems"]), made["problemsTotal"]) == (MAX_PROBLEMS, MAX_PROBLEMS + 5)
    assert all(len(row["cells"]) == MAX_WORKERS for row in made["adapters"])


def test_a_column_says_what_the_worker_says_of_itself() -> None:
    (column,) = table(
        [], [worker("w0", "a", self=True, engineUp=True, engine="0.32.0", capacity=4, cordoned=True, heard=6.0, more=1)]
    )["workers"]
    assert (column["engineUp"], column["engine"], column["capacity"], column["loaded"]) == (True, "0.32.0", 4, 1)
    assert (column["self"], column["cordoned"], column["resting"], column["heard"]) == (True, True, False, 6.0)


async def test_the_page_comes_with_a_policy_that_allows_its_own_script_and_style_alone() -> None:
    async with (
        serving(StaticView()) as address,
        aiohttp.ClientSession() as http,
        http.get(f"http://{address}/") as answer,
    ):
        body = await answer.read()
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
        assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (text,) = re.findall(rb"<%s>(.*?)</%s>" % (kind.encode(), kind.encode()), body, re.DOTALL)
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


def test_the_page_takes_nothing_from_elsewhere_and_writes_texts_alone() -> None:
    text = Page.load().body.decode()
    assert "://" not in text
    assert not re.search(r"\bsrc=|<link (?!rel=\"icon\" href=\"data:)|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|\bon[a-z]+=|style=", text)
    # Relative, so that it works behind a proxy that puts a path in front.
    assert not re.search(r"fetch\(\s*[\"'`]/", text)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


async def test_the_page_s_data_over_http_narrowed_by_name() -> None:
    view = StaticView(rows=[adapter("a"), adapter("b")], workers=[worker("w", "a", self=True)])
    async with serving(view) as address, aiohttp.ClientSession() as http:
        async with http.get(f"http://{address}/v1/matrix", params={"q": "ns/b"}) as answer:
            made = await answer.json()
        assert (made["pool"], made["worker"]) == ("p", "w")
        assert [row["key"] for row in made["adapters"]] == ["ns/b"]
        async with http.get(f"http://{address}/v1/matrix", params={"q": "x" * 4000}) as answer:
            assert (await answer.json())["adapters"] == []
