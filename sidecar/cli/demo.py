"""`lora-sidecar demo`: a whole pool on this machine, from the first worker to a deletion, checked from outside."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from sidecar.cli.demo_plan import MAX_WORKERS, Options, Unusable
from sidecar.cli.demo_stage import Stage

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
    parser.add_argument("--engine-api-key-file", metavar="FILE", help="a file with the engines' API key")
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
        "--patience", type=float, default=60.0, metavar="SECONDS", help="a step that takes longer has failed (60)"
    )


def run(args: argparse.Namespace) -> int:
    """0: every step went well. 1: one failed. 2: it could not begin. 130: interrupted."""
    try:
        return asyncio.run(_demo(options_from(args)))
    except Unusable as error:
        print(f"lora-sidecar demo: {error}", file=sys.stderr)
        return UNUSABLE


def options_from(args: argparse.Namespace) -> Options:
    """The options, checked. Raises Unusable."""
    urls = tuple(url.strip().rstrip("/") for url in (args.engine_url or "").split(",") if url.strip())
    _check_engines(args, urls)
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
        engine_api_key_file=args.engine_api_key_file or "",
        adapters=tuple(part.strip() for part in (args.adapters or "").split(",") if part.strip()),
        work_dir=args.work_dir or "",
        patience=args.patience,
    )


def _check_engines(args: argparse.Namespace, urls: tuple[str, ...]) -> None:
    if args.engine_url is None:
        if args.adapters or args.engine_api_key_file:
            flag = "--adapters" if args.adapters else "--engine-api-key-file"
            raise Unusable(f"{flag} goes with --engine-url; the stand-in engines need none")
        return
    if len(set(urls)) < 2 or len(set(urls)) < len(urls):
        raise Unusable("--engine-url: at least two different engines are needed: URL,URL; one of them joins later")
    if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
        raise Unusable(f"--engine-url: {wrong[0]!r} is no URL; for example http://127.0.0.1:8000")
    if args.workers is not None:
        raise Unusable("--workers and --engine-url exclude each other: there is a worker for each engine")
    if not args.adapters:
        raise Unusable("--adapters: with --engine-url name at least 3 adapters for the engines' base model")


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
    stage = Stage(options)
    try:
        return OK if await stage.play() else FAILED
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
        if stage.verdict is None:
            print("lora-sidecar demo: interrupted; ending everything", file=sys.stderr)
            return INTERRUPTED
        return OK if stage.verdict else FAILED
    finally:
        await stage.clear()
