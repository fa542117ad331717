"""`lora-sidecar demo`: a whole pool on this machine, from the first worker to a deletion, checked from outside."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sidecar.cli.demo_plan import BASE, MAX_WORKERS, Cast, Options, Unusable, as_adapter, generated, given

OK, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130


def add_parser(commands: Any) -> None:
    """Register `demo` on the subparsers of the main parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="a whole pool on this machine: apply, scale, kill, heal, and check the result",
        description="Starts a pool of workers on this machine (agents and stand-ins for vLLM as real processes), lets"
        " adapters come, workers join, die and return, and checks each step from outside. Exit status 0 if all went"
        " well, 1 if a step failed, 2 if it could not begin.",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help=f"workers at the start, 1 to {MAX_WORKERS} (default: 3)"
    )
    parser.add_argument(
        "--capacity", type=int, metavar="N", help="adapters that fit on one worker (default: room for all of them)"
    )
    parser.add_argument("--keep", action="store_true", help="leave all running afterwards, until Ctrl-C")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live table")
    parser.add_argument(
        "--engine-url",
        metavar="URL,URL,…",
        help="run the story on these real engines, two at least; the last one joins later. They need"
        " --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and --adapters",
    )
    parser.add_argument(
        "--adapters",
        metavar="PATH,PATH,…",
        help="at least 3 adapters for the engines' base model, as directories or URIs; of 4 or more the last one is"
        " the new content of the update",
    )
    parser.add_argument(
        "--work-dir",
        metavar="DIR",
        help="where the demo makes its directory, which engines must see at the same path (default: TMPDIR)",
    )
    parser.add_argument(
        "--patience", type=float, default=40.0, metavar="SECONDS", help="a step that takes longer has failed (40)"
    )


def run(args: argparse.Namespace) -> int:
    """0: every step went well. 1: one failed. 2: it could not begin. 130: interrupted."""
    try:
        options = options_from(args)
        return asyncio.run(_demo(options))
    except Unusable as error:
        print(f"lora-sidecar demo: {error}", file=sys.stderr)
        return UNUSABLE


def options_from(args: argparse.Namespace) -> Options:
    """The options, checked. Raises Unusable."""
    urls = tuple(url.strip().rstrip("/") for url in (args.engine_url or "").split(",") if url.strip())
    if args.engine_url is not None and len(set(urls)) < 2:
        raise Unusable("--engine-url: at least two different engines are needed: URL,URL; one of them joins later")
    if urls and args.workers is not None:
        raise Unusable("--workers and --engine-url exclude each other: there is a worker for each engine")
    if urls and not args.adapters:
        raise Unusable("--adapters: with --engine-url name at least 3 adapters for the engines' base model")
    if args.adapters and not urls:
        raise Unusable("--adapters goes with --engine-url; the stand-in engines have adapters of their own")
    workers = 3 if args.workers is None else args.workers
    if not 1 <= workers <= MAX_WORKERS:
        raise Unusable(f"--workers: {workers} is not from 1 to {MAX_WORKERS}")
    if args.capacity is not None and args.capacity < 1:
        raise Unusable(f"--capacity: {args.capacity} is not 1 or more")
    if args.work_dir and not Path(args.work_dir).is_dir():
        raise Unusable(f"--work-dir: {args.work_dir} is no directory")
    return Options(
        workers=workers,
        capacity=args.capacity or 0,
        keep=args.keep,
        plain=args.plain,
        engine_urls=urls,
        adapters=tuple(part.strip() for part in (args.adapters or "").split(",") if part.strip()),
        work_dir=args.work_dir or "",
        patience=args.patience,
    )


async def _demo(options: Options) -> int:
    main = asyncio.current_task()
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def interrupt() -> None:
        # Only the first one: a second must not cut the tidying up short.
        if main is not None and not asked.is_set():
            asked.set()
            main.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt)
    stage = _Stage(options)
    try:
        return await stage.play()
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
        return stage.verdict if stage.verdict is not None else INTERRUPTED
    finally:
        await stage.clear()


