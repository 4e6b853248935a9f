"""What a run says of its machine is what the system says of its processes."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agl.trainer.run.machine import Machine

BUSY = """
import time
block = bytearray(200_000_000)
while time.process_time() < 0.6:
    pass
print(flush=True)
input()
"""


def test_processors_and_memory_of_a_program_that_was_started() -> None:
    machine = Machine()
    before, began = machine.since()["machine/memory_gb"], time.monotonic()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        found, elapsed = machine.since(), time.monotonic() - began
        busy.communicate(b"\n")
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    assert 0.55 <= found["machine/cores"] * elapsed <= used + 0.05
    assert found["machine/memory_gb"] - before == pytest.approx(0.2, abs=0.05)
    assert machine.since()["machine/memory_gb"] == pytest.approx(resident() / 1e9, abs=0.05)
    # What the program has used is not used again now that it has ended.
    began = time.monotonic()
    time.sleep(0.2)
    assert machine.since()["machine/cores"] * (time.monotonic() - began) < 0.4


def resident() -> int:
    """Bytes of this process and of those below it: the tests have some that policies are forked from."""
    parents, pages = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parents[process.name] = (process / "stat").read_text().rpartition(")")[2].split()[1]
            pages[process.name] = int((process / "statm").read_text().split()[1])

    def is_below(process: str) -> bool:
        return process == str(os.getpid()) or (process in parents and is_below(parents[process]))

    return sum(n for process, n in pages.items() if is_below(process)) * os.sysconf("SC_PAGE_SIZE")
