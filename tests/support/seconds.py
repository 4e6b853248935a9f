"""`pytest -p seconds`: what each test costs in seconds of processor time, its programs included (docs/testing.md).

Unlike seconds on a clock these hardly depend on what else the machine does. `AGL_TEST_SECONDS` names the file to which
each test adds a line of JSON: its id, and its seconds with those of the fixtures that it was the first to need.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


def used() -> float:
    """User and system seconds of this process, of its programs that ended, and of those that still run."""
    total = sum(os.times()[:4])
    for process in psutil.Process().children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            pass  # it has ended since, and is counted with the next test
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = used()
    result = yield
    line = json.dumps({"test": item.nodeid, "seconds": round(used() - before, 3)})
    with Path(os.environ["AGL_TEST_SECONDS"]).open("a") as file:
        file.write(line + "\n")
    return result
