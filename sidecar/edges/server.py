"""The agent's HTTP server: probes, metrics, what people and scripts read, and the record that peers ask for.

Everything here is read-only, unauthenticated and cheap. What a client sends is only a path, a query and headers: bodies
are refused, header sizes bounded, and nothing of a request is ever written into a page. What gossip adds below /peer/
authenticates each request itself.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog
from aiohttp import web

from sidecar.edges.matrix import matrix
from sidecar.edges.page import Page
from sidecar.model import Record
from sidecar.ports import AgentView, Exposition, ListenFailed

log = structlog.get_logger()

# The agent answers /v1/drained after 60 s at the latest; this is for an agent that doesn't.
DRAINED_LIMIT = 65.0
# Twice this (aiohttp waits, cancels, waits again) must fit into the two seconds from SIGTERM to exit.
SHUTDOWN_SECONDS = 0.75
# Idle connections are closed by clients first, so that no request meets a closing socket.
KEEPALIVE_SECONDS = 75.0
# Names of known adapters in the answer about an unknown one.
KNOWN_SHOWN = 50

_SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 host stands in brackets. Raises ListenFailed."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ListenFailed(f"--listen {text!r}: an IPv6 address stands in brackets, for example [::]:8790")
    if not colon or not host:
        raise ListenFailed(f"--listen {text!r} is not HOST:PORT; for example 0.0.0.0:8790, or [::]:8790")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ListenFailed(f"--listen {text!r}: the port {port!r} is not a number from 0 to 65535")
    return host, int(port)


class Server:
    """Serves one AgentView on one TCP port. Implemented with aiohttp; closes within 2 s."""

    def __init__(
        self,
        view: AgentView,
        metrics: Exposition,
        listen: str,
        *,
        drained_limit: float = DRAINED_LIMIT,
        peer_routes: Sequence[web.RouteDef] = (),
    ) -> None:
        """`listen` is HOST:PORT, port 0 for any free one; `peer_routes` are what gossip serves below /peer/.

        Raises ListenFailed if `listen` is not HOST:PORT.
        """
        self._listen = listen
        self._host, self._port = parse_listen(listen)
        self._answers = _Answers(view, metrics, drained_limit)
        self._peer_routes = tuple(peer_routes)
        self._runner: web.AppRunner | None = None
        self._address = ""

    @property
    def port(self) -> int:
        """The port that is listened on; the one asked for before `start`."""
        return int(self._address.rpartition(":")[2]) if self._address else self._port

    @property
    def address(self) -> str:
        """HOST:PORT that is listened on, with the real port; "" before `start`."""
        return self._address

    async def start(self) -> None:
        """Listen. Raises ListenFailed, which names the flag, the address and the reason."""
        # aiohttp logs a traceback for each request that is no HTTP; whoever can reach the port could fill the log.
        quiet = logging.getLogger("sidecar.http")
        quiet.setLevel(logging.CRITICAL)
        app = self._answers.application()
        app.add_routes(self._peer_routes)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet,
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_SECONDS,
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=0,
        )
        await runner.setup()
        try:
            for site in self._sites(runner):
                await site.start()
        except OSError as error:
            await runner.cleanup()
            raise ListenFailed(self._why(error)) from error
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("listening", address=self._address)

    async def stop(self) -> None:
        """Close the port, give requests under way a moment, then cut them. Harmless when not started."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _sites(self, runner: web.AppRunner) -> list[web.BaseSite]:
        if self._host == "::" and socket.has_dualstack_ipv6():
            # asyncio would make [::] deaf for IPv4, on which probes come in an IPv4 cluster.
            listener = socket.create_server(
                (self._host, self._port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
            )
            return [web.SockSite(runner, listener)]
        return [web.TCPSite(runner, self._host, self._port)]

    def _why(self, error: OSError) -> str:
        hints = {
            errno.EADDRINUSE: "the port is in use by another process; stop it, or choose another port",
            errno.EACCES: "not permitted; choose a port above 1023",
            errno.EADDRNOTAVAIL: "this machine has no such address; 0.0.0.0 stands for all",
        }
        return f"--listen {self._listen}: {hints.get(error.errno or 0) or error.strerror or error}"


class _Answers:
    """The handlers. Each turns something of the view into one response."""

    def __init__(self, view: AgentView, metrics: Exposition, drained_limit: float) -> None:
        self._view = view
        self._metrics = metrics
        self._drained_limit = drained_limit
        self._page = Page.load()
        self._encoded: tuple[Record, bytes, str] | None = None

    def application(self) -> web.Application:
        app = web.Application(middlewares=[_guard])
        app.add_routes(
            [
                web.get("/", self.index),
                web.get("/healthz", self.healthz),
                web.get("/readyz", self.readyz),
                web.get("/metrics", self.metrics),
                web.get("/v1/adapters", self.adapters),
                # Served names hold slashes, so the name is everything between.
                web.get("/v1/adapters/{name:.+}/explain", self.explain),
                web.get("/v1/drained", self.drained),
                web.get("/v1/matrix", self.matrix),
                web.get("/v1/peers", self.peers),
                web.get("/v1/record", self.record),
            ]
        )
        return app

    async def index(self, request: web.Request) -> web.Response:
        headers = {**_SAFE, "Content-Security-Policy": self._page.policy}
        return web.Response(body=self._page.body, content_type="text/html", charset="utf-8", headers=headers)

    async def healthz(self, request: web.Request) -> web.Response:
        healthy, details = self._view.healthy()
        return _json({"healthy": healthy, **details}, 200 if healthy else 503)

    async def readyz(self, request: web.Request) -> web.Response:
        ready, reasons = self._view.ready()
        return _json({"ready": ready, "reasons": reasons}, 200 if ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={**_SAFE, "Content-Type": content_type})

    async def adapters(self, request: web.Request) -> web.Response:
        return _json({"adapters": self._view.adapters(), "problems": self._view.problems()})

    async def explain(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        answer = self._view.explain(name)
        if answer is not None:
            return _json(answer)
        known = [f"{row.get('namespace', '')}/{row.get('name', '')}" for row in self._view.adapters()]
        return _json(
            {
                "error": f"no adapter is known as {name[:300]!r}; name it as namespace/name, name or served name",
                "known": known[:KNOWN_SHOWN],
                "knownTotal": len(known),
            },
            404,
        )

    async def drained(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(self._drained_limit):
                return _json(await self._view.drained())
        except TimeoutError:
            # The kubelet takes any 2xx for done and ends the container either way.
            return _json({"drained": False, "error": f"no answer within {self._drained_limit:g} s"})

    async def matrix(self, request: web.Request) -> web.Response:
        own = self._view.record().head
        return _json(
            matrix(
                pool=own.pool,
                worker=own.name,
                adapters=self._view.adapters(),
                workers=self._view.peers(),
                problems=self._view.problems(),
                wanted=request.query.get("q", "")[:200],
            )
        )

    async def peers(self, request: web.Request) -> web.Response:
        return _json({"peers": self._view.peers()})

    async def record(self, request: web.Request) -> web.Response:
        """The own record; every peer asks for it all the time, so it is encoded once and mostly answered with 304."""
        body, tag = self._record(self._view.record())
        asked = request.if_none_match or ()
        headers = {**_SAFE, "Cache-Control": "no-cache", "ETag": f'"{tag}"'}
        if any(etag.value == tag for etag in asked):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type="application/json", headers=headers)

    def _record(self, record: Record) -> tuple[bytes, str]:
        if self._encoded is None or self._encoded[0] is not record:
            body = msgspec.json.encode(record)
            # Over the whole content, the UID included: another agent on this address never answers 304 for this one.
            tag = f"{record.version}-{hashlib.blake2b(body, digest_size=12).hexdigest()}"
            self._encoded = (record, body, tag)
        return self._encoded[1:]


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON, whatever happens; no bodies."""
    try:
        if request.body_exists and request.method in {"GET", "HEAD"}:
            return _error(413, "no request here has a body", close=True)
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _error(405, f"{request.method} is not possible here, only {allowed}", {"Allow": allowed})
    except web.HTTPNotFound:
        return _error(404, f"nothing is at {request.path[:300]!r}; see /, /v1/adapters, /v1/peers, /healthz, /metrics")
    except web.HTTPException as error:
        return _error(error.status, error.reason)
    except Exception as error:
        # A fault in one view must be an answer and a line in the log, not a cut connection.
        log.error("request_failed", path=request.path[:300], exc_info=error)
        return _error(500, f"{type(error).__name__} in the agent; its log has the details")


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json", headers=_SAFE.copy()
    )


def _error(status: int, text: str, headers: dict[str, str] | None = None, *, close: bool = False) -> web.Response:
    response = _json({"error": text}, status)
    response.headers.update(headers or {})
    if close:
        response.force_close()
    return response
