"""The standalone backend on real files: links swapped, writes torn, directories lost."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.folder import LEAVE_SECONDS, Stamp
from sidecar.edges.manifests import list_manifests
from sidecar.edges.standalone import STATE_ADAPTERS, STATE_SEEDS, Pace, StandaloneBackend
from sidecar.model import Member
from sidecar.ports import BackendView, DiskFull, Report


def manifest(name: str, uri: str = "", **spec: object) -> str:
    more = "".join(f"  {key}: {value}\n" for key, value in spec.items())
    return (
        "apiVersion: lora-sidecar.io/v1alpha1\nkind: Adapter\n"
        f"metadata: {{name: {name}}}\nspec:\n  baseModel: qwen\n  source: {{uri: '{uri or f's3://bucket/{name}'}'}}\n"
        f"{more}---\n"
    )


def replace(path: Path, text: str) -> None:
    """Write atomically, as good tools do."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.rename(path)


class Memory:
    """`state/` in memory; `full` makes it a full disk."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.full = False
        self.saves = 0
        self._turn = threading.Condition()

    def save(self, name: str, data: bytes) -> None:
        with self._turn:
            self.saves += 1
            self._turn.notify_all()
            if self.full:
                raise DiskFull("no room for the state")
            self.kept[name] = data

    async def until(self, condition: Callable[[], bool]) -> None:
        def wait() -> bool:
            with self._turn:
                return self._turn.wait_for(condition, 5)

        assert await asyncio.to_thread(wait)

    def read(self, name: str) -> bytes | None:
        return self.kept.get(name)


class Agent:
    """A running backend, and a clock that can be turned forward."""

    def __init__(
        self,
        directory: Path | str,
        memory: Memory,
        seeds: tuple[str, ...] = (),
        lister: Callable[[str], dict[str, Stamp]] = list_manifests,
    ) -> None:
        self.ahead = 0.0
        self.changes = 0
        self.changed = asyncio.Event()
        self.backend = StandaloneBackend(
            manifests=str(directory),
            seeds=seeds,
            name="me",
            address="127.0.0.1:9001",
            zone="z1",
            state=memory,
            clock=lambda: time.time() + self.ahead,
            pace=Pace(patience=0.4),
            lister=lister,
        )

    def on_change(self) -> None:
        self.changes += 1
        self.changed.set()

    async def until(self, condition: Callable[[BackendView], object]) -> BackendView:
        async with asyncio.timeout(10):
            while not condition(self.backend.view()):
                self.changed.clear()
                await self.changed.wait()
        return self.backend.view()

    async def after(self, change: Callable[[], object], seconds: float) -> None:
        """Make a change, wait until it was seen, and let `seconds` pass."""
        self.changed.clear()
        change()
        async with asyncio.timeout(10):
            await self.changed.wait()
        self.ahead += seconds

    async def until_uris(self, *uris: str) -> BackendView:
        return await self.until(lambda view: sorted(a.source.uri for a in view.adapters or ()) == sorted(uris))


@asynccontextmanager
async def running(directory: Path | str, memory: Memory | None = None, **options: Any) -> AsyncIterator[Agent]:
    agent = Agent(directory, memory or Memory(), **options)
    task = asyncio.create_task(agent.backend.run(agent.on_change))
    try:
        yield agent
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_manifests_of_every_suffix_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("a") + manifest("b"))
    (tmp_path / "c.yml").write_text(manifest("c"))
    (tmp_path / "d.json").write_text(
        '{"apiVersion": "lora-sidecar.io/v1alpha1", "kind": "Adapter", "metadata": {"name": "d"},'
        ' "spec": {"baseModel": "qwen", "source": {"uri": "s3://bucket/d"}}}'
    )
    (tmp_path / ".hidden.yaml").write_text(manifest("hidden"))
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "sub.yaml").mkdir()
    (tmp_path / "sub.yaml" / "deep.yaml").write_text(manifest("deep"))
    async with running(tmp_path) as agent:
        view = await agent.until(lambda view: view.adapters_fresh)
        assert [a.key for a in view.adapters or ()] == ["default/a", "default/b", "default/c", "default/d"]
        assert view.problems == ()
        assert agent.backend.view() is view


async def test_an_atomic_replacement_is_seen_soon(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("a"))
    async with running(tmp_path) as agent:
        await agent.until_uris("s3://bucket/a")
        replace(tmp_path / "a.yaml", manifest("a", "s3://bucket/2"))
        started = time.monotonic()
        await agent.until_uris("s3://bucket/2")
        assert time.monotonic() - started < 5.0  # 0.3 on a quiet machine


async def test_a_configmap_is_followed_through_its_swapped_links(tmp_path: Path) -> None:
    def publish(version: str, **files: str) -> None:
        """What the kubelet does: a new directory, one atomic link swap, then names that are gone."""
        target = tmp_path / f"..{version}"
        target.mkdir()
        for name, text in files.items():
            (target / f"{name}.yaml").write_text(text)
        (tmp_path / "..data_tmp").symlink_to(target.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        for name in files:
            link = tmp_path / f"{name}.yaml"
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}.yaml")
        for link in tmp_path.glob("*.yaml"):
            if link.stem not in files:
                link.unlink()
        for old in tmp_path.glob("..20*"):
            if old != target:
                for file in old.iterdir():
                    file.unlink()
                old.rmdir()

    publish("2026_01", a=manifest("a"), b=manifest("b"))
    async with running(tmp_path) as agent:
        await agent.until_uris("s3://bucket/a", "s3://bucket/b")
        publish("2026_02", a=manifest("a", "s3://bucket/a2"), b=manifest("b"), c=manifest("c"))
        await agent.until_uris("s3://bucket/a2", "s3://bucket/b", "s3://bucket/c")
        await agent.after(lambda: publish("2026_03", c=manifest("c")), LEAVE_SECONDS)
        await agent.until_uris("s3://bucket/c")
        assert agent.backend.view().problems == ()


async def test_a_torn_write_keeps_the_last_good_version_and_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(manifest("a"))
    (tmp_path / "b.yaml").write_text(manifest("b"))
    text = manifest("a", "s3://bucket/a2")
    async with running(tmp_path) as agent:
        await agent.until_uris("s3://bucket/a", "s3://bucket/b")
        with path.open("w") as file:
            file.write(text[: text.index("source") + 9])
            file.flush()
            view = await agent.until(lambda view: view.problems)
            assert [a.source.uri for a in view.adapters or ()] == ["s3://bucket/a", "s3://bucket/b"]
            assert view.adapters_fresh
            assert str(path) in view.problems[0].where
            assert "last good version" in view.problems[0].message
            file.write(text[text.index("source") + 9 :])
        view = await agent.until_uris("s3://bucket/a2", "s3://bucket/b")
        assert view.problems == ()


async def test_a_removed_file_takes_its_adapters_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("a"))
    (tmp_path / "b.yaml").write_text(manifest("b"))
    async with running(tmp_path) as agent:
        await agent.until_uris("s3://bucket/a", "s3://bucket/b")
        await agent.after((tmp_path / "b.yaml").unlink, LEAVE_SECONDS)
        view = await agent.until_uris("s3://bucket/a")
        assert view.adapters_fresh


async def test_an_emptied_directory_is_believed_late_and_a_missing_one_never(tmp_path: Path) -> None:
    directory = tmp_path / "manifests"
    directory.mkdir()
    (directory / "a.yaml").write_text(manifest("a"))
    async with running(directory) as agent:
        await agent.until_uris("s3://bucket/a")
        directory.rename(tmp_path / "away")
        view = await agent.until(lambda view: not view.adapters_fresh)
        assert "--manifests" in view.problems[0].message
        agent.ahead += 100_000
        directory.mkdir()
        view = await agent.until(lambda view: "suddenly empty" in view.problems[0].message)
        assert [a.name for a in view.adapters or ()] == ["a"]
        assert not view.adapters_fresh
        agent.ahead += 31
        view = await agent.until(lambda view: view.adapters == ())
        assert view.adapters_fresh
        assert view.problems == ()


async def test_a_restart_without_the_directory_changes_nothing(tmp_path: Path) -> None:
    memory = Memory()
    directory = tmp_path / "manifests"
    directory.mkdir()
    (directory / "a.yaml").write_text(manifest("a", priority=3))
    async with running(directory, memory) as agent:
        before = (await agent.until_uris("s3://bucket/a")).adapters
        await memory.until(lambda: STATE_ADAPTERS in memory.kept)
    directory.rename(tmp_path / "away")
    async with running(directory, memory) as agent:
        assert agent.backend.view().adapters == before  # known before the first look
        view = await agent.until(lambda view: "no such file" in view.problems[0].message)
        assert (view.adapters, view.adapters_fresh) == (before, False)


async def test_what_is_wrong_at_a_restart_has_its_last_good_version_and_what_is_gone_is_gone(tmp_path: Path) -> None:
    memory = Memory()
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(manifest(name))
    async with running(tmp_path, memory) as agent:
        await agent.until_uris("s3://bucket/a", "s3://bucket/b")
        await memory.until(lambda: STATE_ADAPTERS in memory.kept)
    (tmp_path / "a.yaml").write_text("kind: [")
    (tmp_path / "b.yaml").unlink()
    async with running(tmp_path, memory) as agent:
        view = await agent.until(lambda view: view.adapters_fresh)
        assert [a.name for a in view.adapters or ()] == ["a"]
        assert len(view.problems) == 1


async def test_a_directory_that_was_never_there_is_unknown(tmp_path: Path) -> None:
    for directory in (tmp_path / "nowhere", ""):
        async with running(directory) as agent:
            view = await agent.until(lambda view: "--manifests" in view.problems[0].message)
            assert (view.adapters, view.adapters_fresh) == (None, False)


async def test_a_directory_that_does_not_answer_is_unknown_until_it_does(tmp_path: Path) -> None:
    answering = threading.Event()
    answering.set()

    def dead_mount(directory: str) -> dict[str, Stamp]:
        answering.wait()
        return list_manifests(directory)

    (tmp_path / "a.yaml").write_text(manifest("a"))
    async with running(tmp_path, lister=dead_mount) as agent:
        await agent.until(lambda view: view.adapters_fresh)
        answering.clear()
        view = await agent.until(lambda view: not view.adapters_fresh)
        assert [a.name for a in view.adapters or ()] == ["a"]
        assert "does not answer" in view.problems[0].message
        answering.set()
        view = await agent.until(lambda view: view.adapters_fresh)
        assert view.problems == ()


async def test_odd_files_are_problems_and_block_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "big.yaml").write_text("#" * (1024 * 1024 + 1))
    (tmp_path / "good.yaml").write_text(manifest("good"))
    async with running(tmp_path) as agent:
        view = await agent.until(lambda view: len(view.problems) == 3)
        assert [a.name for a in view.adapters or ()] == ["good"]
        shown = {os.path.basename(problem.where): problem.message for problem in view.problems}
        assert "regular file" in shown["pipe.yaml"]
        assert "symbolic links" in shown["loop.yaml"]
        assert "1048576" in shown["big.yaml"]


async def test_a_file_that_becomes_readable_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.symlink_to("a.yaml")
    async with running(tmp_path) as agent:
        await agent.until(lambda view: view.problems)
        replace(path, manifest("a"))
        assert (await agent.until_uris("s3://bucket/a")).problems == ()


async def test_a_full_disk_costs_only_the_memory(tmp_path: Path) -> None:
    memory = Memory()
    memory.full = True
    (tmp_path / "a.yaml").write_text(manifest("a"))
    async with running(tmp_path, memory) as agent:
        await agent.until_uris("s3://bucket/a")
        await memory.until(lambda: memory.saves == 1)
        assert memory.kept == {}
        memory.full = False
        replace(tmp_path / "a.yaml", manifest("a", "s3://bucket/2"))
        await agent.until_uris("s3://bucket/2")
        agent.ahead += 60
        await memory.until(lambda: b"s3://bucket/2" in memory.kept.get(STATE_ADAPTERS, b""))


async def test_state_of_something_else_is_no_state(tmp_path: Path) -> None:
    memory = Memory()
    memory.kept[STATE_ADAPTERS] = b'{"files": [1]}'
    (tmp_path / "a.yaml").write_text(manifest("a"))
    async with running(tmp_path, memory) as agent:
        assert agent.backend.view().adapters is None
        await agent.until_uris("s3://bucket/a")


async def test_at_rest_nothing_is_written_and_nobody_is_woken(tmp_path: Path) -> None:
    memory = Memory()
    (tmp_path / "a.yaml").write_text(manifest("a"))
    async with running(tmp_path, memory) as agent:
        await agent.until_uris("s3://bucket/a")
        await memory.until(lambda: memory.saves == 1)
        os.utime(tmp_path / "a.yaml")
        await asyncio.sleep(0.8)  # three looks
        assert (agent.changes, memory.saves) == (1, 1)


async def test_the_members_are_the_seeds_and_this_worker(tmp_path: Path) -> None:
    async with running(tmp_path, seeds=("10.0.0.1:8790", "127.0.0.1:9001", "10.0.0.1", "[fd00::1]:9")) as agent:
        view = agent.backend.view()
        assert view.members == (
            Member(name="me", address="127.0.0.1:9001", zone="z1"),
            Member(name="10.0.0.1:8790", address="10.0.0.1:8790"),
            Member(name="[fd00::1]:9", address="[fd00::1]:9"),
        )
        assert view.members_fresh


async def test_names_among_the_seeds_are_resolved_and_remembered(tmp_path: Path) -> None:
    memory = Memory()
    async with running(tmp_path, memory, seeds=("localhost:9001", "localhost:9002")) as agent:
        assert not agent.backend.view().members_fresh
        view = await agent.until(lambda view: view.members_fresh)
        assert [m.address for m in view.members or ()] == ["127.0.0.1:9001", "127.0.0.1:9002"]
        await memory.until(lambda: STATE_SEEDS in memory.kept)
    again = Agent(tmp_path, memory, ("localhost:9002",))
    assert [m.address for m in again.backend.view().members or ()] == ["127.0.0.1:9001", "127.0.0.1:9002"]


def test_a_seed_that_is_no_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'a:b:c' is no address; write host:port"):
        Agent(tmp_path, Memory(), ("a:b:c",))


async def test_the_last_report_is_kept(tmp_path: Path) -> None:
    agent = Agent(tmp_path, Memory())
    report = Report(labels={"a": "b"})
    await agent.backend.publish(report)
    assert agent.backend.report == report
