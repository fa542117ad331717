"""The program from its first moment on."""

from __future__ import annotations

import subprocess
import sys

TERMINATED_WHILE_IMPORTING = """
import os, signal, sys
from sidecar.__main__ import main

class Terminated:
    def find_spec(self, name, path=None, target=None):
        if name == "sidecar.cli.run":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Terminated())
sys.exit(main(["run", "--help"]))
"""


def test_a_sigterm_while_modules_are_imported_is_not_left_to_the_default_that_pid_1_lacks() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TERMINATED_WHILE_IMPORTING], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (143, ""), ended.stderr
