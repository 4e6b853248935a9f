"""The faults of `tests/mutations.py`, which .ci/nightly plants, still have their places."""

from __future__ import annotations

import subprocess
import sys

from paths import TESTS


def test_every_fault_has_its_place() -> None:
    command = [sys.executable, str(TESTS / "mutations.py"), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
