"""One seed, one story: a pool, disturbances at random times, then quiet; the laws hold all the while."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from .disturbances import SMALL_SKEW, Disturbances
from .laws import Broken
from .loop import run

QUIET = 1500.0
GOOD = 8.0


class Story(Disturbances):
    """The course of one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.happened: Counter[str] = Counter()
        self.lasted = 0.0

    async def tell(self) -> None:
        """Build the pool, disturb it, wait for quiet, judge."""
        self._build()
        loop = asyncio.get_running_loop()
        watcher = loop.create_task(self.watch.run())
        await asyncio.sleep(15)
        under_way: list[asyncio.Task[None]] = []
        possible = self.possible()
        for _ in range(self.rng.randint(3, 12)):
            event = self.rng.choice(possible)
            self.watch.note(f"-- {event.__name__}")
            self.happened[event.__name__] += 1
            begun = asyncio.ensure_future(event())
            under_way.append(begun)
            if self.rng.random() < 0.7:
                await asyncio.wait([begun])
            await asyncio.sleep(self.rng.choice((0.2, 2.0, 10.0, 25.0)) * self.rng.random())
            self._judge(watcher)
        await asyncio.gather(*under_way)
        await self._heal()
        await self._converge(watcher)
        watcher.cancel()
        self.lasted = loop.time()

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
            if good_since is not None and loop.time() - good_since > GOOD:
                self.watch.checked["convergence"] += 1
                return
        raise Broken(f"not converged after {QUIET:.0f} s: " + "; ".join(wrong[:4]))

    def _build(self) -> None:
        rng, pool = self.rng, self.pool
        tight = rng.random() < 0.4
        count = rng.randint(2, 6)
        adapters = rng.randint(1, 10)
        for index in range(adapters):
            pool.adapter(f"{'big' if rng.random() < 0.2 else 'lora'}-{index}", self.distribution())
        capacity = max(1, adapters * 2 // count) if tight else 100
        version = rng.choice(("0.32.0",) * 4 + ("0.30.0",))
        # A slow origin keeps a new target waiting for longer than an old one drains.
        pool.origin.pace = rng.choice(((0.05, 3.0), (0.05, 3.0), (4.0, 12.0)))
        skewed = rng.random() < 0.3
        for _ in range(count):
            zone = rng.choice(("a", "b", ""))
            worker = pool.add_worker(zone=zone, capacity=capacity, version=version, start=False)
            worker.skew = rng.uniform(-SMALL_SKEW, SMALL_SKEW) if skewed else 0.0
            worker.start()

    async def _heal(self) -> None:
        """Whatever was disturbed is over; what is wrong with an adapter is mended by an edit, as a person would."""
        self.watch.note("-- heal")
        pool = self.pool
        pool.air.calm()
        pool.origin.out = False
        for worker in pool.workers.values():
            worker.keys = pool.keys
            worker.skew = 0.0
            worker.disk.full = False
            worker.backend.fresh = True
            worker.engine.hung = False
            worker.engine.refuses.clear()
            worker.engine.dies_of.clear()
            if not worker.engine.up:
                worker.engine.start()
            if worker.agent is None:
                worker.start()
            pool.cordon(worker.key, False)
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
