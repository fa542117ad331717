"""One run of the demo: sets up what the story needs, tells it, and clears everything away again."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from sidecar.cli.demo_check import StepFailed
from sidecar.cli.demo_look import Eyes, NoAnswer
from sidecar.cli.demo_plan import BASE, Cast, Options, Unusable, as_adapter, generated, given
from sidecar.cli.demo_pool import Pool, Worker
from sidecar.cli.demo_screen import Screen, diagnosis, make_screen
from sidecar.cli.demo_story import Story
from sidecar.cli.demo_watch import Watch
from sidecar.edges.filesystem import FileSystem, remove_tree

_LEFT_OUT = "none is killed or restarted, agents are; at the end its adapters are unloaded from them"


class Stage:
    """`play`, then `clear`, whatever happened. `verdict` is the story's result once it is over."""

    def __init__(self, options: Options) -> None:
        self.verdict: bool | None = None
        self._options = options
        self._root: Path | None = None
        self._session: aiohttp.ClientSession | None = None
        self._eyes: Eyes | None = None
        self._pool: Pool | None = None
        self._screen: Screen | None = None

    async def play(self) -> bool:
        """The story, and with --keep what comes after. Raises Unusable."""
        options = self._options
        self._session = aiohttp.ClientSession(headers=_authorization(options.engine_api_key_file))
        eyes = self._eyes = Eyes(self._session)
        base = await _base_model(eyes, options.engine_urls)
        root = self._make_root()
        cast = given(options.adapters) if options.adapters else generated(root / "origin")
        for item in cast.items:
            as_adapter(item, base)
        try:
            pool = self._pool = Pool(root, options, base, options.capacity or len(cast.items) + 1)
        except OSError as error:
            raise Unusable(str(error)) from error
        watch = Watch(pool, eyes)
        story = Story(pool, cast, eyes, watch, options.patience)
        screen = self._screen = make_screen(pool, story.steps(), cast.items, plain=options.plain)
        watch.shown = screen.show
        if options.engine_urls:
            screen.say(
                f"On {len(options.engine_urls)} engines that serve {base}. They are not the demo's: {_LEFT_OUT}."
            )
        watching = asyncio.create_task(watch.run())
        telling = asyncio.create_task(self._tell(story, watch, screen, _invitation(pool, cast)))
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
            if self._eyes is not None and not self._pool.own_engines:
                await _unload_all(self._pool, self._eyes)
        if self._session is not None:
            await self._session.close()
        if self._root is not None:
            remove_tree(FileSystem(), self._root)

    def _make_root(self) -> Path:
        try:
            place = tempfile.mkdtemp(prefix="lora-sidecar-demo-", dir=self._options.work_dir or None)
            self._root = Path(place).resolve()
            self._root.chmod(0o755)  # engines may run as another user
        except OSError as error:
            raise Unusable(f"no directory for the demo can be made: {error}; choose another --work-dir") from error
        return self._root

    async def _tell(self, story: Story, watch: Watch, screen: Screen, invitation: list[str]) -> bool:
        verdict = self.verdict = await self._steps(story, watch, screen)
        if self._options.keep:
            watch.items = []
            screen.say("\n".join(invitation + _processes(story.pool)))
            await asyncio.Event().wait()
        return verdict

    async def _steps(self, story: Story, watch: Watch, screen: Screen) -> bool:
        began, steps = time.monotonic(), story.steps()
        for number, step in enumerate(steps, 1):
            started = time.monotonic()
            screen.begin(number, step)
            try:
                seen = await story.run(step)
            except StepFailed as error:
                screen.failed(number)
                self._end(screen)
                text = diagnosis(number, len(steps), step.title, time.monotonic() - started, error)
                print(text, file=sys.stderr, flush=True)
                return False
            screen.done(number, time.monotonic() - started, seen)
        self._end(screen)
        seconds = time.monotonic() - began
        print(f"All {len(steps)} steps went well, in {seconds:.0f} s. {watch.total.summary()}", flush=True)
        return True

    def _end(self, screen: Screen) -> None:
        """Leave the terminal to what is printed last; with --keep the table goes on below that."""
        if not self._options.keep:
            screen.close()


def _authorization(path: str) -> dict[str, str]:
    if not path:
        return {}
    try:
        key = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"--engine-api-key-file: {path} can't be read: {error}") from error
    return {"Authorization": f"Bearer {key}"}


async def _base_model(eyes: Eyes, urls: tuple[str, ...]) -> str:
    """What the engines serve. Raises Unusable if they don't answer, or not alike."""
    if not urls:
        return BASE
    try:
        found = {url: await eyes.base_model(url) for url in urls}
    except NoAnswer as error:
        raise Unusable(f"--engine-url: {error}") from error
    if len(set(found.values())) > 1:
        different = ", ".join(f"{url} serves {model}" for url, model in found.items())
        raise Unusable(f"--engine-url: one pool serves one base model, but {different}")
    return found[urls[0]]


async def _unload_all(pool: Pool, eyes: Eyes) -> None:
    """Leave engines that aren't ours as they were; one that doesn't answer is left alone."""
    snapshot = await eyes.look(pool.workers)
    for worker in pool.workers:
        for name in snapshot.of(worker).served or ():
            with contextlib.suppress(NoAnswer):
                await eyes.unload(worker.engine_url, name)


def _invitation(pool: Pool, cast: Cast) -> list[str]:
    item, worker = cast.items[-1], pool.first[-1]
    path = shlex.quote(str(pool.manifests / f"{item.name}.yaml"))
    body = f'{{"model": "{item.served_name}", "prompt": "Hello", "max_tokens": 8}}'
    return [
        "",
        "Everything runs on until Ctrl-C.",
        f"Manifests: {pool.manifests} (edit, add or delete files there)",
        "Try:",
        f"  lora-sidecar explain {item.name} --address {worker.address}",
        f"  sed -i 's/strategy: .*/strategy: all/; /percentage: /d' {path}",
        f"  curl -s {worker.engine_url}/v1/models",
        f"  curl -s {worker.engine_url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        "The whole pool as a web page, from any of its agents (kill -9 one):",
    ]


def _processes(pool: Pool) -> list[str]:
    return [f"  {w.name}: http://{w.address}/  {_pids(w)}  its engine: {w.engine_url}" for w in pool.present]


def _pids(worker: Worker) -> str:
    return ", ".join(f"{child.what.rpartition(' ')[2]} {child.pid}" for child in worker.children())
