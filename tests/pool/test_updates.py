"""New content behind an S3 prefix reaches every worker, and nobody ever gets an answer of neither version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.edges.sample_adapter import write_adapter
from tests.s3server import S3Server

from .processes import BASE, ProcessPool, Watch, until

pytestmark = pytest.mark.slow

BUCKET = "adapters"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def upload(s3: S3Server, directory: Path, prefix: str, seed: str) -> None:
    """Put an adapter made of `seed` behind the prefix: the configuration first, as a careless upload does."""
    made = write_adapter(directory / seed, seed, base=BASE)
    for path in sorted(made.iterdir()):
        s3.put(BUCKET, f"{prefix}/{path.name}", path.read_bytes())


class Answers:
    """Asks every engine for one model all the time, and keeps what was said."""

    def __init__(self, pool: ProcessPool, name: str) -> None:
        self.pool, self.name = pool, name
        self.said: set[str] = set()
        self.asked = 0

    async def run(self) -> None:
        while True:
            for answer in await asyncio.gather(*(w.engine.answer(self.name) for w in self.pool.workers)):
                self.asked += 1
                if answer is not None:
                    self.said.add(answer)
            await asyncio.sleep(0.01)

    async def everywhere(self) -> set[str | None]:
        """What all engines say now."""
        return set(await asyncio.gather(*(w.engine.answer(self.name) for w in self.pool.workers)))


async def test_new_content_behind_the_same_prefix_is_rolled_out_without_a_wrong_answer(
    tmp_path: Path, s3: S3Server
) -> None:
    upload(s3, tmp_path, "loras/1", "one")
    upload(s3, tmp_path, "loras/10", "ten")
    async with ProcessPool(tmp_path, 3, environment=s3.env) as pool, Watch(pool):
        pool.apply("one", drainSeconds=1, source={"uri": f"s3://{BUCKET}/loras/1", "refreshInterval": "1s"})
        pool.apply("ten", f"s3://{BUCKET}/loras/10", drainSeconds=1)
        await pool.settled()
        answers = Answers(pool, "one")
        (first,) = await answers.everywhere()
        (ten,) = await Answers(pool, "ten").everywhere()
        assert first
        assert ten
        assert first != ten
        asking = asyncio.create_task(answers.run())
        upload(s3, tmp_path, "loras/1", "one-changed")

        async def changed() -> bool:
            now = await answers.everywhere()
            return len(now) == 1 and now not in ({first}, {None})

        await until(changed, "the new content to be on all three")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        (second,) = await answers.everywhere()
        assert answers.said <= {first, second}
        assert answers.asked > 100
        await pool.settled()
        # The longer namesake was not touched.
        assert await Answers(pool, "ten").everywhere() == {ten}
        for worker in pool.workers:
            assert await worker.engine.calls("load") in (["one", "ten", "one"], ["ten", "one", "one"])
            assert (await worker.rows())["one"]["refresh"] >= 1


async def test_new_content_behind_a_new_prefix_never_costs_the_old(tmp_path: Path, s3: S3Server) -> None:
    upload(s3, tmp_path, "versions/1", "v1")
    upload(s3, tmp_path, "versions/2", "v2")
    async with ProcessPool(tmp_path, 2, environment=s3.env) as pool, Watch(pool):
        pool.apply("a", f"s3://{BUCKET}/versions/1", drainSeconds=1)
        await pool.settled()
        answers = Answers(pool, "a")
        (first,) = await answers.everywhere()
        # What is behind the new prefix isn't there yet: the old one serves on, and says what is missing.
        pool.edit("a", source={"uri": f"s3://{BUCKET}/versions/3"})

        async def said() -> bool:
            return all(["versions/3" in (await w.rows())["a"]["message"] for w in pool.workers])

        await until(said, "the missing prefix to be named")
        assert await answers.everywhere() == {first}
        asking = asyncio.create_task(answers.run())
        pool.edit("a", source={"uri": f"s3://{BUCKET}/versions/2"})
        await pool.settled()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        (second,) = await answers.everywhere()
        assert second != first
        assert answers.said <= {first, second}


async def test_new_content_that_every_engine_refuses_leaves_the_old_serving(tmp_path: Path, s3: S3Server) -> None:
    upload(s3, tmp_path, "kept/1", "kept")
    upload(s3, tmp_path, "kept/2", "refused")
    async with ProcessPool(tmp_path, 2, environment=s3.env) as pool, Watch(pool):
        pool.apply("a", f"s3://{BUCKET}/kept/1", drainSeconds=1)
        await pool.settled()
        answers = Answers(pool, "a")
        (first,) = await answers.everywhere()
        revision = (await pool.workers[0].rows())["a"]["revision"]
        # Engines refuse by name here, so the old one has to come back by itself after the first attempt.
        for worker in pool.workers:
            await worker.engine.misbehave(
                load_status=400, load_body='{"error": {"message": "unsupported LoRA weight"}}'
            )
        pool.edit("a", source={"uri": f"s3://{BUCKET}/kept/2"})

        async def refused() -> bool:
            rows = [(await w.rows())["a"] for w in pool.workers]
            return any("unsupported LoRA weight" in row["message"] for row in rows)

        await until(refused, "the refusal to be said")
        for worker in pool.workers:
            await worker.engine.behave()

        async def back() -> bool:
            rows = [(await w.rows())["a"] for w in pool.workers]
            return all(row["state"] == "Loaded" and row["revision"] == revision for row in rows)

        await until(back, "the old revision to serve everywhere")
        await asyncio.sleep(3)
        assert await back()
        assert await answers.everywhere() == {first}
