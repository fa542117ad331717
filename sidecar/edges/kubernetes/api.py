"""Requests to the API server as raw bytes: who answers, what went wrong, and who we are.

In a pod the service account's token is read again when it expires or is refused; elsewhere a kubeconfig serves, with
every way of authentication that kubernetes-asyncio knows.
"""

from __future__ import annotations

import asyncio
import base64
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from yarl import URL

from sidecar.edges.kubernetes.client import Parts
from sidecar.model import Frozen
from sidecar.ports import EdgeError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT = 15.0
# A list of a thousand adapters from a busy server.
LIST_TIMEOUT = 60.0
# An object is as large as etcd takes at most, 1.5 MiB; aiohttp's lines may be twice its buffer.
MAX_LINE = 2**21
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
_MAX_MESSAGE = 400


class ApiError(EdgeError):
    """The API server gave no good answer. `code` is the HTTP status, 0 if there was none; `body` what came with it."""

    def __init__(self, code: int, message: str, causes: tuple[str, ...] = (), body: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.causes = causes
        self.body = body


class NoAccount(EdgeError):
    """There is no way to reach an API server from here. The text says what is missing."""


class _Cause(Frozen, frozen=True):
    message: str = ""


class _Details(Frozen, frozen=True):
    causes: tuple[_Cause, ...] | None = ()


class _Status(Frozen, frozen=True):
    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details | None = None


class _PodClaim(Frozen, frozen=True):
    name: str = ""
    uid: str = ""


class _KubernetesClaim(Frozen, frozen=True):
    namespace: str = ""
    pod: _PodClaim = _PodClaim()
    node: _PodClaim = _PodClaim()


class _Claims(Frozen, frozen=True, rename={"kubernetes": "kubernetes.io"}):
    kubernetes: _KubernetesClaim = _KubernetesClaim()
    sub: str = ""


class PodIdentity(Frozen, frozen=True, kw_only=True):
    """Who this pod is, by its token: a token bound to a pod names it, so no downward API is needed."""

    namespace: str
    pod: str
    uid: str
    node: str = ""
    account: str = "default"


def pod_identity(token: str) -> PodIdentity:
    """Read the claims of a service-account token. Raises NoAccount for one that is bound to no pod.

    The signature isn't checked: it is our own, and who lies to itself patches a pod that the API server refuses.
    """
    try:
        body = token.split(".")[1]
        claims = msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=_Claims)
    except (IndexError, ValueError, msgspec.MsgspecError) as error:
        raise NoAccount(f"the service-account token can't be read: {error}") from error
    bound = claims.kubernetes
    if not (bound.namespace and bound.pod.name and bound.pod.uid):
        raise NoAccount(
            "the service-account token names no pod: it is not the projected one that the kubelet mounts. "
            "Remove the Secret-based token, and let the pod have the default mount or a projected volume"
        )
    return PodIdentity(
        namespace=bound.namespace,
        pod=bound.pod.name,
        uid=bound.pod.uid,
        node=bound.node.name,
        account=claims.sub.rpartition(":")[2] or "default",
    )


