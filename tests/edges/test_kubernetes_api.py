"""Requests to the API server: the way that they take."""

from __future__ import annotations

import aiohttp
import pytest

from sidecar.edges.kubernetes.api import Api, proxy_for

from .test_kubernetes_watch import listing, serving


def test_a_proxy_of_the_environment_is_used_but_for_what_it_excepts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_for("https://10.96.0.1:443") is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", ".svc,10.96.0.1")
    assert proxy_for("https://10.0.0.1:6443") == "http://proxy:3128"
    assert proxy_for("https://10.96.0.1:443") is None
    assert proxy_for("https://kubernetes.default.svc") is None


async def test_requests_go_through_the_proxy() -> None:
    async def nobody(again: bool) -> str:
        return ""

    async with serving(listing("7")) as (server, through), aiohttp.ClientSession() as session:
        api = Api("http://far.away.invalid", session, nobody, proxy=through.host)
        assert b'"items"' in await api.request("GET", "/things")
    assert len(server.queries) == 1
