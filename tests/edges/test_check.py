"""`lora-sidecar check` as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sidecar
from sidecar.edges.sample_adapter import write_adapter


def manifest(name: str, uri: str = "", namespace: str = "", created: str = "", **spec: object) -> str:
    metadata = f"name: {name}" + (f", namespace: {namespace}" if namespace else "")
    metadata += f", creationTimestamp: {created}" if created else ""
    more = "".join(f"  {key}: {value}\n" for key, value in spec.items())
    return (
        "apiVersion: lora-sidecar.io/v1alpha1\nkind: Adapter\n"
        f"metadata: {{{metadata}}}\nspec:\n  baseModel: qwen\n  source: {{uri: '{uri or f's3://bucket/{name}'}'}}\n"
        f"{more}---\n"
    )


def check(*arguments: str | Path, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sidecar", "check", *map(str, arguments)],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(sidecar.__file__).parents[1]), "TMPDIR": str(cwd)},
    )


def test_good_documents_are_ok(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("sql") + manifest("chat", namespace="team"))
    done = check("a.yaml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["a.yaml:1 default/sql: ok", "a.yaml:2 team/chat: ok"]


def test_every_fault_has_a_line_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("sql", priority="high", replicas=2) + manifest("chat"))
    (tmp_path / "b.yaml").write_text("kind: [")
    (tmp_path / "c.yaml").write_text("kind: List\nitems:\n- kind: ConfigMap\n  apiVersion: v1\n")
    done = check("a.yaml", "b.yaml", "c.yaml", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "a.yaml:1 default/sql",
        "a.yaml:1 default/sql",
        "a.yaml:2 default/chat",
        "b.yaml",
        "c.yaml:1.1",
        "c.yaml:1.1",
    ]
    assert "did you mean spec.distribution.replicas?" in lines[0]
    assert "spec.priority: 'high'" in lines[1]
    assert lines[2].endswith(": ok")


def test_a_directory_is_read_as_an_agent_reads_it(tmp_path: Path) -> None:
    (tmp_path / "m" / "sub").mkdir(parents=True)
    (tmp_path / "m" / "a.yaml").write_text(manifest("sql"))
    (tmp_path / "m" / "b.json").write_text('{"apiVersion": "lora-sidecar.io/v1alpha1", "kind": "Adapter"}')
    (tmp_path / "m" / ".hidden.yaml").write_text("{")
    (tmp_path / "m" / "notes.md").write_text("{")
    (tmp_path / "m" / "sub" / "c.yaml").write_text("{")
    done = check("m", cwd=tmp_path)
    assert done.returncode == 1
    assert [line.split(" ")[0] for line in done.stdout.splitlines()] == ["m/a.yaml:1", "m/b.json:1:", "m/b.json:1:"]


@pytest.mark.parametrize("text", [manifest("sql"), '{"kind": "AdapterList", "items": []}'])
def test_stdin(tmp_path: Path, text: str) -> None:
    done = check("-", cwd=tmp_path, stdin=text)
    if "items" in text:
        assert (done.returncode, done.stdout) == (1, "-: the file holds no document\n")
    else:
        assert (done.returncode, done.stdout) == (0, "-:1 default/sql: ok\n")


def test_what_cannot_be_read_is_2(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("sql"))
    (tmp_path / "empty").mkdir()
    done = check("nowhere.yaml", "a.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == "a.yaml:1 default/sql: ok\n"
    assert "nowhere.yaml: no such file" in done.stderr
    assert check("empty", cwd=tmp_path).returncode == 2
    assert check(cwd=tmp_path).returncode == 2


def test_duplicates_and_conflicts_across_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        manifest("sql", created="2026-01-02T00:00:00Z") + manifest("own", servedName="qwen")
    )
    (tmp_path / "b.yaml").write_text(
        manifest("sql") + manifest("older", servedName="sql", created="2026-01-01T00:00:00Z")
    )
    (tmp_path / "c.yaml").write_text(
        manifest("far", namespace="team", servedName="sql", created="2026-01-03T00:00:00Z")
    )
    done = check("a.yaml", "b.yaml", "c.yaml", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "a.yaml:1 default/sql: servedName 'sql' belongs to default/older" in lines[0]
    assert "a.yaml:2 default/own: servedName 'qwen' is the name of the base model" in lines[1]
    assert lines[2].startswith("b.yaml:1 default/sql: stands in a.yaml:1 already")
    assert lines[3:5] == ["b.yaml:2 default/older: ok", "c.yaml:1 team/far: ok"]
    assert lines[5].startswith("c.yaml:1 team/far: warning: in one pool, servedName 'sql' belongs to default/older")


def test_plain_http_needs_its_flag(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("sql", "http://host/a.tar.gz"))
    done = check("a.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "--allow-http" in done.stdout
    assert check("a.yaml", "--allow-http", cwd=tmp_path).returncode == 0


def test_fetch_checks_the_files_behind_a_manifest(tmp_path: Path) -> None:
    write_adapter(tmp_path / "good", 1, rank=8)
    write_adapter(tmp_path / "wide", 2, rank=64)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "m.yaml").write_text(
        manifest("good", f"file://{tmp_path}/good")
        + manifest("again", f"file://{tmp_path}/good")
        + manifest("wide", f"file://{tmp_path}/wide")
        + manifest("nothing", f"file://{tmp_path}/nothing")
        + manifest("absent", f"file://{tmp_path}/absent")
        + manifest("wrong", priority="high")
    )
    done = check("m.yaml", "--fetch", "--max-lora-rank", "16", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6, lines
    assert ": ok, sha256:" in lines[0]
    assert "2 files" in lines[0]
    assert lines[1] == lines[0].replace("m.yaml:1 default/good", "m.yaml:2 default/again")
    assert "64" in lines[2]
    assert "16" in lines[2]
    for line, name in zip(lines[3:5], ("nothing", "absent"), strict=True):
        assert f"{tmp_path}/{name}" in line
        assert ": ok" not in line
    assert list(tmp_path.glob("lora-sidecar-check-*")) == []


def test_fetch_holds_a_digest_to_its_word(tmp_path: Path) -> None:
    write_adapter(tmp_path / "good", 1)
    text = manifest("good", f"file://{tmp_path}/good")
    (tmp_path / "m.yaml").write_text(text.replace("}\n---", f", digest: 'sha256:{'ab' * 32}'}}\n---"))
    done = check("m.yaml", "--fetch", cwd=tmp_path)
    assert done.returncode == 1
    assert "abab" in done.stdout


MIXED = """
apiVersion: model.aibrix.ai/v1alpha1
kind: ModelAdapter
metadata: {name: sql}
spec: {baseModel: qwen, podSelector: {}, artifactURL: "hf://org/repo"}
---
apiVersion: nvidia.com/v1alpha1
kind: DynamoModel
metadata: {name: chat}
spec: {modelName: "1e3", baseModelName: qwen, modelType: lora, source: {uri: "s3://bucket/chat"}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
"""


def test_convert_makes_manifests_that_check_finds_good(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(MIXED + "---\n" + manifest("own"))
    done = check("old.yaml", "--convert", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "# from old.yaml, document 1: ModelAdapter\n# note: " in done.stdout
    assert "# old.yaml, document 3: a Service is no adapter; left out\n" in done.stdout
    again = check("-", cwd=tmp_path, stdin=done.stdout)
    assert again.stdout.splitlines() == ["-:1 default/sql: ok", "-:2 default/chat: ok", "-:4 default/own: ok"]
    assert "servedName: '1e3'" in done.stdout


def test_convert_says_what_has_to_be_repaired(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(MIXED.replace("baseModel: qwen, ", ""))
    (tmp_path / "bad.yaml").write_text("kind: [")
    done = check("--convert", "old.yaml", "bad.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "# repair: spec.baseModel" in done.stdout
    assert "# bad.yaml: line" in done.stdout


def test_check_points_to_convert(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(MIXED)
    done = check("old.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "old.yaml:1 default/sql: a ModelAdapter is another system's" in done.stdout
    assert "check --convert" in done.stdout


def test_what_is_no_file_in_a_directory_is_named_and_costs_none_of_the_others(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")  # opened as a file, it would be waited at for ever
    (tmp_path / "b.yaml").symlink_to("b.yaml")
    (tmp_path / "c.yaml").write_text(manifest("sql"))
    done = check(tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == f"{tmp_path}/c.yaml:1 default/sql: ok\n"
    assert done.stderr.splitlines() == [
        f"lora-sidecar check: {tmp_path}/a.yaml: is no regular file",
        f"lora-sidecar check: {tmp_path}/b.yaml: too many levels of symbolic links",
    ]


def test_a_pipe_that_is_named_is_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, manifest("sql").encode())
    os.close(writer)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", "check", f"/dev/fd/{reader}"],
            cwd=Path(sidecar.__file__).parents[1],
            pass_fds=[reader],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(reader)
    assert (done.returncode, done.stdout) == (0, f"/dev/fd/{reader}:1 default/sql: ok\n")
