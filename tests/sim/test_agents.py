"""Whole agents on virtual time: what the loops owe to the rules, one story each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from sidecar.core.memory import Attempt, Memory, dump
from sidecar.loops.reconcile import Reconciler
from sidecar.model import Adapter, Distribution, Listing, Source, State
from sidecar.ports import EdgeError

from .loop import run
from .pool import SimPool, SimWorker
from .world import BASE, DIRECTORY, revision

ONE = Distribution(strategy="fixed", replicas=1)


def told(story: Callable[[SimPool], Coroutine[Any, Any, None]]) -> None:
    """Run a story on virtual time."""
    run(story(SimPool(random.Random(7))))


def agent(worker: SimWorker) -> Reconciler:
    assert worker.agent is not None
    return worker.agent


def states(worker: SimWorker) -> dict[str, State]:
    return {e.adapter.partition("/")[2]: e.state for e in agent(worker).record.entries}


def message(worker: SimWorker, key: str) -> str:
    return next(e.message for e in agent(worker).record.entries if e.adapter == key)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Let virtual time pass until it holds."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it never comes"
        await asyncio.sleep(0.05)


def refreshed(pool: SimPool, name: str, every: float) -> Adapter:
    made = pool.adapter(name)
    source = Source(uri=made.source.uri, refresh_seconds=every)
    pool.adapters[made.key] = msgspec.structs.replace(made, source=source)
    return pool.adapters[made.key]


def holds(worker: SimWorker, name: str, content: str) -> bool:
    return worker.engine.adapters.get(name) == f"{DIRECTORY}/{revision(content).removeprefix('sha256:')}"


# -- who is who


def test_who_has_the_name_of_an_older_agent_holds_no_targets() -> None:
    async def story(pool: SimPool) -> None:
        pool.adapter("a")
        worker = pool.add_worker(start=False)
        other = pool.add_worker()
        await until(lambda: "a" in other.engine.adapters)
        worker.start()
        assert worker.peers is not None
        worker.peers.rival = msgspec.structs.replace(agent(other).record, head=agent(worker).head)
        await asyncio.sleep(30)
        assert worker.engine.adapters == {}
        assert agent(worker).world.mine == frozenset()  # type: ignore[union-attr]  # it has run
        assert agent(worker).wanted_first is None
        # The older one has gone: it is this worker's turn.
        worker.peers.rival = None
        agent(worker).wake()
        await until(lambda: "a" in worker.engine.adapters)

    told(story)


def test_a_namesake_lets_go_of_its_copies_only_for_those_of_the_rightful_one() -> None:
    async def story(pool: SimPool) -> None:
        pool.adapter("a", ONE)
        worker = pool.add_worker()
        await until(lambda: "a" in worker.engine.adapters)
        head = msgspec.structs.replace(agent(worker).head, uid="older", engine_up=True, engine_seen=True)
        assert worker.peers is not None
        empty = msgspec.structs.replace(agent(worker).record, head=head, entries=())
        worker.peers.rival = empty
        agent(worker).wake()
        await asyncio.sleep(60)
        assert "a" in worker.engine.adapters
        worker.peers.rival = msgspec.structs.replace(agent(worker).record, head=head)
        agent(worker).wake()
        await until(lambda: "a" not in worker.engine.adapters)

    told(story)


# -- before the engine answers, and before the peers have spoken


def test_files_are_fetched_while_the_engine_is_starting() -> None:
    async def story(pool: SimPool) -> None:
        pool.adapter("a")
        worker = pool.add_worker(start=False)
        worker.engine.kill()
        worker.disk.save("memory.json", dump(Memory(base_models=(BASE,))))
        worker.start()
        await until(lambda: bool(worker.disk.published))
        await asyncio.sleep(300)
        assert states(worker) == {"a": State.PENDING}
        assert "connection refused" in message(worker, "default/a")
        pool.origin.out = True
        worker.engine.start()
        await until(lambda: "a" in worker.engine.adapters, 5)

    told(story)


def test_only_what_will_be_its_own_is_fetched_while_the_engine_is_starting() -> None:
    async def story(pool: SimPool) -> None:
        for i in range(12):
            pool.adapter(f"lora-{i}", ONE)
        workers = [pool.add_worker(start=False) for _ in range(3)]
        for worker in workers:
            worker.engine.kill()
            worker.disk.save("memory.json", dump(Memory(base_models=(BASE,))))
            worker.start()
        await asyncio.sleep(60)
        assert sum(len(w.disk.published) for w in workers) == 12
        for worker in workers:
            worker.engine.start()
        await until(lambda: sum(len(w.engine.adapters) for w in workers) == 12, 600)

    told(story)


def test_big_content_is_settled_by_one_while_all_engines_are_starting() -> None:
    async def story(pool: SimPool) -> None:
        pool.adapter("big")
        workers = [pool.add_worker(start=False) for _ in range(3)]
        for worker in workers:
            worker.engine.kill()
            worker.disk.save("memory.json", dump(Memory(base_models=(BASE,))))
            worker.start()
        await until(lambda: all(len(w.disk.published) == 1 for w in workers))
        assert len({agent(w).world.decisions["default/big"] for w in workers}) == 1  # type: ignore[union-attr]  # all have run

    told(story)


def test_an_agent_that_has_just_started_fetches_nothing_but_its_own() -> None:
    async def story(pool: SimPool) -> None:
        for i in range(12):
            pool.adapter(f"lora-{i}", ONE)
        workers = [pool.add_worker() for _ in range(2)]
        await until(lambda: sum(len(w.engine.adapters) for w in workers) == 12)
        late = pool.add_worker()
        await asyncio.sleep(60)
        assert len(late.engine.adapters) == len(late.disk.published) > 0
        assert sum(len(w.engine.adapters) for w in pool.workers.values()) == 12

    told(story)


# -- new content behind a refreshed source


def test_new_content_that_is_no_adapter_costs_nothing_and_is_replaced_by_the_next() -> None:
    async def story(pool: SimPool) -> None:
        made = refreshed(pool, "a", 30.0)
        worker, other = pool.add_worker(), pool.add_worker()
        await until(lambda: holds(worker, "a", "a-1") and holds(other, "a", "a-1"))
        pool.origin.bad.add("spoiled")
        pool.origin.contents[made.source.uri] = "spoiled"
        first = worker if agent(worker).world.assignments["default/a"].targets[0] == worker.name else other  # type: ignore[union-attr]
        await until(lambda: "spoiled is no adapter" in message(first, "default/a"), 90)
        assert states(first) == {"a": State.LOADED}
        first.engine.kill()
        first.engine.start()
        await until(lambda: holds(first, "a", "a-1"))
        assert not any(e.avoid for w in (worker, other) for e in agent(w).record.entries)
        pool.origin.contents[made.source.uri] = "a-2"
        await until(lambda: holds(worker, "a", "a-2") and holds(other, "a", "a-2"), 120)
        assert message(first, "default/a") == ""

    told(story)


def test_content_that_was_no_adapter_at_first_is_looked_at_again() -> None:
    async def story(pool: SimPool) -> None:
        made = refreshed(pool, "a", 30.0)
        pool.origin.bad.add("a-1")
        worker, other = pool.add_worker(), pool.add_worker()
        await until(lambda: states(worker) == states(other) == {"a": State.REJECTED})
        pool.origin.contents[made.source.uri] = "a-2"
        await until(lambda: holds(worker, "a", "a-2") and holds(other, "a", "a-2"), 120)

    told(story)


def test_what_is_no_adapter_is_not_downloaded_again_and_again() -> None:
    async def story(pool: SimPool) -> None:
        made = refreshed(pool, "a", 30.0)
        worker = pool.add_worker()
        await until(lambda: holds(worker, "a", "a-1"))
        pool.origin.bad.add("spoiled")
        pool.origin.contents[made.source.uri] = "spoiled"
        await until(lambda: "spoiled" in message(worker, "default/a"), 90)
        fetches = pool.origin.reads
        await asyncio.sleep(600)
        # One listing each half minute, and not one download.
        assert 15 <= pool.origin.reads - fetches <= 25

    told(story)


# -- the agent's own end


def test_a_load_that_an_earlier_agent_began_is_not_blamed_for_what_comes_later() -> None:
    async def story(pool: SimPool) -> None:
        pool.adapter("a")
        worker = pool.add_worker()
        await until(lambda: "a" in worker.engine.adapters)
        await worker.kill_agent()
        memory = msgspec.json.decode(worker.disk.state["memory.json"], type=Memory)
        memory.attempts = [Attempt("default/a", revision("a-1"), pool.clock())]
        worker.disk.save("memory.json", dump(memory))
        worker.start()
        await asyncio.sleep(120)
        worker.engine.kill()
        worker.engine.start()
        await until(lambda: "a" in worker.engine.adapters)
        assert agent(worker).memory.suspicions == []

    told(story)


def test_a_list_without_any_base_model_takes_nothing_away() -> None:
    async def story(pool: SimPool) -> None:
        pool.adapter("a")
        worker = pool.add_worker()
        await until(lambda: "a" in worker.engine.adapters)
        worker.engine.base_models = ()
        await asyncio.sleep(60)
        assert "a" in worker.engine.adapters
        assert states(worker) == {"a": State.LOADED}

    told(story)


def test_a_fault_of_this_program_is_not_run_into_again_at_once() -> None:
    async def story(pool: SimPool) -> None:
        worker = pool.add_worker(start=False)
        asked = []

        async def crash(adapter: Adapter) -> Listing:
            asked.append(adapter.key)
            raise ZeroDivisionError("a fault of this program")

        worker.start()
        worker.fetcher.listing = crash  # type: ignore[method-assign]  # what no edge may do
        pool.adapter("a")
        pool.publish()
        await asyncio.sleep(60)
        assert 3 <= len(asked) <= 10
        assert "ZeroDivisionError" in message(worker, "default/a")
        # Everything else goes on.
        del worker.fetcher.listing
        pool.adapter("b")
        pool.publish()
        await until(lambda: holds(worker, "b", "b-1"))

    told(story)


def test_a_disk_that_keeps_nothing_ends_nothing() -> None:
    async def story(pool: SimPool) -> None:
        worker = pool.add_worker()

        def full(name: str, data: bytes) -> None:
            raise EdgeError("the file system is read-only")

        worker.disk.save = full  # type: ignore[method-assign]  # a disk that fails
        pool.adapter("a")
        pool.publish()
        await until(lambda: holds(worker, "a", "a-1"))

    told(story)


def test_a_new_engine_process_is_ready_when_what_is_wanted_then_is_loaded() -> None:
    async def story(pool: SimPool) -> None:
        pool.adapter("a")
        worker = pool.add_worker()
        await until(lambda: agent(worker).wanted_first == frozenset({"default/a"}))
        pool.adapter("b")
        pool.publish()
        await until(lambda: "b" in worker.engine.adapters)
        assert agent(worker).wanted_first == frozenset({"default/a"})
        worker.engine.kill()
        worker.engine.start()
        await until(lambda: agent(worker).wanted_first == frozenset({"default/a", "default/b"}), 5)

    told(story)
