"""What the processes of a test run share: models that are made once, and turns at what only one may have."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MAX_WORKERS = 4


def workers() -> int:
    """Over how many processes the fast tier is spread: one per core that this process may use, and at most four."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first process to need it makes, and for which the others wait.

    Args:
        make: fills the folder, which exists.
    """
    with alone(factory, name) as base:
        folder = base / f"shared-{name}"
        if not folder.exists():
            partial = Path(tempfile.mkdtemp(dir=base))
            make(partial)
            partial.rename(folder)
    return folder


@contextmanager
def alone(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A block in which one process at a time is. Gives the folder that all of them share.

    These are the processes of one pytest run, or of all runs with the same $AGL_TEST_SHARED: a folder for runs of one
    tree in one environment, since nothing notices that what made its contents has changed.
    """
    base = factory.getbasetemp()
    if folder := os.environ.get("AGL_TEST_SHARED"):
        base = Path(folder)
        base.mkdir(parents=True, exist_ok=True)
    elif "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield base
