"""Ctrl-C: a run on a Ray of its own ends within seconds, says what is saved, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import psutil
import pytest
from paths import pythonpath
from processes import Programs

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent


def test_ctrl_c_leaves_nothing_behind(tiny_policy: Path, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    programs = Programs(tmp_path, {"PYTHONPATH": pythonpath(HERE), "AGL_TEST_MARK": mark})
    try:
        run = programs.start(
            os.sys.executable, HERE / "programs" / "interrupted.py", tiny_policy, tmp_path / "run", log="run.log"
        )
        programs.until(lambda: "step 2/" in programs.text("run.log") or run.poll() is not None, 500, "the second step")
        assert run.poll() is None, programs.text("run.log")
        os.kill(run.pid, signal.SIGINT)
        assert run.wait(timeout=60) == 130, programs.text("run.log")
    finally:
        programs.end()
    said = programs.text("run.log")
    assert "global_step_" in said
    assert "resume=True" in said
    end = time.monotonic() + 30
    while (left := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.5)
    assert left == []


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("AGL_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:100])
        except psutil.Error:
            continue
    return found
