"""Models that are made once for all of a run's processes, and the fast tier's number of processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

WORKERS = 4
"""The fast tier takes at most so many processes, however many cores there are."""


def workers() -> int:
    """How many processes the fast tier is spread over: one per core that this process may use."""
    return min(len(os.sched_getaffinity(0)), WORKERS)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first process to need it makes, and for which the others wait.

    It is shared by the processes of one pytest run, or by all runs with the same $AGL_TEST_SHARED: a folder for runs of
    one tree in one environment, since nothing notices that what made its contents has changed.

    Args:
        make: fills the folder, which exists.
    """
    base = factory.getbasetemp()
    if folder := os.environ.get("AGL_TEST_SHARED"):
        base = Path(folder)
        base.mkdir(parents=True, exist_ok=True)
    elif "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    whole = base / f"shared-{name}"
    with (base / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            partial = factory.mktemp(name)
            make(partial)
            partial.rename(whole)
    return whole
