"""The first process of a Harbor task's sandbox: it writes files, runs commands, and hands back what they print or
write. Only the standard library.

A job comes on standard input, its report goes to standard output. Nothing that a job has started outlives its report.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import sys
from typing import Any

from agl.trainer.graders.programs.inside import plain, supervisor

ROOT = "/tmp/root"
"""What the task's own folders, such as /app, are links into."""


def main() -> None:
    """Run jobs until standard input ends. The argument is a uid to become if this is root."""
    supervisor.begin(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        while True:
            job = plain.parse(plain.receive(0))
            try:
                report = _done(job)
            except (OSError, RecursionError) as error:  # a full disk, folders that the policy has made unreadable
                report = {"reason": f"{type(error).__name__}: {error}", "output": ""}
            plain.send(1, report)


def _done(job: dict[str, Any]) -> dict[str, Any]:
    for folder in job["emptied"]:
        shutil.rmtree(folder) if os.path.isdir(folder) and not os.path.islink(folder) else None
        os.makedirs(folder)
    for path, (content, mode) in job["files"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
        os.chmod(path, mode)
    output = os.open(f"{ROOT}/.output", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.unlink(f"{ROOT}/.output")

    try:
        ended = supervisor.watched(lambda: _run(job, output), job)
        size, most = os.fstat(output).st_size, job["output_bytes"]
        shown = os.pread(output, most, max(0, size - most)).decode(errors="replace")
    finally:
        os.close(output)
    return {**ended, "output": "...\n" * (size > most) + shown}


def _run(job: dict[str, Any], output: int) -> None:
    os.chdir(job["workdir"])
    supervisor.confine(job)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1 << 10)
    own = {"HOME": f"{ROOT}/.home", "PWD": job["workdir"]}
    os.execve("/bin/bash", ["bash", "-c", job["command"]], {**os.environ, **own, **job["environment"]})
