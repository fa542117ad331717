"""A directory of manifests, look after look: no accident takes an adapter away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sidecar.core.folder import EMPTY_SECONDS, LEAVE_SECONDS, Folder, FolderView, Stamp, read_content, unusable
from sidecar.model import Adapter

TICK = 0.25
LONG_AGO = 1_000_000.0


def manifest(name: str, uri: str = "", **spec: Any) -> str:
    uri = uri or f"s3://bucket/{name}"
    more = "".join(f"  {key}: {value}\n" for key, value in spec.items())
    return (
        "apiVersion: lora-sidecar.io/v1alpha1\nkind: Adapter\n"
        f"metadata: {{name: {name}}}\nspec:\n  baseModel: qwen\n  source: {{uri: '{uri}'}}\n{more}---\n"
    )


class Disk:
    """A directory in memory, with a folder that looks at it as the edge does."""

    def __init__(self, saved: Mapping[str, tuple[Adapter, ...]] | None = None, now: float = LONG_AGO) -> None:
        self.now = now
        self.files: dict[str, tuple[Stamp, str]] = {}
        self.listed = True
        self.writes = 0
        self.folder = Folder("/m", saved)

    def write(self, name: str, text: str) -> None:
        self.writes += 1
        self.files[name] = (Stamp(inode=self.writes, modified=int(self.now * 1e9)), text)

    def look(self, seconds: float = TICK) -> FolderView:
        self.now += seconds
        if not self.listed:
            self.folder.missed("it does not exist")
            return self.folder.view()
        for name in self.folder.look({name: stamp for name, (stamp, _) in self.files.items()}, self.now):
            stamp, text = self.files[name]
            self.folder.took(name, stamp, read_content(text.encode(), is_json=False), self.now)
        return self.folder.view()

    def settle(self) -> FolderView:
        self.look()
        return self.look()

    def restarted(self) -> Disk:
        again = Disk(self.folder.view().files, self.now)
        again.files, again.listed, again.writes = dict(self.files), self.listed, self.writes
        return again


def names(view: FolderView) -> list[str] | None:
    return None if view.adapters is None else [a.name for a in view.adapters]


def uris(view: FolderView) -> list[str]:
    return [a.source.uri for a in view.adapters or ()]


def running(**files: str) -> Disk:
    disk = Disk()
    for name, text in files.items():
        disk.write(f"{name}.yaml", text)
    disk.now += 60
    assert disk.look().fresh
    return disk


def test_a_readable_directory_is_known_at_the_first_look() -> None:
    disk = Disk()
    disk.write("a.yaml", manifest("sql") + manifest("chat"))
    view = disk.look()
    assert (names(view), view.fresh, view.problems) == (["chat", "sql"], True, ())


def test_an_empty_directory_without_a_past_is_empty() -> None:
    view = Disk().look()
    assert (view.adapters, view.fresh) == ((), True)


def test_before_the_first_look_only_the_saved_list_is_known() -> None:
    assert (Folder("/m", None).view().adapters, Folder("/m", None).view().fresh) == (None, False)
    saved = running(a=manifest("sql")).folder.view().files
    view = Folder("/m", saved).view()
    assert (names(view), view.fresh) == (["sql"], False)


def test_a_directory_that_was_never_there_is_unknown_not_empty() -> None:
    disk = Disk()
    disk.listed = False
    view = disk.look()
    assert (view.adapters, view.fresh) == (None, False)
    assert "/m" in view.problems[0].where
    assert "does not exist" in view.problems[0].message


def test_a_missing_directory_is_unknown_for_ever_and_over_restarts() -> None:
    disk = running(a=manifest("sql"))
    disk.listed = False
    for _ in range(3):
        disk.look(100_000)
    again = disk.restarted()
    for view in (disk.folder.view(), again.look(100_000)):
        assert (names(view), view.fresh) == (["sql"], False)


def test_a_directory_that_comes_back_without_a_file_waits_before_it_believes() -> None:
    disk = running(a=manifest("sql"), b=manifest("chat"))
    disk.listed = False
    disk = disk.restarted()
    disk.look()
    disk.listed = True
    del disk.files["b.yaml"]
    assert names(disk.look()) == ["chat", "sql"]
    assert names(disk.look(LEAVE_SECONDS)) == ["sql"]


def test_a_change_counts_at_its_second_look() -> None:
    disk = running(a=manifest("sql"))
    disk.write("a.yaml", manifest("sql", "s3://bucket/new"))
    assert uris(disk.look()) == ["s3://bucket/sql"]
    assert disk.folder.soon
    assert uris(disk.look(0.05)) == ["s3://bucket/new"]
    assert not disk.folder.soon


def test_a_file_that_is_being_written_is_left_alone() -> None:
    disk = running(a=manifest("sql"))
    for size in (10, 40, 80):
        disk.write("a.yaml", manifest("sql", "s3://bucket/new")[:size])
        assert uris(disk.look(0.05)) == ["s3://bucket/sql"]
        assert disk.folder.view().problems == ()


def test_files_changed_just_before_the_first_look_are_read_twice() -> None:
    disk = Disk()
    disk.write("a.yaml", manifest("sql"))
    stamp = disk.files["a.yaml"][0]
    disk.look(0.001)
    assert disk.folder.soon
    # Written again within the same tick of the file system's clock: nothing of the stamp tells.
    disk.files["a.yaml"] = (stamp, manifest("sql", "s3://bucket/new"))
    assert uris(disk.look(0.05)) == ["s3://bucket/new"]


def test_a_torn_file_keeps_its_last_good_version_and_says_so() -> None:
    disk = running(a=manifest("sql"), b=manifest("chat"))
    disk.write("a.yaml", manifest("sql", "s3://bucket/new") + "kind: [Ada")
    view = disk.settle()
    assert uris(view) == ["s3://bucket/chat", "s3://bucket/sql"]
    assert view.fresh
    (problem,) = view.problems
    assert problem.where == "/m/a.yaml"
    assert "line" in problem.message
    assert "last good version stays in force" in problem.message
    disk.write("a.yaml", manifest("sql", "s3://bucket/new"))
    assert disk.settle().problems == ()
    assert uris(disk.folder.view()) == ["s3://bucket/chat", "s3://bucket/new"]


def test_a_wrong_document_keeps_its_last_good_version_and_never_blocks_the_others() -> None:
    disk = running(a=manifest("sql") + manifest("chat"))
    disk.write("a.yaml", manifest("sql", priority="high") + manifest("chat", "s3://bucket/new") + manifest("more"))
    view = disk.settle()
    assert uris(view) == ["s3://bucket/new", "s3://bucket/more", "s3://bucket/sql"]
    (problem,) = view.problems
    assert problem.where == "/m/a.yaml, document 1"
    assert "spec.priority: 'high'" in problem.message


def test_a_wrong_document_without_a_name_may_be_any_of_the_file() -> None:
    disk = running(a=manifest("sql") + manifest("chat"))
    disk.write("a.yaml", manifest("chat") + "a: b\n")
    disk.settle()
    assert names(disk.look(60)) == ["chat", "sql"]


def test_a_wrong_document_that_was_never_good_is_only_a_problem() -> None:
    disk = running(a=manifest("sql"))
    disk.write("b.yaml", manifest("chat", priority="high"))
    view = disk.settle()
    assert names(view) == ["sql"]
    assert "last good" not in view.problems[0].message
    assert view.fresh


def test_the_last_good_version_survives_a_restart() -> None:
    disk = running(a=manifest("sql"), b=manifest("chat"))
    disk.write("a.yaml", "{")
    disk.settle()
    view = disk.restarted().look()
    assert (names(view), view.fresh) == (["chat", "sql"], True)


def test_a_file_that_vanishes_takes_its_adapters_a_moment_later() -> None:
    disk = running(a=manifest("sql"), b=manifest("chat"))
    del disk.files["b.yaml"]
    assert names(disk.look()) == ["chat", "sql"]
    assert names(disk.look(LEAVE_SECONDS - 0.1)) == ["chat", "sql"]
    assert (names(disk.look(0.1)), disk.folder.view().fresh) == (["sql"], True)


def test_a_document_that_vanishes_goes_the_same_way() -> None:
    disk = running(a=manifest("sql") + manifest("chat"))
    disk.write("a.yaml", manifest("sql"))
    assert names(disk.settle()) == ["chat", "sql"]
    assert names(disk.look(LEAVE_SECONDS)) == ["sql"]


def test_an_editor_that_removes_and_writes_again_takes_nothing_away() -> None:
    disk = running(a=manifest("sql"), b=manifest("chat"))
    text = disk.files.pop("a.yaml")[1]
    assert names(disk.look()) == ["chat", "sql"]
    disk.write("a.yaml", text)
    disk.settle()
    assert names(disk.look(60)) == ["chat", "sql"]
    disk.write("a.yaml", "")  # truncated, then written
    assert names(disk.settle()) == ["chat", "sql"]
    disk.write("a.yaml", text)
    disk.settle()
    assert names(disk.look(60)) == ["chat", "sql"]


def test_what_was_deleted_while_no_agent_ran_is_deleted() -> None:
    disk = running(a=manifest("sql") + manifest("old"), b=manifest("chat"))
    del disk.files["b.yaml"]
    disk.write("a.yaml", manifest("sql"))
    view = disk.restarted().look()
    assert (names(view), view.fresh) == (["sql"], True)


def test_a_suddenly_empty_directory_is_unknown_for_a_while() -> None:
    disk = running(a=manifest("sql"))
    disk.files.clear()
    for seconds in (TICK, EMPTY_SECONDS - 0.1):
        view = disk.look(seconds)
        assert (names(view), view.fresh) == (["sql"], False)
        assert "suddenly empty" in view.problems[0].message
    view = disk.look(0.1)
    assert (view.adapters, view.fresh, view.problems) == ((), True, ())
    assert disk.restarted().look().fresh


def test_an_empty_directory_after_a_restart_is_as_sudden() -> None:
    disk = running(a=manifest("sql"))
    disk.files.clear()
    again = disk.restarted()
    assert (names(again.look()), again.folder.view().fresh) == (["sql"], False)
    assert names(again.look(EMPTY_SECONDS)) == []


def test_files_that_come_back_into_an_empty_directory_count_as_ever() -> None:
    disk = running(a=manifest("sql"), b=manifest("chat"))
    kept = dict(disk.files)
    disk.files.clear()
    disk.look()
    disk.look(EMPTY_SECONDS - 1)
    disk.files.update(kept)
    assert (names(disk.settle()), disk.folder.view().fresh) == (["chat", "sql"], True)
    disk.files.clear()
    assert not disk.look(EMPTY_SECONDS).fresh  # it counts from anew


def test_of_two_files_with_one_adapter_the_first_by_name_wins() -> None:
    disk = running(b=manifest("sql", "s3://bucket/b"), a=manifest("sql", "s3://bucket/a"))
    view = disk.folder.view()
    assert uris(view) == ["s3://bucket/a"]
    (problem,) = view.problems
    assert problem.where == "/m/b.yaml, document 1"
    for part in ("default/sql", "a.yaml", "b.yaml", "delete"):
        assert part in problem.message


def test_of_two_documents_with_one_adapter_the_first_wins() -> None:
    disk = running(a=manifest("sql", "s3://bucket/1") + manifest("sql", "s3://bucket/2"))
    assert uris(disk.folder.view()) == ["s3://bucket/1"]
    assert "document 1" in disk.folder.view().problems[0].message
    assert disk.folder.view().problems[0].where.endswith("document 2")


def test_a_renamed_file_is_no_duplicate_and_leaves_no_gap() -> None:
    disk = running(a=manifest("sql", "s3://bucket/a"), z=manifest("chat"))
    del disk.files["a.yaml"]
    disk.write("b.yaml", manifest("sql", "s3://bucket/b"))
    assert uris(disk.look()) == ["s3://bucket/chat", "s3://bucket/a"]
    view = disk.look(0.05)
    assert (uris(view), view.problems) == (["s3://bucket/chat", "s3://bucket/b"], ())
    assert uris(disk.look(60)) == ["s3://bucket/chat", "s3://bucket/b"]


def test_a_file_that_cannot_be_read_is_tried_again_at_the_usual_pace() -> None:
    disk = running(a=manifest("sql"))
    stamp, text = disk.files["a.yaml"]
    changed = stamp._replace(changed=5)
    listing = {"a.yaml": changed}
    assert disk.folder.look(listing, disk.now) == ()
    assert disk.folder.look(listing, disk.now) == ("a.yaml",)
    disk.folder.took("a.yaml", changed._replace(error="permission denied"), unusable("permission denied"), disk.now)
    assert names(disk.folder.view()) == ["sql"]
    assert "permission denied; the last good" in disk.folder.view().problems[0].message
    assert disk.folder.look(listing, disk.now) == ("a.yaml",)
    assert not disk.folder.soon
    disk.folder.took("a.yaml", changed, read_content(text.encode(), is_json=False), disk.now)
    assert disk.folder.view().problems == ()
    assert disk.folder.look(listing, disk.now) == ()


def test_a_file_without_a_stamp_is_a_problem_of_its_own() -> None:
    disk = running(a=manifest("sql"))
    listing = {"a.yaml": disk.files["a.yaml"][0], "b.yaml": Stamp(error="too many links")}
    assert disk.folder.look(listing, disk.now) == ()
    assert names(disk.folder.view()) == ["sql"]
    assert "too many links" in disk.folder.view().problems[0].message


def test_the_view_is_the_same_object_until_something_changes() -> None:
    disk = running(a=manifest("sql"))
    disk.settle()
    view = disk.folder.view()
    assert disk.look() is view
    disk.write("a.yaml", manifest("sql"))  # touched, the same content
    assert disk.settle() is view


class AnyAccident(RuleBasedStateMachine):
    """Files are written, torn, removed; the directory goes and comes; agents die. Adapters leave by deletion alone."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()

    @rule(name=st.sampled_from("ab"), version=st.integers(1, 3))
    def write(self, name: str, version: int) -> None:
        self.disk.write(f"{name}.yaml", manifest(name, f"s3://bucket/{version}"))

    @rule(name=st.sampled_from("ab"), cut=st.integers(1, 60))
    def tear(self, name: str, cut: int) -> None:
        self.disk.write(f"{name}.yaml", manifest(name)[:cut])

    @rule(name=st.sampled_from("ab"))
    def remove(self, name: str) -> None:
        self.disk.files.pop(f"{name}.yaml", None)

    @rule(listed=st.booleans())
    def mount(self, listed: bool) -> None:
        self.disk.listed = listed

    @rule(seconds=st.sampled_from([0.05, 0.25, 1.0, 5.0, 40.0]))
    def look(self, seconds: float) -> None:
        before = {a.name for a in self.disk.folder.view().adapters or ()}
        view = self.disk.look(seconds)
        lost = before - {a.name for a in view.adapters or ()}
        assert not lost or view.fresh
        for name in lost:
            stored = self.disk.files.get(f"{name}.yaml")
            # Gone for good, or cut down to nothing that could be a document.
            assert stored is None or not read_content(stored[1].encode(), is_json=False).faults

    @rule()
    @precondition(lambda self: self.disk.listed)
    def steady_state_is_what_the_files_say(self) -> None:
        for seconds in (60.0, 60.0, 60.0):
            view = self.disk.look(seconds)
        assert view.fresh
        said = {name: read_content(text.encode(), is_json=False) for name, (_, text) in self.disk.files.items()}
        good = {a.key: a for content in said.values() for _, a in content.adapters}
        found = {a.key: a for a in view.adapters or ()}
        assert good.items() <= found.items()
        for key in found.keys() - good.keys():
            assert said[f"{key.partition('/')[2]}.yaml"].wrong is None  # its last good version

    @rule()
    def restart(self) -> None:
        before = self.disk.folder.view()
        self.disk = self.disk.restarted()
        leaving = {a.key for a in before.adapters or ()} - {a.key for v in before.files.values() for a in v}
        after = self.disk.folder.view()
        assert {a.key: a for a in after.adapters or ()} == {
            a.key: a for a in before.adapters or () if a.key not in leaving
        }

    @invariant()
    def keys_are_unique(self) -> None:
        keys = [a.key for a in self.disk.folder.view().adapters or ()]
        assert keys == sorted(set(keys))


TestAnyAccident = AnyAccident.TestCase
TestAnyAccident.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
