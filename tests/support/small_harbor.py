"""Small tasks in Harbor's format, written where they are needed."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEST = """#!/bin/bash
mkdir -p /logs/verifier
{ending}
if [ "$(cat /app/sum.txt)" = "$(cat /tests/expected.txt)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLUTION = "#!/bin/bash\necho $(($(cat a.txt) + $(cat data/b.txt))) > /app/sum.txt\n"
DOCKERFILE = """# what a task needs
FROM ubuntu:24.04
WORKDIR /app
ENV WHO=me PLACE='the sandbox'
COPY a.txt ./
COPY data /app/data
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def task(folder: Path, a: int, b: int, ending: str = "") -> Path:
    """One that asks for a sum. `ending`: what its tests do before they grade."""
    files = {
        "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 20.0\n',
        "instruction.md": f"Write the sum of {a} and {b}, the numbers in a.txt and data/b.txt, to /app/sum.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/a.txt": str(a),
        "environment/data/b.txt": str(b),
        "tests/test.sh": TEST.format(ending=ending),
        "tests/expected.txt": str(a + b),
        "solution/solve.sh": SOLUTION,
    }
    return write(folder, files)


@contextmanager
def tasks(n: int = 4, ending: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """What `agl.environments.load` takes, for a folder of `n` tasks."""
    with tempfile.TemporaryDirectory(prefix="agl-small-harbor-") as folder:
        for i in range(n):
            task(Path(folder, f"sum-{i}"), i, 10 * i + 3, ending)
        yield f"harbor:{folder}", {"command_seconds": 20.0}


def calls(*commands: str) -> list[dict[str, Any]]:
    """A policy's answers that run these commands, one after the other."""
    return [
        {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": {
            "name": "bash", "arguments": json.dumps({"command": command})}}]}
        for command in commands
    ]  # fmt: skip


def solve(question: str) -> str:
    """The command with which a policy solves it."""
    return f"test {shlex.quote(question)} && bash -c {shlex.quote(SOLUTION)}"
