"""The process that runs a candidate program against tests for `agl.rewards.PythonTests`: a JSON job in, a report out.

Each test runs in a separate fork that first runs the candidate, so that tests cannot disturb one another and one that
hangs or dies affects no other. A fork proves that it passed by a secret that it alone has from the driver. Processes
that a candidate leaves behind, daemons included, are killed after its test (Linux: the driver adopts orphans).
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import resource
import secrets
import select
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

LOADED = b"L"
MAX_MESSAGE = 2000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Read a job from standard input, run its tests, write the outcomes to standard output."""
    job = json.load(sys.stdin)
    report = os.dup(1)
    control_process(PR_SET_CHILD_SUBREAPER, 1)
    limit_processes(job["processes"])
    deadline = time.monotonic() + job["total_timeout"]
    outcomes: list[str] = []
    for test in job["tests"]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            outcomes.append("no time left")
            continue
        loaded, outcome = run(job, test, min(job["timeout"], remaining), report)
        outcomes.append(outcome)
        if not loaded:  # every other test would end alike
            outcomes += [outcome] * (len(job["tests"]) - len(outcomes))
            break
    os.write(report, json.dumps(outcomes).encode())


def run(job: dict[str, Any], test: dict[str, Any], timeout: float, report: int) -> tuple[bool, str]:
    """Run one test in a fork: (whether the candidate itself ran, "passed" or the reason why it failed)."""
    reader, writer = os.pipe()
    secret = secrets.token_bytes(16)
    printed = Path(f"printed-{secrets.token_hex(8)}").absolute()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.close(report)
        try:
            child(job, test, secret, writer, printed)
        finally:
            os._exit(1)
    os.close(writer)
    message, status = listen(reader, pid, time.monotonic() + timeout)
    os.close(reader)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    reap()
    if status is None:
        return message.startswith(LOADED), "ran out of time"
    passed, error = secret in message, message.removeprefix(LOADED)
    if passed and test["kind"] == "stdin":
        with contextlib.suppress(OSError):
            same = lines(printed.read_text(errors="replace")) == lines(test["output"])
            return True, "passed" if same else "printed something else"
        passed = False
    with contextlib.suppress(OSError):
        printed.unlink()
    if passed:
        return True, "passed"
    if os.WIFSIGNALED(status):
        return message.startswith(LOADED), f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return message.startswith(LOADED), error.decode(errors="replace") or "ended early"


def listen(reader: int, pid: int, deadline: float) -> tuple[bytes, int | None]:
    """What a fork writes until it ends, and its wait status; None if it does not end in time and is killed."""
    message, is_open = b"", True
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        while is_open and select.select([reader], [], [], 0 if done else 0.005)[0]:
            data = os.read(reader, 4096)
            is_open = bool(data)
            message = (message + data)[: 4 * MAX_MESSAGE]
        if done:
            return message, status
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return message, None
        if not is_open:
            time.sleep(0.002)


def child(job: dict[str, Any], test: dict[str, Any], secret: bytes, writer: int, printed: Path) -> None:
    """In the fork: limits, then the candidate, then the test."""
    os.setsid()
    control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    stdin = test["input"] if test["kind"] == "stdin" else ""
    Path("stdin").write_text(stdin)
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out if test["kind"] != "stdin" else os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(writer, 3)
    os.closerange(4, 1024)
    for stream, mode in ((0, "r"), (1, "w"), (2, "w")):
        opened = os.fdopen(stream, mode, encoding="utf-8", errors="replace")
        setattr(sys, ("stdin", "stdout", "stderr")[stream], opened)
    limits(job)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    write = os.write
    try:
        module = types.ModuleType("__main__" if test["kind"] == "stdin" else "solution")
        sys.modules[module.__name__] = module
        sys.argv = ["solution.py"]
        try:
            exec(compile(job["code"], "solution.py", "exec"), module.__dict__)
        except SystemExit as ending:
            if test["kind"] != "stdin" or ending.code not in (None, 0):
                raise
        sys.stdout.flush()
        write(3, LOADED)
        if test["kind"] != "stdin":
            check(test, module)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            write(3, f"{type(error).__name__}: {error}"[:MAX_MESSAGE].encode(errors="replace"))
        os._exit(1)
    write(3, secret)
    os._exit(0)


def check(test: dict[str, Any], module: types.ModuleType) -> None:
    """Run a test's code in the candidate's module; then call its function, if it is one."""
    exec(compile(test["code"], "tests.py", "exec"), module.__dict__)
    if test["call"]:
        function, argument = module.__dict__[test["call"]], test.get("argument")
        function(*([module.__dict__[argument]] if argument else []))


def limits(job: dict[str, Any]) -> None:
    """Bound what a fork may use."""
    seconds, size = int(job["cpu_seconds"]), job["file_mb"] << 20
    for what, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, job["memory_mb"] << 20, job["memory_mb"] << 20),
        (resource.RLIMIT_FSIZE, size, size),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (soft, hard))


def limit_processes(more: int) -> None:
    """Allow at most `more` processes and threads than this user has now; the superuser is not limited."""
    mine = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            facts = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if int(facts["Uid"].split()[0]) == os.getuid():
                mine += int(facts["Threads"])
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        limit = mine + 1 + more if hard == resource.RLIM_INFINITY else min(mine + 1 + more, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


def control_process(option: int, value: int) -> None:
    """Linux's prctl; nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def reap() -> None:
    """Kill and reap every process that a test left behind."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for pid in children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def children() -> list[int]:
    """The ids of this process's children, also of adopted ones."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                pids.append(int(stat.parent.name))
    return pids


def lines(text: str) -> list[str]:
    """The lines of a program's output that are compared: without trailing spaces and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def split(source: str, entry_point: str | None) -> list[dict[str, Any]]:
    """The tests in a text of Python: `check(candidate)`, else each top-level `assert` and `test_*` function.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it holds no test.
    """
    tree = ast.parse(source)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "check" in names and entry_point:
        return [{"kind": "python", "code": source, "call": "check", "argument": entry_point}]
    setup = [node for node in tree.body if not isinstance(node, ast.Assert)]
    common = "\n".join(ast.unparse(node) for node in setup)
    tests: list[dict[str, Any]] = []
    for node in tree.body:
        if isinstance(node, ast.Assert):
            tests.append({"kind": "python", "code": f"{common}\n{ast.unparse(node)}", "call": None})
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            tests.append({"kind": "python", "code": common, "call": node.name})
    if not tests:
        raise ValueError("it holds no assert, no test_* function, and no check() with an entry point")
    return tests


if __name__ == "__main__":
    main()
