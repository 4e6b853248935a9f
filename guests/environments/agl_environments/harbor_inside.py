"""The first process of a Harbor task's sandbox: it lays out files, runs commands, and hands back what they print or
write. Only the standard library, and what of agl's needs no more.

A job comes on standard input, its report goes to standard output. Nothing that a job has started outlives its report,
and a report has its job's number, which nothing that a job starts has seen.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from agl.rewards.files import read_text
from agl.trainer.graders.programs.inside import copies, plain, supervisor

ROOT = "/tmp/root"
"""What the task's own folders, such as /app, are links into."""
HOME = f"{ROOT}/.home"


def main() -> None:
    """Run jobs until standard input ends. The argument is a uid to become if this is root."""
    supervisor.begin(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        while True:
            job = plain.parse(plain.receive(0))
            report: dict[str, Any]
            try:
                report = _JOBS[job["kind"]](job)
            except copies.Refused as error:
                report = {"reason": str(error), "output": ""}
            except (OSError, RecursionError) as error:
                report = {"reason": f"{type(error).__name__}: {error}", "output": ""}
            entries = report.pop("entries", None)
            plain.send(1, {**report, "number": job["number"], "packed": entries is not None})
            if entries is not None:
                copies.send(1, ROOT, entries)


def _made(job: dict[str, Any]) -> dict[str, Any]:
    """Make the folders of a new root, with a copy or not."""
    for folder in job["folders"]:
        os.makedirs(folder, exist_ok=True)
    if job["copied"]:
        copies.lay_out(copies.parts(0, job["most_bytes"]), ROOT, exact=True)
    _write(job["files"])
    return {"output": ""}


def _packed(job: dict[str, Any]) -> dict[str, Any]:
    """Find what is in folders of the root; it follows the report."""
    try:
        entries = copies.found(ROOT, job["tops"], job["most_bytes"], job["links"])
    except OSError as error:
        raise copies.Refused(f"files that cannot be read: {error}") from error
    if job["workdir"] not in {f"/{entry.name}" for entry in entries if entry.isdir()}:
        raise copies.Refused("no working directory")
    return {"entries": entries, "output": ""}


def _ran(job: dict[str, Any]) -> dict[str, Any]:
    """Run a command, and read files that it may have written."""
    _write(job["files"])
    # A file without a name, in whose place nothing can have been put.
    output = os.open("/tmp", os.O_RDWR | os.O_TMPFILE | os.O_APPEND, 0o600)
    try:
        ended = supervisor.watched(lambda: _run(job, output), job)
        size = os.fstat(output).st_size
        most = job["output_bytes"]
        shown = os.pread(output, most, max(0, size - most)).decode(errors="replace")
    finally:
        os.close(output)
    # Only /tmp itself is sure to be a folder still.
    texts = [read_text(f"{ROOT}{path}", folder="/tmp", max_bytes=job["output_bytes"]) for path in job["read"]]
    return {**ended, "ran": True, "output": "...\n" * (size > most) + shown, "texts": texts}


def _run(job: dict[str, Any], output: int) -> None:
    os.chdir(job["workdir"])
    supervisor.confine(job)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1 << 10)
    own = {"HOME": HOME, "PWD": job["workdir"]}
    os.execve("/bin/bash", ["bash", "-c", job["command"]], {**os.environ, **own, **job["environment"]})


def _write(files: dict[str, tuple[str, int]]) -> None:
    for path, (content, mode) in files.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
        os.chmod(path, mode)


_JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"make": _made, "pack": _packed, "run": _ran}
