"""pytest tests the tree that it is started in, also where another copy of agl is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

BROKEN = """

_right = Uniform.__call__
Uniform.__call__ = lambda self, trajectory: [value + 1.0 for value in _right(self, trajectory)]
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree, links included."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for folder in (".src", "core", "adapters", "trainer", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_credit.py"]
    # What is said of this tree's place to programs that tests start would hide what pytest finds by itself.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("PYTEST")}
    return subprocess.run(
        [*command, "-k", "uniform"], cwd=tree, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.night
def test_what_is_broken_in_the_tree_fails_its_tests(tree: Path) -> None:
    whole = run(tree)
    assert whole.returncode == 0, whole.stdout
    module = tree / "core" / "credit.py"
    module.write_text(module.read_text() + BROKEN)
    broken = run(tree)
    assert broken.returncode == 1, broken.stdout
    assert " failed" in broken.stdout
