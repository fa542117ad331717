"""A stand-in for vLLM's API server: same calls, same statuses, same words, no model. For the demo and for tests.

    python -m sidecar.edges.stub_engine --port 0 --model tiny --max-loras 4

prints its address once it listens. Started with the flags it knows from vLLM; what it generates depends on the base
model's name or on the bytes of the adapter's weights, so that a wrong adapter shows. A conformance suite holds it
against the real vLLM. `POST /stub/faults` makes it misbehave (`Faults`), `GET /stub/calls` lists loads and unloads.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from types import TracebackType

from aiohttp import web

from sidecar.edges.stub_faults import Faults
from sidecar.edges.stub_http import StubServer
from sidecar.edges.stub_model import StubOptions

__all__ = ["Faults", "StubEngine", "StubOptions", "main"]


class StubEngine:
    """The stub inside this process: `async with StubEngine(StubOptions(...)) as stub: stub.url`.

    `server` holds its state: `server.loras`, `server.calls`, `server.faults`.
    """

    def __init__(self, options: StubOptions | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.options = options or StubOptions()
        self.server = StubServer(self.options)
        self.faults = self.server.faults
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self._reaper: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens; the port stays the same over `restart`."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Load --lora-modules, then listen. Raises LoraError, OSError."""
        self.server.start()
        runner = web.AppRunner(self.server.app(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, self._host, self._port, reuse_address=True)
        await site.start()
        self._port = int(runner.addresses[0][1])
        self._reaper = asyncio.create_task(self._reap(runner))

    async def stop(self) -> None:
        """Stop listening and cut every connection, as a killed process does."""
        await self.server.model.die()
        if self._reaper is not None:
            await self._reaper
            self._reaper = None

    async def restart(self) -> None:
        """A new engine process behind the same port: everything loaded at run time is forgotten."""
        await self.stop()
        self.server = StubServer(self.options, faults=self.faults, calls=self.server.calls)
        await self.start()

    async def closed(self) -> None:
        """Wait until the engine has died and the port is closed."""
        if self._reaper is not None:
            await asyncio.shield(self._reaper)

    async def _reap(self, runner: web.AppRunner) -> None:
        await self.server.model.dead.wait()
        # Requests in flight get their 500, and /health its 503, before the process is gone.
        await asyncio.sleep(0.05)
        await runner.cleanup()

    async def __aenter__(self) -> StubEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stub_engine", description="A stand-in for vLLM's API server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--served-model-name", nargs="+", default=[])
    parser.add_argument("--api-key", nargs="+", default=[])
    parser.add_argument("--enable-lora", action="store_true", help="accepted; always on")
    parser.add_argument("--max-loras", type=int, default=1)
    parser.add_argument("--max-cpu-loras", type=int)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME=PATH")
    parser.add_argument("--version", default="0.32.0", help="the vLLM to behave like")
    parser.add_argument("--no-runtime-updating", action="store_true", help="as without the environment variable")
    parser.add_argument("--dev-mode", action="store_true", help="as with VLLM_SERVER_DEV_MODE=1")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, help="check adapters against it")
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--start-seconds", type=float, default=0.0, help="nothing listens before")
    return parser


def _options(arguments: argparse.Namespace) -> StubOptions:
    modules = []
    for entry in arguments.lora_modules:
        name, found, path = entry.partition("=")
        if not found:
            raise SystemExit(f"--lora-modules {entry!r}: write NAME=PATH")
        modules.append((name, path))
    return StubOptions(
        model=arguments.model,
        served_names=tuple(arguments.served_model_name),
        version=arguments.version,
        api_keys=tuple(arguments.api_key),
        max_loras=arguments.max_loras,
        max_cpu_loras=arguments.max_cpu_loras,
        max_lora_rank=arguments.max_lora_rank,
        lora_modules=tuple(modules),
        runtime_updating=not arguments.no_runtime_updating,
        dev_mode=arguments.dev_mode,
        block_size=arguments.block_size,
        token_seconds=arguments.token_seconds,
        load_seconds=arguments.load_seconds,
        hidden_size=arguments.hidden_size,
    )


async def _serve(arguments: argparse.Namespace) -> None:
    stub = StubEngine(_options(arguments), host=arguments.host, port=arguments.port)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if arguments.start_seconds:
        waiting = asyncio.create_task(ended.wait())
        await asyncio.wait([waiting], timeout=arguments.start_seconds)
        waiting.cancel()
    if ended.is_set():
        return
    await stub.start()
    sys.stdout.write(f"{stub.url}\n")
    sys.stdout.flush()
    death = asyncio.create_task(stub.closed())
    asked = asyncio.create_task(ended.wait())
    await asyncio.wait([death, asked], return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    await stub.stop()
    await death


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM, SIGINT or the engine's death; 0 in each case, as vLLM does."""
    asyncio.run(_serve(_parser().parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
