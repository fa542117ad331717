"""A small Hugging Face hub: the four calls that a download needs, LFS files on another host, tokens, pages.

The real huggingface_hub client downloads from it (`test_the_hubs_own_client_understands_the_stub`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from urllib.parse import quote

from aiohttp import web

from tests.adapters import Files

PAGE = 3


@dataclass
class Hub:
    """`async with Hub() as hub: hub.commit("org/repo", files)`; `hub.endpoint` is HF_ENDPOINT."""

    token: str = ""
    host: str = "127.0.0.1"
    endpoint: str = ""
    cdn: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # host kind, path, Authorization
    _commits: dict[str, Files] = field(default_factory=dict)
    _branches: dict[tuple[str, str], str] = field(default_factory=dict)
    _runners: list[web.AppRunner] = field(default_factory=list)

    def commit(self, repo: str, files: Files, branch: str = "main") -> str:
        """Make these the files of the branch; returns the commit's name."""
        content = repr(sorted(files.items())) + branch
        name = hashlib.sha1(content.encode()).hexdigest()
        self._commits[name] = files
        self._branches[repo, branch] = name
        return name

    async def __aenter__(self) -> Hub:
        hub, cdn = web.Application(), web.Application()
        hub.router.add_get("/api/models/{org}/{name}/revision/{revision}", self._revision)
        hub.router.add_get("/api/models/{org}/{name}/tree/{commit}{folder:(/.*)?}", self._tree)
        hub.router.add_get("/{org}/{name}/resolve/{revision}/{path:.*}", self._resolve)
        cdn.router.add_get("/lfs/{oid}", self._lfs)
        self.endpoint = await self._serve(hub)
        self.cdn = await self._serve(cdn)
        return self

    async def __aexit__(self, *_: object) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _serve(self, application: web.Application) -> str:
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, self.host, 0).start()
        return f"http://{self.host}:{runner.addresses[0][1]}"

    def _files(self, request: web.Request, revision: str) -> tuple[str, Files]:
        self.asked.append(("hub", request.path, request.headers.get("Authorization", "")))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized(headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid token."})
        repo = f"{request.match_info['org']}/{request.match_info['name']}"
        commit = self._branches.get((repo, revision), revision)
        if commit not in self._commits:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        return commit, self._commits[commit]

    async def _revision(self, request: web.Request) -> web.Response:
        commit, files = self._files(request, request.match_info["revision"])
        siblings = [{"rfilename": path} for path in files]
        return web.json_response({"id": "x", "sha": commit, "siblings": siblings, "tags": [], "private": False})

    async def _tree(self, request: web.Request) -> web.Response:
        _, files = self._files(request, request.match_info["commit"])
        folder = request.match_info["folder"].strip("/")
        paths = sorted(path for path in files if not folder or path.startswith(f"{folder}/"))
        if not paths:
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound", "X-Error-Message": "No such folder"})
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder or "some"}]
        entries += [_entry(path, files[path]) for path in paths]
        start = int(request.query.get("cursor", "0"))
        headers = {}
        if len(entries) > start + PAGE:
            following = f"{self.endpoint}{request.raw_path.partition('?')[0]}?recursive=true&cursor={start + PAGE}"
            headers["Link"] = f'<{following}>; rel="next"'
        return web.json_response(entries[start : start + PAGE], headers=headers)

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        commit, files = self._files(request, request.match_info["revision"])
        data = files.get(request.match_info["path"])
        if data is None:
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(data))}
        if not _is_lfs(request.match_info["path"]):
            return _ranged(request, data, {**headers, "ETag": f'"{_oid(data)}"'})
        digest = hashlib.sha256(data).hexdigest()
        location = f"{self.cdn}/lfs/{digest}?signature={quote('a/b+c==')}"
        raise web.HTTPFound(location, headers={**headers, "X-Linked-ETag": f'"{digest}"', "ETag": f'"{digest}"'})

    async def _lfs(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(("cdn", request.path, request.headers.get("Authorization", "")))
        if "signature=a/b%2Bc%3D%3D" not in request.raw_path:
            raise web.HTTPForbidden(text=request.raw_path)
        for files in self._commits.values():
            for data in files.values():
                if hashlib.sha256(data).hexdigest() == request.match_info["oid"]:
                    return _ranged(request, data, {"ETag": f'"{request.match_info["oid"]}"'})
        raise web.HTTPNotFound


def _is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "oid": _oid(data), "size": len(data), "path": path}
    if _is_lfs(path):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 135}
    return entry


def _ranged(request: web.Request, data: bytes, headers: dict[str, str]) -> web.Response:
    headers["Accept-Ranges"] = "bytes"
    asked = request.http_range
    if asked.start is None:
        return web.Response(body=data, headers=headers)
    stop = len(data) if asked.stop is None else min(asked.stop, len(data))
    headers["Content-Range"] = f"bytes {asked.start}-{stop - 1}/{len(data)}"
    return web.Response(status=206, body=data[asked.start : stop], headers=headers)