class _Stage:
    """Everything that has to be cleared away again."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._root: Path | None = None
        self._session: Any = None
        self._pool: Any = None
        self._eyes: Any = None
        self._cast: Cast | None = None
        self._screen: Any = None
        # The story's result, once it is over: what the exit status is, however --keep ends.
        self.verdict: int | None = None

    async def play(self) -> int:
        """The story, and with --keep what comes after."""
        import aiohttp

        from sidecar.cli.demo_look import Eyes
        from sidecar.cli.demo_pool import Pool
        from sidecar.cli.demo_screen import make_screen
        from sidecar.cli.demo_story import Story
        from sidecar.cli.demo_watch import Watch

        options = self._options
        self._session = aiohttp.ClientSession()
        self._eyes = eyes = Eyes(self._session)
        base = await self._base_model()
        root = self._make_root()
        self._cast = cast = given(options.adapters) if options.adapters else generated(root / "origin")
        for item in cast.items:
            as_adapter(item, base)
        pool = self._pool = Pool(root, options, base, options.capacity or len(cast.items) + 1)
        watch = Watch(pool, eyes, lambda snapshot, requests: self._screen.show(snapshot, requests))
        story = Story(pool, cast, eyes, watch, options.patience)
        self._screen = make_screen(pool, story.steps(), cast.items, plain=options.plain)
        watching = asyncio.create_task(watch.run())
        telling = asyncio.create_task(self._tell(story, watch))
        try:
            await asyncio.wait((watching, telling), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # it never ends by itself: this raises
            return telling.result()
        finally:
            for task in (watching, telling):
                task.cancel()
            await asyncio.gather(watching, telling, return_exceptions=True)

    async def clear(self) -> None:
        """End the processes, take the adapters from engines that stay, delete the files."""
        if self._screen is not None:
            self._screen.close()
        if self._pool is not None:
            self._pool.end()
            if not self._pool.own_engines:
                await self._unload_all()
        if self._session is not None:
            await self._session.close()
        if self._root is not None:
            from sidecar.edges.filesystem import FileSystem, remove_tree

            remove_tree(FileSystem(), self._root)

    def _make_root(self) -> Path:
        try:
            self._root = Path(
                tempfile.mkdtemp(prefix="lora-sidecar-demo-", dir=self._options.work_dir or None)
            ).resolve()
            self._root.chmod(0o755)  # engines may run as another user
        except OSError as error:
            raise Unusable(f"no directory for the demo can be made: {error}; choose another --work-dir") from error
        return self._root

    async def _base_model(self) -> str:
        """What the engines serve. Raises Unusable if they don't answer, or not alike."""
        from sidecar.cli.demo_look import NoAnswer

        if not self._options.engine_urls:
            return BASE
        try:
            found = {url: await self._eyes.base_model(url) for url in self._options.engine_urls}
        except NoAnswer as error:
            raise Unusable(f"--engine-url: {error}") from error
        if len(set(found.values())) > 1:
            different = ", ".join(f"{url} serves {model}" for url, model in found.items())
            raise Unusable(f"--engine-url: one pool serves one base model, but {different}")
        return str(found[self._options.engine_urls[0]])

    async def _tell(self, story: Any, watch: Any) -> int:
        verdict = self.verdict = await self._steps(story, watch)
        if self._options.keep:
            watch.items = []
            self._screen.say(self._invitation())
            await asyncio.Event().wait()
        return verdict

    async def _steps(self, story: Any, watch: Any) -> int:
        from sidecar.cli.demo_check import StepFailed
        from sidecar.cli.demo_screen import diagnosis

        began, failures, steps = time.monotonic(), 0, story.steps()
        for number, step in enumerate(steps, 1):
            started = time.monotonic()
            self._screen.begin(number, step)
            try:
                seen = await story.run(step)
            except StepFailed as error:
                self._screen.failed(number)
                text = diagnosis(number, len(steps), step.title, time.monotonic() - started, error)
                if self._options.keep:
                    self._screen.say(text)
                else:
                    self._screen.close()
                    print(text, file=sys.stderr, flush=True)
                return FAILED
            failures += len(watch.tally.failures)
            self._screen.done(number, time.monotonic() - started, seen)
        self._screen.say(
            f"All {len(steps)} steps went well, in {time.monotonic() - began:.0f} s. Of {watch.requests} requests"
            f" {failures} failed, all of them to what had just been killed."
        )
        return OK

    def _invitation(self) -> str:
        pool, worker = self._pool, self._pool.present[0]
        item = self._cast.items[-1] if self._cast else None
        name, served = (item.name, item.served_name) if item else ("", "")
        body = f'{{"model": "{served}", "prompt": "Hello", "max_tokens": 8}}'
        lines = ["", "Everything runs on until Ctrl-C. The whole pool as a web page, from any of its agents:"]
        lines += [f"  {w.name}: http://{w.address}/   engine {w.engine_url}   {_pids(w)}" for w in pool.present]
        lines += [
            f"Manifests: {pool.manifests} (edit, add or delete files there)",
            "Try:",
            f"  lora-sidecar explain {name} --address {worker.address}",
            f"  curl -s {worker.engine_url}/v1/models",
            f"  curl -s {worker.engine_url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
            f"  sed -i 's/strategy: .*/strategy: all/; /percentage: /d' {pool.manifests}/{name}.yaml",
            f"  kill -9 {worker.agent.pid}",
        ]
        return "\n".join(lines)

    async def _unload_all(self) -> None:
        """Leave engines that aren't ours as they were; one that doesn't answer is left alone."""
        from sidecar.cli.demo_look import NoAnswer

        snapshot = await self._eyes.look(self._pool.workers)
        for worker in self._pool.workers:
            for name in snapshot.of(worker).served or ():
                with contextlib.suppress(NoAnswer):
                    await self._eyes.unload(worker.engine_url, name)


def _pids(worker: Any) -> str:
    return ", ".join(f"{child.what.rpartition(' ')[2]} {child.pid}" for child in worker.children())
