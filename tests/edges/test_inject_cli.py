"""`lora-sidecar inject` as a person uses it: YAML in, YAML out, on stderr what was done."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sidecar.cli import inject

pytest.importorskip("ruamel.yaml")

GOLDEN = Path(__file__).parent / "golden" / "inject"
CASES = ["deployment", "statefulset", "leaderworkerset", "list"]
IMAGE = "registry.example/lora-sidecar:1"


class Ran:
    """One run of the command."""

    def __init__(self, text: str, *arguments: str) -> None:
        parser = argparse.ArgumentParser()
        inject.add_parser(parser.add_subparsers())
        args = parser.parse_args(["inject", *arguments])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(text))
            patch.setattr("sys.stdout", out := io.StringIO())
            patch.setattr("sys.stderr", err := io.StringIO())
            self.code = args.run(args)
        self.out, self.err = out.getvalue(), err.getvalue()


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    ran = Ran((GOLDEN / f"{case}.yaml").read_text(), "--image", IMAGE)
    assert (ran.code, ran.out) == (0, (GOLDEN / f"{case}.injected.yaml").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_second_run_changes_not_a_byte(case: str) -> None:
    once = (GOLDEN / f"{case}.injected.yaml").read_text()
    again = Ran(once, "--image", IMAGE)
    assert (again.code, again.out) == (0, once)


@pytest.mark.parametrize("case", CASES)
def test_uninject_restores(case: str) -> None:
    before = (GOLDEN / f"{case}.yaml").read_text()
    ran = Ran((GOLDEN / f"{case}.injected.yaml").read_text(), "--uninject")
    assert ran.code == 0
    assert list(yaml.safe_load_all(ran.out)) == list(yaml.safe_load_all(before))
    # Comments too; only the style of a hook that was kept in the record may differ.
    assert case == "statefulset" or ran.out == before
    assert "took the sidecar out" in ran.err
    assert "delete it in the cluster" in ran.err


def test_what_it_does_not_touch_stays_as_it_is_to_the_byte() -> None:
    text = (GOLDEN / "deployment.yaml").read_text()
    service, _, other = text.split("---\n")
    injected = Ran(text).out.split("---\n")
    assert (injected[0], injected[2]) == (service, other)


def test_comments_and_order_stay() -> None:
    out = Ran((GOLDEN / "deployment.yaml").read_text()).out
    for comment in (
        "# Our chat model.",
        "# also the Service's",
        "# comes first",
        "# the engine",
        "# batch",
        "# Left as",
    ):
        assert comment in out
    assert out.index("# the engine") < out.index("name: server") < out.index("- --enable-lora")


def test_it_says_what_it_did_and_what_comes_next() -> None:
    ran = Ran((GOLDEN / "deployment.yaml").read_text())
    assert "Deployment chat: arguments --enable-lora of container server" in ran.err
    assert "Deployment chat: headless Service chat-lora" in ran.err
    assert "kubectl apply -n NAMESPACE -k deploy/base" in ran.err
    assert "kubectl create secret generic lora-sidecar-gossip --from-literal=key=" in ran.err


def test_a_file_instead_of_stdin() -> None:
    assert Ran("", "-f", str(GOLDEN / "list.yaml"), "--image", IMAGE).out == (GOLDEN / "list.injected.yaml").read_text()


def test_json_is_yaml_too() -> None:
    text = json.dumps(yaml.safe_load((GOLDEN / "list.yaml").read_text()), indent=2)
    ran = Ran(text, "--image", IMAGE)
    assert ran.code == 0
    assert yaml.safe_load(ran.out) == yaml.safe_load((GOLDEN / "list.injected.yaml").read_text())


def test_the_program_has_the_command() -> None:
    command = [sys.executable, "-m", "sidecar", "inject", "--image", IMAGE]
    done = subprocess.run(command, input=(GOLDEN / "list.yaml").read_text(), capture_output=True, text=True, check=True)
    assert done.stdout == (GOLDEN / "list.injected.yaml").read_text()


def test_windows_line_ends_and_a_missing_last_one() -> None:
    text = (GOLDEN / "list.yaml").read_text().rstrip("\n").replace("\n", "\r\n")
    ran = Ran(text, "--image", IMAGE)
    assert ran.code == 0
    assert yaml.safe_load(ran.out) == yaml.safe_load((GOLDEN / "list.injected.yaml").read_text())


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("", 1, "no workload with a vLLM container (found: nothing)"),
        ("kind: ConfigMap\n", 1, "(found: ConfigMap)"),
        ("a: [1\n", 2, "no YAML"),
        ("{{- if .x }}\na: 1\n{{- end }}\n", 2, "render it first (helm template)"),
        ("a: 1\na: 2\n", 2, "duplicate key"),
    ],
)
def test_nothing_is_written_when_it_fails(text: str, code: int, reason: str) -> None:
    ran = Ran(text)
    assert (ran.code, ran.out) == (code, "")
    assert reason in ran.err


def test_every_refusal_is_said_at_once() -> None:
    one = (GOLDEN / "list.yaml").read_text().replace('"m", ', '"m", "--api-server-count=2", ')
    two = (GOLDEN / "leaderworkerset.yaml").read_text().replace("/adapters", "/elsewhere")
    ran = Ran(f"{one}---\n{two}")
    assert (ran.code, ran.out) == (1, "")
    assert "Pod solo: --api-server-count 2" in ran.err
    assert "LeaderWorkerSet giant: size 2" in ran.err


def test_a_missing_file_is_named() -> None:
    ran = Ran("", "-f", "/nowhere/x.yaml")
    assert (ran.code, ran.out) == (2, "")
    assert "/nowhere/x.yaml" in ran.err
