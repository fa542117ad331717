"""The image as far as it can be tried without a container runtime: its build stage's commands, and its user."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar import __version__
from tests.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
HOME = "/opt/lora-sidecar"
Instruction = tuple[str, str]


def stages() -> list[list[Instruction]]:
    """The Dockerfile's instructions by stage, without comments and with continued lines put together."""
    text = (REPOSITORY / "deploy" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    found: list[list[Instruction]] = []
    for line in filter(None, joined):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        elif found:
            found[-1].append((word, rest))
    return found


def test_the_image_is_what_a_restricted_pod_needs() -> None:
    _, final = stages()
    told = dict(final)
    assert told["USER"] == "65532:65532"
    assert json.loads(told["ENTRYPOINT"]) == ["lora-sidecar"]
    assert [rest for word, rest in final if word == "COPY"] == [f"--from=build {HOME} {HOME}"]
    assert f'org.opencontainers.image.version="{__version__}"' in told["LABEL"]


def test_only_what_is_built_goes_to_the_builder() -> None:
    build, _ = stages()
    copied = {name for word, rest in build if word == "COPY" for name in rest.split()[:-1]}
    allowed = {
        line[1:]
        for line in (REPOSITORY / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == allowed


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    """A directory that anybody may read, in which the build stage's commands have been run: `src`, `venv`."""
    place = Path(tempfile.mkdtemp(prefix="lora-image-"))
    place.chmod(0o755)
    source, home = place / "src", place / "venv"
    source.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTUAL_ENV", "PYTHON"))}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for word, rest in stages()[0]:
        if word == "COPY":
            *names, _ = rest.split()
            for name in names:
                copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
                copy(REPOSITORY / name, source / name)
        elif word == "RUN":
            command = rest.replace(HOME, str(home))
            done = subprocess.run(["sh", "-ec", command], cwd=source, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    yield place
    shutil.rmtree(place)


def as_the_images_user(place: Path) -> tuple[list[str], dict[str, str]]:
    """Words that begin a command run by the image's user, and its variables, with a home that nothing is written in.

    It may read everything, since a test's interpreter may lie in root's home, and write no more than its user may.
    """
    final = dict(stages()[1])
    user, group = final["USER"].split(":")
    empty = place / "home"
    empty.mkdir(exist_ok=True)
    empty.chmod(0o555)
    variables = dict(pair.split("=", 1) for pair in final["ENV"].split())
    path = variables["PATH"].replace(HOME, str(place / "venv")).replace("$PATH", "/usr/bin:/bin")
    words = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--bounding-set=-all,+dac_read_search"]
    words += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return words, variables | {"PATH": path, "HOME": str(empty)}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become the image's user")
def test_what_the_build_makes_runs_as_the_images_user(built: Path) -> None:
    user, variables = as_the_images_user(built)
    assert not (built / "venv" / "bin" / "pip").exists()
    program = [*user, "lora-sidecar"]
    helped = subprocess.run([*program, "--help"], capture_output=True, text=True, cwd="/", env=variables)
    assert helped.returncode == 0, helped.stderr
    assert "inject" in helped.stdout
    before = set(built.rglob("*"))
    adapters, manifests = built / "adapters", built / "manifests"
    for directory in (adapters, manifests):
        directory.mkdir()
    os.chown(adapters, 65532, 65532)
    listen = f"127.0.0.1:{free_port()}"
    words = ["run", "--backend", "standalone", "--manifests", str(manifests), "--adapters-dir", str(adapters)]
    agent = subprocess.Popen(
        [*program, *words, "--listen", listen, "--advertise", listen],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        env=variables,
    )
    try:
        until_healthy(agent, f"http://{listen}/healthz")
    finally:
        agent.terminate()
        said, _ = agent.communicate(timeout=30)
    assert agent.returncode == 0, said
    assert "Traceback" not in said
    written = set(built.rglob("*")) - before - {adapters, manifests}
    assert written
    assert all(adapters in path.parents for path in written), "it writes below --adapters-dir alone"


def until_healthy(agent: subprocess.Popen[str], url: str) -> None:
    for _ in range(300):
        assert agent.poll() is None, agent.stdout and agent.stdout.read()
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} did not answer within 30 s")