class Api:
    """One API server. Close it at the end."""

    def __init__(
        self,
        host: str,
        session: aiohttp.ClientSession,
        authorize: Callable[[bool], Awaitable[str]],
        proxy: str | None = None,
    ) -> None:
        """`authorize(again)` gives the Authorization header ("" for none), read anew after a refusal if `again`."""
        self.host = host.rstrip("/")
        self._session = session
        self._authorize = authorize
        self._proxy = proxy

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        media: str = "application/json",
        timeout: float = TIMEOUT,
    ) -> bytes:
        """One request; the answer's body. Raises ApiError."""
        limits = aiohttp.ClientTimeout(total=timeout)
        async with self._answer(method, path, query or {}, body, media, limits) as response:
            return await response.read()

    @asynccontextmanager
    async def lines(self, path: str, query: Mapping[str, str], silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of an endless answer. Raises ApiError, also when nothing has come for `silence` seconds."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=silence)
        async with self._answer("GET", path, query, None, "", limits) as response:
            yield _lines(response)

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None,
        media: str,
        limits: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        url = self.host + path + ("?" + "&".join(f"{k}={quote(v, safe='')}" for k, v in query.items()) if query else "")
        try:
            response = await self._send(method, url, body, media, limits, again=False)
            if response.status == 401:
                response.release()
                response = await self._send(method, url, body, media, limits, again=True)
            async with response:
                if response.status >= 300:
                    raise _refusal(response.status, await response.read())
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError) as error:
            what = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise ApiError(0, f"the API server {self.host} can't be reached: {what}") from error

    async def _send(
        self, method: str, url: str, body: bytes | None, media: str, limits: aiohttp.ClientTimeout, *, again: bool
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        authorization = await self._authorize(again)
        if authorization:
            headers["Authorization"] = authorization
        if body is not None:
            headers["Content-Type"] = media
        return await self._session.request(
            method,
            URL(url, encoded=True),
            data=body,
            headers=headers,
            timeout=limits,
            allow_redirects=False,
            proxy=self._proxy,
        )


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    while line := await response.content.readline():
        yield line


def _refusal(code: int, body: bytes) -> ApiError:
    try:
        status = msgspec.json.decode(body, type=_Status)
    except msgspec.MsgspecError:
        status = _Status(message=body[:_MAX_MESSAGE].decode(errors="replace").strip())
    causes = tuple(c.message for c in (status.details.causes or ())) if status.details else ()
    return ApiError(code, (status.message or f"HTTP {code}")[:_MAX_MESSAGE], causes, body)


async def in_cluster(
    *, account: Path = ACCOUNT, environment: Mapping[str, str] = os.environ, pool_size: int = 8
) -> tuple[Api, PodIdentity]:
    """The API server of the cluster that this pod runs in, and who this pod is. Raises NoAccount."""
    parts = await asyncio.to_thread(Parts)
    configuration = parts.Configuration()

    def load() -> None:
        parts.config.load_incluster_config(
            configuration,
            token_filename=str(account / "token"),
            cert_filename=str(account / "ca.crt"),
            environ=environment,
        )

    try:
        load()
        token = (account / "token").read_text()
    except (OSError, parts.config.ConfigException) as error:
        raise NoAccount(
            f"no service account: {error}. The pod needs its token ({account}/token; automountServiceAccountToken) "
            "and KUBERNETES_SERVICE_HOST"
        ) from error

    async def authorize(again: bool) -> str:
        if again:
            load()
        return str(await configuration.get_api_key_with_prefix("BearerToken"))

    session = _plain(parts.Rest(configuration, maxsize=pool_size).pool_manager)
    return Api(configuration.host, session, authorize, proxy_for(configuration.host)), pod_identity(token)


def _plain(session: aiohttp.ClientSession) -> aiohttp.ClientSession:
    """The same connections, without a look for proxies and a netrc file on a thread before each request."""
    connector = session.connector
    session.detach()
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=MAX_LINE)


def proxy_for(url: str) -> str | None:
    """Where the environment's HTTPS_PROXY and NO_PROXY send requests for `url`; None: there itself."""
    parsed = URL(url)
    if parsed.host is None or proxy_bypass(parsed.host):
        return None
    return getproxies().get(parsed.scheme)


async def from_kubeconfig(path: str = "", context: str = "") -> tuple[Api, str]:
    """The API server of a kubeconfig's context, and that context's namespace. Raises NoAccount."""
    parts = Parts()
    configuration = parts.Configuration()
    try:
        loader = await parts.config.load_kube_config(
            config_file=path or None, context=context or None, client_configuration=configuration
        )
    except (OSError, parts.config.ConfigException) as error:
        raise NoAccount(f"no usable kubeconfig: {error}. Set KUBECONFIG, or give --kubeconfig and --context") from error

    async def authorize(again: bool) -> str:
        settings = await configuration.auth_settings()
        return str(settings["BearerToken"]["value"]) if "BearerToken" in settings else ""

    namespace = str((loader.current_context or {}).get("context", {}).get("namespace") or "default")
    return Api(configuration.host, parts.Rest(configuration).pool_manager, authorize), namespace
