"""How the demo shows itself: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sidecar.cli.demo_check import StepFailed
from sidecar.cli.demo_look import Seen, Snapshot
from sidecar.cli.demo_plan import Item
from sidecar.cli.demo_pool import Pool, Worker
from sidecar.cli.demo_story import Step

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {
    "Loaded": "green",
    "Failed": "red",
    "Rejected": "red",
    "Draining": "yellow",
    "Waiting": "magenta",
}


class Screen(Protocol):
    """What the demo tells."""

    def begin(self, number: int, step: Step) -> None:
        """A step begins."""

    def done(self, number: int, seconds: float, seen: str) -> None:
        """It has ended well."""

    def failed(self, number: int) -> None:
        """It has not."""

    def show(self, snapshot: Snapshot, requests: int) -> None:
        """The pool as it is."""

    def say(self, text: str) -> None:
        """Lines that stay."""

    def close(self) -> None:
        """Leave the terminal as a program should."""


def make_screen(pool: Pool, steps: Sequence[Step], items: Sequence[Item], *, plain: bool) -> Screen:
    """The live table where it can be shown: on a terminal, and with rich."""
    if plain or not sys.stdout.isatty():
        return PlainScreen(len(steps))
    try:
        return LiveScreen(pool, steps, items)
    except ImportError:
        return PlainScreen(len(steps))


class PlainScreen:
    """A few lines for each step."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = time.monotonic()

    def begin(self, number: int, step: Step) -> None:
        """See Screen."""
        self.say(f"[{time.monotonic() - self._began:5.1f} s] {number}/{self._total} {step.title}: {step.why}")

    def done(self, number: int, seconds: float, seen: str) -> None:
        """See Screen."""
        self.say(f"          ok: {seen}")

    def failed(self, number: int) -> None:
        """See Screen."""
        self.say("          FAILED")

    def show(self, snapshot: Snapshot, requests: int) -> None:
        """See Screen: lines that scroll don't show it."""

    def say(self, text: str) -> None:
        """See Screen."""
        print(text, flush=True)

    def close(self) -> None:
        """See Screen."""


class LiveScreen:
    """Adapters x workers with their states, and the steps below. Refreshed by `show`: no thread of its own."""

    def __init__(self, pool: Pool, steps: Sequence[Step], items: Sequence[Item]) -> None:
        """Raises ImportError without rich."""
        from rich.live import Live

        self._pool, self._steps, self._items = pool, steps, items
        self._results: list[str] = []
        self._current, self._began = 0, time.monotonic()
        self._failed = False
        self._snapshot, self._requests = Snapshot(), 0
        self._live = Live(auto_refresh=False)
        self._live.start()

    def begin(self, number: int, step: Step) -> None:
        """See Screen."""
        self._current, self._began = number, time.monotonic()
        self._draw()

    def done(self, number: int, seconds: float, seen: str) -> None:
        """See Screen."""
        self._results.append(f"{seconds:4.1f} s  {seen}")
        self._current = 0
        self._draw()

    def failed(self, number: int) -> None:
        """See Screen."""
        self._failed = True
        self._draw()

    def show(self, snapshot: Snapshot, requests: int) -> None:
        """See Screen."""
        self._snapshot, self._requests = snapshot, requests
        self._draw()

    def say(self, text: str) -> None:
        """See Screen."""
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """See Screen."""
        self._live.stop()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.text import Text

        clients = Text(f"  {self._requests} requests to all adapters so far", style="dim")
        self._live.update(Group(self._table(), clients, *self._lines()), refresh=True)

    def _table(self) -> RenderableType:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("adapter", no_wrap=True)
        table.add_column("on", no_wrap=True)
        for worker in self._pool.workers:
            table.add_column(Text(worker.name, style=self._header(worker)), no_wrap=True, min_width=10)
        for item in self._items:
            table.add_row(item.name, item.wish, *(self._cell(self._snapshot.of(w), item) for w in self._pool.workers))
        return table

    def _header(self, worker: Worker) -> str:
        if not worker.present:
            return "dim strike" if worker in self._pool.first or self._current > 3 else "dim"
        seen = self._snapshot.of(worker)
        return "bold" if seen.record is not None and seen.served is not None else "bold red"

    @staticmethod
    def _cell(seen: Seen, item: Item) -> RenderableType:
        from rich.text import Text

        entry = seen.entry(item)
        if entry is None:
            return Text("·", style="dim")
        word = str(entry.state)
        mark = entry.revision.removeprefix("sha256:")[:4] if word == "Loaded" else ""
        return Text(f"{word} {mark}".rstrip(), style=_COLOURS.get(word, "cyan"))

    def _lines(self) -> list[RenderableType]:
        from rich.text import Text

        lines = []
        for number, step in enumerate(self._steps, 1):
            if number <= len(self._results):
                line = Text.assemble((" ✓ ", "green"), step.title, ("  " + self._results[number - 1], "dim"))
            elif number != self._current:
                line = Text(f"   {step.title}", style="dim")
            elif self._failed:
                line = Text(f" ✗ {step.title}", style="bold red")
            else:
                waited = time.monotonic() - self._began
                line = Text.assemble((" ▸ ", "cyan"), (step.title, "bold"), f"  {waited:4.1f} s  {step.why}")
            line.no_wrap, line.overflow = True, "ellipsis"
            lines.append(line)
        return list(lines)


def diagnosis(number: int, total: int, title: str, seconds: float, error: StepFailed) -> str:
    """What a person needs to know about a step that failed."""
    lines = [f"demo: step {number} of {total}, {title}, failed after {seconds:.1f} s", f"  expected: {error.expected}"]
    shown = error.seen[:12]
    lines += [f"  {'seen:    ' if i == 0 else '         '} {text}" for i, text in enumerate(shown)]
    if len(error.seen) > len(shown):
        lines.append(f"            and {len(error.seen) - len(shown)} more")
    for worker in error.logs[:3]:
        for child in worker.children():
            if tail := child.tail():
                lines += [f"  the end of {child.what}'s log:", *(f"    {line}" for line in tail)]
    return "\n".join(lines)
