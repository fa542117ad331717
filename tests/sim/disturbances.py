"""What happens to a pool: each method is one thing that goes wrong, or that people do, from its begin to its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from sidecar.core.keyring import Keyring, make_key
from sidecar.model import Distribution

from .laws import Watcher
from .pool import Kind, SimPool, SimWorker
from .world import DIRECTORY, revision

Disturbance = Callable[[], Awaitable[None]]

MOST_WORKERS = 8
# Clocks that differ by less than this are no trouble; the wire's window is 300 s.
SMALL_SKEW = 120.0


class Disturbances:
    """A pool by seed, and all that can happen to it. Planned things may cost no service at all, sudden ones some."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.planned_only = rng.random() < 0.4
        kind: Kind = rng.choice(("gossip",) * 10 + ("mixed",) * 3 + ("asked",) * 7)
        self.pool = SimPool(rng, kind, by_uid=rng.random() < 0.6)
        self.watch = Watcher(self.pool)
        self.views = self.watch.views
        self.versions = 0
        self.rotating = False

    def possible(self) -> list[Disturbance]:
        """What may happen in this story."""
        found: list[Disturbance] = [
            self.restart_agent, self.edit, self.update, self.join, self.cordon, self.delete,
            self.stale_lists, self.api_outage, self.origin_out, self.full_disk, self.weather,
        ]  # fmt: skip
        if self.pool.kind != "asked":
            found += [self.rotate_keys, self.no_datagrams]
        if not self.planned_only:
            found += [
                self.kill_engine, self.cut, self.cut_one_way, self.kill_worker, self.hang, self.refuse, self.poison,
                self.spoil, self.freeze, self.clock_jump, self.same_name, self.same_address,
            ]  # fmt: skip
            if not self.pool.by_uid:
                found.append(self.clone)
        return found

    def distribution(self) -> Distribution:
        """How many workers an adapter wants."""
        rng = self.rng
        kind = rng.choice(("all", "fixed", "fixed", "percentage"))
        if kind == "fixed":
            return Distribution(strategy="fixed", replicas=rng.randint(1, 3))
        # Without a platform a dead worker counts among the members for ten minutes, and so in the percentage.
        if kind == "percentage" and self.pool.by_uid:
            return Distribution(strategy="percentage", percentage=rng.choice((10, 34, 50, 100)))
        return Distribution()

    def any(self) -> SimWorker:
        """One of the workers whose name is their own."""
        return self.rng.choice([w for w in self.pool.workers.values() if "~" not in w.key])

    def there(self, worker: SimWorker) -> bool:
        """Whether it is still in the pool."""
        return self.pool.workers.get(worker.key) is worker

    # Planned

    async def restart_agent(self) -> None:
        worker = self.any()
        await worker.kill_agent()
        await asyncio.sleep(self.rng.choice((0.1, 2.0, 8.0)))
        for _ in range(20):  # what can't start is started again and again
            if not self.there(worker) or worker.agent is not None or worker.start():
                break
            await asyncio.sleep(5.0)

    async def edit(self) -> None:
        adapter = self.pool.adapters.get(self.rng.choice(list(self.pool.adapters) or [""]))
        if adapter is not None:
            self.pool.adapter(
                adapter.name, self.distribution(), source=adapter.source, created=adapter.created,
                priority=self.rng.choice((0, 0, 5)),
            )  # fmt: skip
            await self.pool.publish_late(self.rng.choice((0.1, 3.0)))

    async def update(self) -> None:
        if self.pool.adapters:
            key = self.rng.choice(list(self.pool.adapters))
            self.pool.update(key, self.next_content(key))
            await self.pool.publish_late(self.rng.choice((0.1, 3.0)))

    def next_content(self, key: str) -> str:
        """Content that was never seen before."""
        self.versions += 1
        return f"{key}-v{self.versions}"

    async def join(self) -> None:
        if len(self.pool.workers) < MOST_WORKERS:
            first = next(iter(self.pool.workers.values()))
            self.pool.add_worker(self.rng.choice(("a", "b")), first.capacity, first.engine.version)

    async def cordon(self) -> None:
        worker = self.any()
        self.pool.cordon(worker.key, not worker.backend.steering.cordoned)

    async def delete(self) -> None:
        if len(self.pool.adapters) > 1:
            del self.pool.adapters[self.rng.choice(list(self.pool.adapters))]
            await self.pool.publish_late(self.rng.choice((0.1, 3.0)))

    async def stale_lists(self) -> None:
        await self._stale([self.any()], self.rng.uniform(1, 20))

    async def api_outage(self) -> None:
        await self._stale(list(self.pool.workers.values()), self.rng.uniform(1, 30))

    async def _stale(self, workers: list[SimWorker], seconds: float) -> None:
        for worker in workers:
            worker.backend.fresh = False
        await asyncio.sleep(seconds)
        for worker in workers:
            worker.backend.fresh = True
        self.pool.publish()

    async def origin_out(self) -> None:
        self.pool.origin.out = True
        await asyncio.sleep(self.rng.uniform(1, 20))
        self.pool.origin.out = False

    async def full_disk(self) -> None:
        disk = self.any().disk
        disk.full = True
        await asyncio.sleep(self.rng.uniform(1, 25))
        disk.full = False

    async def weather(self) -> None:
        """A bad network, but not so bad that anybody would have to be taken for dead."""
        air, rng = self.pool.air, self.rng
        air.loss, air.duplicate = rng.uniform(0, 0.25), rng.choice((0.0, 0.3))
        air.delay = rng.choice(((0.0005, 0.005), (0.01, 0.05), (0.001, 0.2)))
        await asyncio.sleep(rng.uniform(5, 25))
        air.loss, air.duplicate, air.delay = 0.0, 0.0, (0.0005, 0.005)

    async def no_datagrams(self) -> None:
        """A NetworkPolicy that lets only TCP pass, to all or to some."""
        everyone = [w.address for w in self.pool.workers.values()]
        some = set(self.rng.sample(everyone, self.rng.choice((1, len(everyone)))))
        self.pool.air.deaf |= some
        await asyncio.sleep(self.rng.choice((5.0, 25.0)))
        self.pool.air.deaf -= some

    async def rotate_keys(self) -> None:
        """As the manual says: the new key behind the old one, then first, then alone; each when all have read it."""
        if self.rotating:
            return
        self.rotating = True
        old = self.pool.keys.keys[0]
        new = make_key(f"key number {self.rng.random()} of the pool")
        for keys in ((old, new), (new, old), (new,)):
            self.pool.keys = Keyring(keys)
            for worker in self.rng.sample(list(self.pool.workers.values()), len(self.pool.workers)):
                worker.keys = self.pool.keys
                await asyncio.sleep(self.rng.uniform(0, 1))
            # An agent that is stopped reads its file when it runs again.
            await asyncio.sleep(3.0 + 22.0 * any(w.process.frozen for w in self.pool.workers.values()))
        self.rotating = False

    # Sudden

    async def kill_engine(self) -> None:
        self.watch.excuse(120)
        engine = self.any().engine
        engine.kill()
        await asyncio.sleep(self.rng.choice((0.1, 3.0, 20.0)))
        engine.start()

    async def cut(self) -> None:
        await self._cut(both_ways=True)

    async def cut_one_way(self) -> None:
        await self._cut(both_ways=False)

    async def _cut(self, *, both_ways: bool) -> None:
        self.watch.excuse(120)
        everyone = [w.address for w in self.pool.workers.values()]
        side = set(self.rng.sample(everyone, self.rng.randint(1, max(1, len(everyone) // 2))))
        pairs = {(a, b) for a in everyone for b in everyone if a in side and b not in side}
        if both_ways:
            pairs |= {(b, a) for a, b in pairs}
        self.pool.air.cut |= pairs
        seconds = self.rng.choice((2.0, 10.0, 40.0))
        self.views.upset(seconds + 60)
        await asyncio.sleep(seconds)
        self.pool.air.cut -= pairs

    async def kill_worker(self) -> None:
        if len(self.pool.workers) > 1:
            await self._remove(self.any())

    async def _remove(self, worker: SimWorker) -> None:
        self.watch.excuse(120)
        if self.rng.random() < 0.5:
            self.pool.air.dark.add(worker.address)
        await self.pool.remove_worker(worker.key)

    async def same_name(self) -> None:
        """A StatefulSet's pod comes again: the name, a new UID, an empty disk, and now and then the address."""
        if len(self.pool.workers) < 2:
            return
        worker = self.any()
        await self._remove(worker)
        await asyncio.sleep(self.rng.choice((0.1, 3.0, 15.0)))
        address = self.rng.choice((worker.address, f"10.0.1.{self.rng.randrange(10_000)}:8790"))
        if worker.key not in self.pool.workers and not self._taken(address):
            self.pool.renew(worker, address)

    async def same_address(self) -> None:
        """A new worker gets a dead one's address."""
        if len(self.pool.workers) < 2:
            return
        worker = self.any()
        await self._remove(worker)
        await asyncio.sleep(self.rng.choice((0.1, 3.0, 15.0)))
        if not self._taken(worker.address):
            self.pool.add_worker(worker.zone, worker.capacity, worker.engine.version, address=worker.address)

    def _taken(self, address: str) -> bool:
        return any(w.address == address for w in self.pool.workers.values())

    async def clone(self) -> None:
        """A second agent with another's name."""
        first = self.any()
        if f"{first.key}~1" in self.pool.workers:
            return
        clone = self.pool.add_worker(first.zone, first.capacity, first.engine.version, key=f"{first.key}~1")
        await asyncio.sleep(self.rng.uniform(5, 40))
        if self.there(clone):
            await self._remove(clone)

    async def hang(self) -> None:
        self.watch.excuse(120)
        engine = self.any().engine
        engine.hung = True
        await asyncio.sleep(self.rng.uniform(1, 30))
        engine.hung = False

    async def refuse(self) -> None:
        """One engine will not take one adapter's next content."""
        key = self.rng.choice(list(self.pool.adapters))
        content = self.next_content(key)
        self._condemn(self.any().engine.refuses, content)
        self.pool.update(key, content)
        await self.pool.publish_late(self.rng.choice((0.1, 3.0)))

    async def poison(self) -> None:
        self.watch.excuse(900)
        key = self.rng.choice(list(self.pool.adapters))
        worker = self.any()
        content = self.next_content(key)
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
        content = self.next_content(key)
        self.pool.origin.bad.add(content)
        self.pool.update(key, content)
        await self.pool.publish_late(1.0)

    async def freeze(self) -> None:
        """An agent that is stopped: nothing runs, everything queues up."""
        worker = self.any()
        self.views.trouble[worker.key] += 1
        worker.freeze()
        await asyncio.sleep(self.rng.choice((0.3, 1.5, 6.0, 20.0)))
        worker.thaw()
        await asyncio.sleep(15)
        self.views.trouble[worker.key] -= 1

    async def clock_jump(self) -> None:
        """A machine's clock is set wrong, by little or by so much that its messages count no more; then put right."""
        worker = self.any()
        if self.rng.random() < 0.5:
            worker.skew = self.rng.uniform(-SMALL_SKEW, SMALL_SKEW)
            return
        self.views.trouble[worker.key] += 1
        self.views.confused[worker.key] += 1
        before = worker.skew
        worker.skew = self.rng.choice((-1, 1)) * self.rng.uniform(400, 3000)
        await asyncio.sleep(self.rng.choice((2.0, 20.0)))
        worker.skew = before
        await asyncio.sleep(60)
        self.views.trouble[worker.key] -= 1
        self.views.confused[worker.key] -= 1

    @staticmethod
    def _condemn(paths: set[str], content: str) -> None:
        paths.add(f"{DIRECTORY}/{revision(content).removeprefix('sha256:')}")
