"""Agent Lightning 0.3.0's own tests run on `agl.compat`, where they are there: they are no part of this project."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from paths import ROOT

RUN = Path(os.environ.get("AGL_AL03") or ROOT.parent / "shared" / "al03") / "run.sh"
LEAST = 255
"""Of 265; docs/from-agent-lightning.md says which are not to pass."""


@pytest.mark.slow
@pytest.mark.skipif(not RUN.exists(), reason="Agent Lightning 0.3.0's tests are not there")
@pytest.mark.night
def test_agent_lightnings_own_tests_pass(tmp_path: Path) -> None:
    # The script sets PYTHONPATH itself: this environment, with the tree before any installed copy of it.
    venv.create(tmp_path / "venv")
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    here = {sysconfig.get_paths()[k] for k in ("purelib", "platlib")}
    (site / "a.pth").write_text(f"{ROOT / '.src'}\n")
    (site / "b.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in sorted(here)))
    done = subprocess.run(
        ["bash", RUN, tmp_path / "venv" / "bin" / "python"],
        capture_output=True, text=True, env={**os.environ, "AL03_WHY": "1", "AGL_COMPAT_MIN": "0"},
    )  # fmt: skip
    if "cannot be had" in done.stdout:
        pytest.skip(done.stdout)
    passed = re.search(r"^(\d+) of (\d+) applicable", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout + done.stderr
    assert int(passed[1]) >= LEAST, done.stdout
