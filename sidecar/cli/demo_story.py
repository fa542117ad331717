"""The story that the demo tells, step by step, each checked from outside."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sidecar.cli import demo_check as check
from sidecar.cli.demo_check import StepFailed, names
from sidecar.cli.demo_look import Answer, Eyes, NoAnswer, Snapshot
from sidecar.cli.demo_plan import Cast, Item, with_uri
from sidecar.cli.demo_pool import Pool, Worker
from sidecar.cli.demo_watch import Excuse, Watch

Check = Callable[[Snapshot], Sequence[str]]


@dataclass(frozen=True)
class Step:
    """One step. `run` returns what was seen."""

    title: str
    why: str
    run: Callable[[], Awaitable[str]]


class Story:
    """The steps, and what they have to remember of each other."""

    def __init__(self, pool: Pool, cast: Cast, eyes: Eyes, watch: Watch, patience: float) -> None:
        self.pool, self.cast = pool, cast
        self._eyes, self._watch, self._patience = eyes, watch, patience
        self.items = list(cast.items)
        self._members = list(pool.first)
        self._answers: dict[str, list[Answer]] = {}
        self._base = Answer("")
        self._victim = pool.first[0]
        # What the step that is under way breaks on purpose.
        self._excuse: Excuse | None = None

    def steps(self) -> list[Step]:
        """All of them, in order."""
        first, new, cast = self.pool.first, self.pool.newcomer, self.cast
        own = self.pool.own_engines
        engine = "a stand-in for vLLM" if own else "one of your engines"
        restart = "kill -9 an engine" if own else "an engine forgets its adapters"
        forgets = "the new process knows no adapters" if own else "unloaded behind the agent's back, as by a restart"
        return [
            Step(
                f"start {len(first)} worker{'s' * (len(first) > 1)}",
                f"{engine} and an agent each; no controller and no leader: every agent computes the same placement",
                self._start,
            ),
            Step(
                f"apply {len(cast.items)} adapters",
                "a manifest each; on all workers, on two, on 34 %; every agent knows which are its own",
                self._apply,
            ),
            Step(
                f"{new.name} joins",
                "it takes its share and nothing else moves; an old copy goes when the new one is loaded, not before",
                self._join,
            ),
            Step(
                "kill -9 a worker" if own else "kill -9 an agent",
                "nobody is told: the others miss it, and load what it held from the origin",
                self._kill,
            ),
            Step(
                "it comes back",
                "its adapters move home from files that it still has, again make before break",
                self._return,
            ),
            Step(
                restart,
                f"{forgets}; its agent loads them again without fetching a byte",
                self._restart,
            ),
            Step(
                f"update {cast.updated.name}",
                "new weights behind a changed URI: one worker at a time, while the other goes on serving",
                self._update,
            ),
            Step(
                "delete an adapter",
                "unloaded everywhere; its files stay, because vLLM may read them long after the unload",
                self._delete,
            ),
        ]

    async def run(self, step: Step) -> str:
        """One step with all its checks; returns what was seen. Raises StepFailed."""
        tally = self._watch.begin()
        self._excuse = None
        seen = await step.run()
        await self._watch.fresh()
        await self._watch.landed()
        if faults := tally.faults(self._excuse):
            but = f", but for what only {self._excuse.worker} had" if self._excuse else ""
            expected = f"no request fails and every adapter is served at any moment{but}"
            raise StepFailed(expected, faults, self._named(faults))
        if self.pool.own_engines and (wrong := check.unlike(tally.answers, self._answers)):
            raise StepFailed("every adapter answers with its own weights", wrong)
        return seen

    # The steps

    async def _start(self) -> str:
        for worker in self.pool.first:
            worker.start()
        for worker in self.pool.first:
            await self._until_ready(worker)
        await self._until(self._strangers, "every agent hears every other one")
        return "every agent hears the others, its engine answers, /readyz says 200"

    async def _apply(self) -> str:
        self._base = await self._ask(self.pool.first[0], self.pool.base_model)
        for item in self.items:
            self.pool.apply(item)
        seconds = await self._until_placed("every adapter is on exactly the workers that placement says")
        self._check_distinct()
        placed = {item.name: len(self._targets()[item.key]) for item in self.items}
        counts = ", ".join(f"{name} on {number}" for name, number in placed.items() if number)
        waiting = ", ".join(name for name, number in placed.items() if not number)
        without = f"; without room: {waiting}" if waiting else ""
        return f"after {seconds:.1f} s {counts}{without}; each answers unlike the base model"

    async def _join(self) -> str:
        new = self.pool.newcomer
        before = await self._holders()
        self._members.append(new)
        new.start()
        seconds = await self._until_placed(f"{new.name} serves its share, and who gave something up has unloaded it")
        after = await self._holders()
        if self._roomy and (strays := check.moves_beyond(before, after, new.name)):
            raise StepFailed(f"only {new.name} takes over or is given anything", strays)
        moved = [f"{n} from {names(before[n] - after[n])}" for n in after if before[n] - after[n]]
        share = sum(new.name in holders for holders in after.values())
        return f"after {seconds:.1f} s it serves {share}; moved: {', '.join(moved) or 'nothing'}; no request failed"

    async def _kill(self) -> str:
        held = await self._holders()
        self._victim = max(self.pool.first, key=lambda w: self._loss(held, w.name))
        self._break(self._victim, held)
        self._victim.kill()
        seconds = await self._until_placed(f"what {self._victim.name} held is loaded elsewhere")
        gaps = [f"{name} {gap:.1f} s" for name, gap in sorted(self._watch.tally.gaps.items())]
        silent = "unserved meanwhile" if self.pool.own_engines else "meanwhile no agent spoke for"
        without = f"{silent}: {', '.join(gaps)}" if gaps else "every adapter had another copy meanwhile"
        room = "" if self._roomy else " as far as there is room"
        return f"what {self._victim.name} held is elsewhere{room} after {seconds:.1f} s; {without}"

    async def _return(self) -> str:
        worker = self._victim
        worker.start()
        seconds = await self._until_placed(
            f"{worker.name} serves again what it did, and the stand-ins have unloaded it"
        )
        fetches, size = await self._received(worker)
        if size:
            raise StepFailed("its files are still there", [f"{worker.name} fetched {size} bytes in {fetches} fetches"])
        return f"all is home after {seconds:.1f} s, {worker.name} fetched 0 bytes; no request failed"

    async def _restart(self) -> str:
        held = await self._holders()
        others = [w for w in self.pool.present if w is not self._victim]
        worker = max(others, key=lambda w: sum(w.name in holders for holders in held.values()))
        before = await self._received(worker)
        mine = [item for item in self.items if worker.name in held[item.name]]
        self._break(worker, held)
        await self._forget(worker, mine)
        await self._until(lambda s: [] if s.of(worker).served is not None else ["not yet"], "the engine answers again")
        seconds = await self._until_placed(f"{worker.name}'s engine serves again all that it did")
        after = await self._received(worker)
        if after != before:
            seen = f"{worker.name} made {after[0] - before[0]} fetches, {after[1] - before[1]} bytes"
            raise StepFailed("nothing is fetched again", [seen], [worker])
        plural = "s" * (len(mine) > 1)
        return f"{worker.name} has its {len(mine)} adapter{plural} again after {seconds:.1f} s; 0 bytes fetched"

    async def _update(self) -> str:
        old = self.cast.updated
        item = with_uri(old, self.cast.new_uri)
        was = (await self._watch.fresh()).of
        holders = [w for w in self.pool.present if was(w).serves(item)]
        roots = {w.name: (was(w).served or {})[item.served_name] for w in holders}
        self._watch.law = lambda s: _rolling(s, item, holders)
        self.items = [item if i is old else i for i in self.items]
        self.pool.apply(item)
        seconds = await self._until(lambda s: _old_roots(s, item, roots), f"{item.name} has a new path on each worker")
        await self._until_placed(f"{item.name} is loaded where it was")
        self._watch.law = None
        answers = [await self._ask(w, item.served_name) for w in holders]
        before = self._answers[item.name][0]
        if stale := [w.name for w, a in zip(holders, answers, strict=True) if not a.differs(before)]:
            raise StepFailed(f"{item.name} answers with its new weights", [f"{names(stale)}: the old answer"], holders)
        self._answers[item.name].append(answers[0])
        return f"on {names(roots)} after {seconds:.1f} s, one after the other; the answer is new; no request failed"

    async def _delete(self) -> str:
        snapshot = await self._watch.fresh()
        item = next(i for i in self.items if snapshot.holders(i))
        holders = [w for w in self.pool.present if snapshot.of(w).serves(item)]
        roots = {w.name: Path((snapshot.of(w).served or {})[item.served_name]) for w in holders}
        self.items = [i for i in self.items if i is not item]
        self._watch.items = [i for i in self._watch.items if i.name != item.name]
        self.pool.delete(item)
        seconds = await self._until(lambda s: _left(s, item, holders), f"no engine serves {item.name}")
        for worker in holders:
            await self._expect_unknown(worker, item)
        if lost := [f"{name}: {path} is gone" for name, path in roots.items() if not any(path.iterdir())]:
            raise StepFailed("the files stay", lost)
        await self._until_placed("the other adapters stay where they are")
        return f"{item.name} left all {len(holders)} after {seconds:.1f} s; a request gets 404, its files stay"

    # Waiting and asking

    async def _until(self, complaints: Check, expected: str) -> float:
        """Wait until a snapshot gives no complaints; seconds. Raises StepFailed with the last ones."""
        began = time.monotonic()
        while True:
            snapshot = await self._watch.fresh()
            seen = complaints(snapshot)
            if not seen:
                return snapshot.began - began
            if fates := self.pool.fates():
                raise StepFailed(expected, fates, self._named(fates))
            if time.monotonic() - began > self._patience:
                raise StepFailed(f"{expected}, within {self._patience:g} s", seen, self._named(seen))

    async def _until_placed(self, expected: str) -> float:
        """Wait until engines and agents agree with placement and with the plain counts; then clients follow."""
        wanted, members = self._targets(), len(self._members)

        def complaints(snapshot: Snapshot) -> list[str]:
            present = self.pool.present
            wrong = check.misplaced(snapshot, self.items, present, wanted)
            if self._roomy and not wrong:
                wrong = check.miscounted(snapshot, self.items, members, len(present))
            return wrong

        seconds = await self._until(complaints, expected)
        for item in self.items:
            if wanted[item.key] and item.name not in self._answers:
                await self._learn(item)
        self._watch.items = [item for item in self.items if wanted[item.key]]
        return seconds

    async def _until_ready(self, worker: Worker) -> None:
        deadline = time.monotonic() + self._patience
        while reason := await self._eyes.ready(worker):
            if fates := self.pool.fates():
                raise StepFailed(f"{worker.name} gets ready", fates, self._named(fates))
            if time.monotonic() > deadline:
                raise StepFailed(f"{worker.name} is ready within {self._patience:g} s", [reason], [worker])
            await asyncio.sleep(0.1)

    async def _learn(self, item: Item) -> None:
        """What the adapter answers, on each worker that holds it."""
        holders = [w for w in self.pool.present if w.name in self._targets()[item.key]]
        answers = [await self._ask(worker, item.served_name) for worker in holders]
        if same := [w.name for w, a in zip(holders, answers, strict=True) if not a.differs(self._base)]:
            raise StepFailed(f"{item.name} answers unlike the base model", [f"{names(same)}: the same answer"], holders)
        self._answers[item.name] = answers[:1]

    def _check_distinct(self) -> None:
        known = {name: own[0] for name, own in self._answers.items()}
        same = [
            f"{a} and {b} answer the same" for a in known for b in known if a < b and not known[a].differs(known[b])
        ]
        if same and self.pool.own_engines:
            raise StepFailed("different adapters answer differently", same)

    async def _ask(self, worker: Worker, model: str) -> Answer:
        try:
            return await self._eyes.complete(worker.engine_url, model)
        except NoAnswer as error:
            raise StepFailed(f"{worker.name}'s engine answers for {model}", [str(error)], [worker]) from error

    async def _expect_unknown(self, worker: Worker, item: Item) -> None:
        try:
            await self._eyes.complete(worker.engine_url, item.served_name)
        except NoAnswer as error:
            if error.status == 404:
                return
            raise StepFailed(f"{worker.name}'s engine answers 404 for {item.name}", [str(error)], [worker]) from error
        raise StepFailed(f"{worker.name}'s engine answers 404 for {item.name}", ["it still answers"], [worker])

    async def _received(self, worker: Worker) -> tuple[int, int]:
        try:
            return await self._eyes.received(worker)
        except NoAnswer as error:
            raise StepFailed(f"{worker.name}'s agent tells its metrics", [str(error)], [worker]) from error

    async def _forget(self, worker: Worker, items: Sequence[Item]) -> None:
        """Make the engine forget its adapters: by a kill and a new start if it is ours, else by its own API."""
        if worker.engine is not None:
            worker.engine.kill()
            worker.engine.start()
            return
        for item in items:
            try:
                await self._eyes.unload(worker.engine_url, item.served_name)
            except NoAnswer as error:
                raise StepFailed(f"{worker.name}'s engine unloads {item.name}", [str(error)], [worker]) from error

    async def _holders(self) -> dict[str, frozenset[str]]:
        snapshot = await self._watch.fresh()
        return {item.name: snapshot.holders(item) for item in self.items}

    def _strangers(self, snapshot: Snapshot) -> list[str]:
        silent = [w.name for w in self.pool.present if snapshot.of(w).record is None]
        return [f"{name}: its agent does not answer" for name in silent]

    def _targets(self) -> check.Targets:
        return check.targets(self.items, self._members, self.pool.base_model, self.pool.capacity)

    @property
    def _roomy(self) -> bool:
        """Whether every worker can hold everything: then the plain counts and the least moves hold."""
        return self.pool.capacity >= len(self.cast.items)

    def _break(self, worker: Worker, held: dict[str, frozenset[str]]) -> None:
        """Excuse failures there, and gaps of adapters that nobody else holds or, without it, has room for."""
        left = check.targets(self.items, self._members, self.pool.base_model, self.pool.capacity, without=worker)
        alone = {name for name, holders in held.items() if holders == {worker.name}}
        self._excuse = Excuse(worker.name, frozenset(alone | {i.name for i in self.items if not left[i.key]}))

    def _loss(self, held: dict[str, frozenset[str]], name: str) -> tuple[int, int]:
        """How telling this worker's death is: adapters with no other copy, then those of few."""
        alone = sum(holders == {name} for holders in held.values())
        few = sum(name in h and len(h) < len(self._members) for h in held.values())
        return min(alone, 1), few

    def _named(self, lines: Sequence[str]) -> list[Worker]:
        said = set(re.findall(r"worker-\d+", "\n".join(lines)))
        return [w for w in self.pool.workers if w.name in said]


def _rolling(snapshot: Snapshot, item: Item, holders: Sequence[Worker]) -> list[str]:
    away = [w.name for w in holders if not snapshot.of(w).says_loaded(item)]
    return [f"{item.name}: {names(away)} change over at the same time"] if len(away) > 1 else []


def _old_roots(snapshot: Snapshot, item: Item, roots: dict[str, str]) -> list[str]:
    found = []
    for name, old in roots.items():
        seen = snapshot.seen.get(name)
        now = (seen.served or {}).get(item.served_name) if seen else None
        if now in (None, old):
            entry = seen.entry(item) if seen else None
            said = f"{entry.state} {entry.message}".strip() if entry else "nothing"
            found.append(f"{name}: {'the old content' if now else 'no content'} is loaded; its agent says {said}")
    return found


def _left(snapshot: Snapshot, item: Item, holders: Sequence[Worker]) -> list[str]:
    return [f"{w.name}: its engine still serves {item.name}" for w in holders if snapshot.of(w).serves(item)]
