"""One seed, one story: a pool, disturbances at random times, then quiet; the laws hold all the while."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from sidecar.model import Distribution

from .laws import Broken, Watcher
from .loop import run
from .pool import SimPool
from .world import revision

QUIET = 1500.0


class Story:
    """The disturbances of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = SimPool(self.rng)
        self.watch = Watcher(self.pool)
        self.planned_only = self.rng.random() < 0.4
        self.versions = 0

    async def tell(self) -> None:
        """Build the pool, disturb it, wait for quiet, judge."""
        self._build()
        watcher = asyncio.get_running_loop().create_task(self.watch.run())
        await asyncio.sleep(30)
        for _ in range(self.rng.randint(3, 12)):
            await self._disturb()
            await asyncio.sleep(self.rng.choice((0.2, 2.0, 10.0, 40.0)) * self.rng.random())
            self._judge(watcher)
        await self._heal()
        await self._converge(watcher)
        watcher.cancel()

    def _judge(self, watcher: asyncio.Task[None]) -> None:
        if watcher.done():
            watcher.result()
        if self.watch.faults:
            raise Broken("; ".join(self.watch.faults))

    async def _converge(self, watcher: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + QUIET
        wrong = ["not looked yet"]
        good_since: float | None = None
        while loop.time() < end:
            await asyncio.sleep(2.0)
            self._judge(watcher)
            wrong = self.watch.settled()
            good_since = None if wrong else good_since or loop.time()
            if good_since is not None and loop.time() - good_since > 20.0:
                return
        raise Broken(f"not converged after {QUIET:.0f} s: " + "; ".join(wrong[:4]))

    def _build(self) -> None:
        rng, pool = self.rng, self.pool
        tight = rng.random() < 0.4
        count = rng.randint(2, 6)
        adapters = rng.randint(1, 10)
        for index in range(adapters):
            pool.adapter(f"{'big' if rng.random() < 0.2 else 'lora'}-{index}", self._distribution())
        capacity = max(1, adapters * 2 // count) if tight else 100
        version = rng.choice(("0.32.0", "0.32.0", "0.30.0"))
        for _ in range(count):
            pool.add_worker(zone=rng.choice(("a", "b", "")), capacity=capacity, version=version)

    def _distribution(self) -> Distribution:
        rng = self.rng
        kind = rng.choice(("all", "fixed", "fixed", "percentage"))
        if kind == "fixed":
            return Distribution(strategy="fixed", replicas=rng.randint(1, 3))
        if kind == "percentage":
            return Distribution(strategy="percentage", percentage=rng.choice((10, 34, 50, 100)))
        return Distribution()

    async def _disturb(self) -> None:
        planned: list[Callable[[], Awaitable[None]]] = [
            self.restart_agent, self.edit, self.update, self.join,
            self.cordon, self.delete, self.stale_lists, self.origin_out,
        ]  # fmt: skip
        sudden: list[Callable[[], Awaitable[None]]] = [
            self.kill_engine, self.cut, self.kill_worker, self.hang, self.refuse, self.poison, self.spoil,
        ]  # fmt: skip
        event = self.rng.choice(planned if self.planned_only else planned + sudden)
        self.watch.note(f"-- {event.__name__}")
        await event()

    def _any(self) -> str:
        return self.rng.choice(list(self.pool.workers))

    async def restart_agent(self) -> None:
        worker = self.pool.workers[self._any()]
        await worker.kill_agent()
        await asyncio.sleep(self.rng.choice((0.1, 2.0, 8.0)))
        worker.start()

    async def edit(self) -> None:
        adapter = self.pool.adapters.get(self.rng.choice(list(self.pool.adapters) or [""]))
        if adapter is not None:
            self.pool.adapter(
                adapter.name, self._distribution(), source=adapter.source, created=adapter.created,
                priority=self.rng.choice((0, 0, 5)),
            )  # fmt: skip
            await self.pool.publish_late(self.rng.choice((0.1, 3.0)))

    async def update(self) -> None:
        if self.pool.adapters:
            key = self.rng.choice(list(self.pool.adapters))
            self.versions += 1
            self.pool.update(key, f"{key}-v{self.versions}")
            await self.pool.publish_late(self.rng.choice((0.1, 3.0)))

    async def join(self) -> None:
        if len(self.pool.workers) < 8:
            first = next(iter(self.pool.workers.values()))
            self.pool.add_worker(self.rng.choice(("a", "b")), first.capacity, first.engine.version)

    async def cordon(self) -> None:
        name = self._any()
        self.pool.cordon(name, not self.pool.workers[name].backend.steering.cordoned)

    async def delete(self) -> None:
        if len(self.pool.adapters) > 1:
            del self.pool.adapters[self.rng.choice(list(self.pool.adapters))]
            await self.pool.publish_late(self.rng.choice((0.1, 3.0)))

    async def stale_lists(self) -> None:
        worker = self.pool.workers[self._any()]
        worker.backend.fresh = False
        await asyncio.sleep(self.rng.uniform(1, 20))
        worker.backend.fresh = True
        self.pool.publish()

    async def origin_out(self) -> None:
        self.pool.origin.out = True
        await asyncio.sleep(self.rng.uniform(1, 20))
        self.pool.origin.out = False

    async def kill_engine(self) -> None:
        self.watch.excuse(120)
        engine = self.pool.workers[self._any()].engine
        engine.kill()
        await asyncio.sleep(self.rng.choice((0.1, 3.0, 20.0)))
        engine.start()

    async def cut(self) -> None:
        self.watch.excuse(120)
        names = list(self.pool.workers)
        side = set(self.rng.sample(names, self.rng.randint(1, max(1, len(names) // 2))))
        pairs = {(a, b) for a in names for b in names if (a in side) != (b in side)}
        self.pool.network.cut |= pairs
        await asyncio.sleep(self.rng.choice((2.0, 10.0, 60.0)))
        self.pool.network.cut -= pairs

    async def kill_worker(self) -> None:
        if len(self.pool.workers) > 1:
            self.watch.excuse(120)
            await self.pool.remove_worker(self._any())

    async def hang(self) -> None:
        self.watch.excuse(120)
        engine = self.pool.workers[self._any()].engine
        engine.hung = True
        await asyncio.sleep(self.rng.uniform(1, 30))
        engine.hung = False

    async def refuse(self) -> None:
        """One engine will not take one adapter's next content."""
        key = self.rng.choice(list(self.pool.adapters))
        content = f"{key}-v{self.versions + 1}"
        self._condemn(self.pool.workers[self._any()].engine.refuses, content)
        await self.update()

    async def poison(self) -> None:
        self.watch.excuse(900)
        key = self.rng.choice(list(self.pool.adapters))
        worker = self.pool.workers[self._any()]
        self.versions += 1
        content = f"{key}-v{self.versions}"
        self._condemn(worker.engine.dies_of, content)
        self.pool.update(key, content)
        self.pool.publish()
        for _ in range(4):
            await asyncio.sleep(10)
            if not worker.engine.up:
                worker.engine.start()

    async def spoil(self) -> None:
        """New content that is no adapter at all."""
        key = self.rng.choice(list(self.pool.adapters))
        self.versions += 1
        content = f"{key}-v{self.versions}"
        self.pool.origin.bad.add(content)
        self.pool.update(key, content)
        await self.pool.publish_late(1.0)

    @staticmethod
    def _condemn(paths: set[str], content: str) -> None:
        paths.add(f"/adapters/revisions/{revision(content).removeprefix('sha256:')}")

    async def _heal(self) -> None:
        """Whatever was disturbed is over; what is wrong with an adapter is mended by an edit, as a person would."""
        self.watch.note("-- heal")
        pool = self.pool
        pool.network.cut.clear()
        pool.origin.out = False
        for worker in pool.workers.values():
            worker.backend.fresh = True
            worker.engine.hung = False
            worker.engine.refuses.clear()
            worker.engine.dies_of.clear()
            if not worker.engine.up:
                worker.engine.start()
            if worker.agent is None:
                worker.start()
            pool.cordon(worker.name, False)
        for key, adapter in list(pool.adapters.items()):
            content = pool.origin.contents[adapter.source.uri]
            if content in pool.origin.bad or not self.planned_only:
                self.versions += 1
                pool.update(key, f"{key}-healed{self.versions}")
        pool.publish()
        await self._restart_stale_engines()

    async def _restart_stale_engines(self) -> None:
        """What the message of a held update asks for, one engine after the other."""
        for worker in list(self.pool.workers.values()):
            if worker.engine.version == "0.30.0":
                await asyncio.sleep(70)  # an engine that ends sooner after a load counts as killed by it
                self.watch.excuse(90)  # held back everywhere, it is served again by the next that is restarted
                worker.engine.kill()
                worker.engine.start()


def tell(seed: int) -> Story:
    """Run one seed to its end. Raises Broken, with the seed and what led to it."""
    story = Story(seed)
    try:
        run(story.tell())
    except BaseException as error:
        with contextlib.suppress(Exception):
            error.add_note(f"seed {seed}\n" + "\n".join(story.watch.log[-60:]))
        raise
    return story
