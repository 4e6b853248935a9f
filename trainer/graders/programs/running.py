"""Runs a program against its tests, in two sandboxes: one for the program, one for what judges it.

The two have no channel to each other. What they say to one another passes through here, a question and an answer at a
time, and the verdict is read from the judge alone. Whatever ends badly on the way is the program's failure, except for
walls that cannot be made or are lost and tests that cannot be run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agl.trainer.graders.programs.inside import judge, plain, program, supervisor
from agl.trainer.processes.sandbox import PATH, Sandbox, Walls

MOST_ANSWER = 8 << 20
"""Bytes of one answer of a program."""
START_SECONDS = 60.0
SPARES = 2
"""Sandboxes that are started before there is a job for them: a program and its judge."""

INSIDE = "/agl"
"""Where a sandbox has agl's own modules."""

_GRACE_SECONDS = 5.0
_END_SECONDS = 0.5
_FIRST_UID = 58_000
_UIDS = 2_000
_ROOT = Path(__file__).parents[4]
_HERE = Path(supervisor.__file__).parent
MODULES = {f"{INSIDE}/{_HERE.relative_to(_ROOT)}": str(_HERE)}
"""Path inside -> path here."""


class Unusable(Exception):
    """No test can be run, through no fault of the program."""


class _Late(Exception):
    """The time of a test is over."""


class Cell:
    """A sandbox with `inside.supervisor` in it, which runs one job after the other for one owner.

    Attributes:
        clean: whether nothing is left of the jobs so far, so that it can run another.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        streams = [stream for stream in (process.stdin, process.stdout, process.stderr) if stream]
        self._in, self._out, self._reports = (stream.fileno() for stream in streams)
        os.set_blocking(self._in, False)
        self._started = False
        self.clean = True

    def ready(self) -> Cell:
        """Wait until it has started.

        Raises:
            Unusable: it could not be made.
        """
        output = b""
        deadline = time.monotonic() + START_SECONDS
        while not self._started:
            with contextlib.suppress(_Late):
                _wait(deadline, select.POLLIN, self._reports)
                output += (part := os.read(self._reports, 4096))
                self._started = output.endswith(supervisor.READY)
                if part:
                    continue
            self.close()
            text = output.decode(errors="replace").strip().splitlines()
            raise Unusable(text[-1] if text else "a sandbox did not start")
        if not self.alive:
            raise Unusable("a sandbox ended while it waited for a program")
        return self

    def begin(self, job: dict[str, Any]) -> None:
        """Have a job run."""
        self.clean = False
        with contextlib.suppress(OSError, _Late):  # its end is reported as that of the job
            self.send(json.dumps(job).encode(), time.monotonic() + START_SECONDS)

    def send(self, message: bytes, deadline: float) -> None:
        """Write to what the job runs.

        Raises:
            _Late: it does not read.
            OSError: it is gone.
        """
        data = plain.framed(message)
        while data:
            _wait(deadline, select.POLLOUT, self._in)
            data = data[os.write(self._in, data) :]

    def receive(self, deadline: float) -> bytes | None:
        """What it writes next; None if it has ended.

        Raises:
            _Late: it has not, in time.
            plain.Malformed: it is too long.
        """

        def wait() -> None:
            if self._out not in _wait(deadline, select.POLLIN, self._out, self._reports):
                raise EOFError

        try:
            return plain.receive(self._out, MOST_ANSWER, wait)
        except EOFError:
            return None

    def printed(self, deadline: float, most: int) -> bytes:
        """All that it prints until it ends, or more than `most` bytes of it."""
        data = bytearray()
        while len(data) <= most:
            ready = _wait(deadline, select.POLLIN, self._out, self._reports)
            if self._out in ready and (part := os.read(self._out, 1 << 16)):
                data += part
            elif self._reports in ready:
                break
            else:  # it has closed its output
                _wait(deadline, select.POLLIN, self._reports)
                break
        return bytes(data)

    def ending(self, deadline: float) -> tuple[str, str]:
        """(how the job ended, the error that it wrote).

        Raises:
            Unusable: its sandbox was lost.
        """
        wait = functools.partial(_wait, deadline, select.POLLIN, self._reports)
        try:
            report = plain.parse(plain.receive(self._reports, 1 << 20, wait))
        except _Late:
            return "ran out of time", ""
        except EOFError:
            return "ended its sandbox", ""
        except plain.Malformed:  # what has made the sandbox says why it is gone
            raise Unusable(os.read(self._reports, 4096).decode(errors="replace").strip()) from None
        self.clean = report["clean"] and report.get("status") == 0
        if "reason" in report:
            return report["reason"], ""
        status = report["status"]
        if os.WIFSIGNALED(status):
            return f"killed by {_signal_name(os.WTERMSIG(status))}", ""
        return f"exited with {os.WEXITSTATUS(status)}", report.get("error", "")

    def close(self) -> None:
        """End it with all that it runs."""
        with self._process as process:
            assert process.stdin
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            process.kill()

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None


def _wait(deadline: float, event: int, *fds: int) -> set[int]:
    """Those of the descriptors that can be read or written, or whose other end is gone. Not by `select`, which knows
    no descriptor above 1,023.

    Raises:
        _Late: none, in time.
    """
    events = select.poll()
    for fd in fds:
        events.register(fd, event)
    if not events.poll(1000 * max(0.0, deadline - time.monotonic())):
        raise _Late
    # What was written before a report is there by now.
    return {fd for fd, _ in events.poll(0)}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


class Pool:
    """Starts sandboxes for programs of one interpreter within the same walls, some of them ahead.

    Args:
        python: the interpreter, on this machine.
    """

    def __init__(self, sandbox: Sandbox, python: str, walls: Walls) -> None:
        self._sandbox = sandbox
        self._walls = walls
        root = INSIDE if sandbox.mounts else str(_ROOT)
        start = f"import sys; sys.path.insert(0, {root!r}); from {supervisor.__name__} import main; main()"
        self._command = [sandbox.python or python, "-I", "-c", start]
        self._spares: collections.deque[concurrent.futures.Future[subprocess.Popen[bytes]]] = collections.deque()
        self._judges: collections.deque[Cell] = collections.deque()
        # One thread, as the kernel ends a sandbox with the thread that has started it.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "agl-sandboxes")
        self._uids = itertools.count(os.getpid())
        self._lock = threading.Lock()

    def cell(self) -> Cell:
        """A sandbox that no program has been in."""
        with self._lock:
            started = self._spares.popleft() if self._spares else self._start()
            while len(self._spares) < SPARES:
                self._spares.append(self._start())
        try:
            return Cell(started.result())
        except OSError as error:
            raise Unusable(str(error)) from error

    def judge(self) -> Cell:
        """A sandbox that nothing but tests has been in, which are trusted."""
        with contextlib.suppress(IndexError):
            while True:
                if (cell := self._judges.pop()).alive:
                    return cell
                cell.close()
        return self.cell()

    def leave(self, cell: Cell) -> None:
        """Take back what `judge` gave."""
        if cell.clean:
            self._judges.append(cell)
        else:
            cell.close()

    def _start(self) -> concurrent.futures.Future[subprocess.Popen[bytes]]:
        # Another uid for each, so that the processes of one are not counted as another's.
        command = [*self._command, str(_FIRST_UID + next(self._uids) % _UIDS)]
        return self._starter.submit(self._sandbox.start, command, self._walls)


@functools.cache
def pool(sandbox: Sandbox, python: str, memory_mb: int, file_mb: int, processes: int, _owner: int) -> Pool:
    """The pool of a process, `_owner`, for these settings.

    Raises:
        Unusable: the interpreter does not work.
    """
    folders = dict(MODULES)
    environment = {"PATH": PATH, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if not sandbox.python:
        folders |= {path: path for path in interpreter_folders(python)}
        libraries = os.environ.get("LD_LIBRARY_PATH", "")
        environment |= {"LD_LIBRARY_PATH": libraries} if libraries else {}
    walls = Walls(
        folders=folders, environment=environment, memory_mb=memory_mb, scratch_mb=file_mb, processes=processes
    )
    return Pool(sandbox, python, walls)


@functools.cache
def interpreter_folders(python: str) -> list[str]:
    """What a program needs to be readable, of an interpreter and of libraries: paths here, by whatever links they lead.

    Raises:
        Unusable: the interpreter does not work.
    """
    ask = "import json, sys; print(json.dumps([sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix]))"
    try:
        done = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, timeout=START_SECONDS)
        prefixes = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise Unusable(f"cannot start {python!r}: {error}") from error
    libraries = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path.startswith("/")]
    folders = {os.path.abspath(path) for path in (*prefixes, *libraries) if os.path.isdir(path)}
    folders.add(os.path.abspath(shutil.which(python) or python))
    return sorted(path for path in folders if not path.startswith("/usr/") and path not in ("/", "/usr"))


def outcomes(cells: Pool, job: dict[str, Any]) -> list[str]:
    """Run a job's tests: for each "passed", or the reason why it failed.

    Args:
        job: `code`, `tests`, `timeout`, `total_timeout`, `cpu_seconds`, `memory_mb`, `file_mb`, `processes`.

    Raises:
        Unusable: no test can be run.
    """
    deadline = time.monotonic() + job["total_timeout"]
    results: list[str] = []
    with _Reused(cells.cell, Cell.close) as programs, _Reused(cells.judge, cells.leave) as judges:
        for test in job["tests"]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                results.append("no time left")
                continue
            loaded, outcome = _run(programs, judges, job, test, min(job["timeout"], remaining))
            results.append(outcome)
            if not loaded:  # every other test would end alike
                results += [outcome] * (len(job["tests"]) - len(results))
                break
    return results


class _Reused:
    """One sandbox after the other: the same as long as it stays clean."""

    def __init__(self, take: Callable[[], Cell], leave: Callable[[Cell], object]) -> None:
        self._take = take
        self._leave = leave
        self._cell: Cell | None = None

    def __enter__(self) -> _Reused:
        return self

    def __exit__(self, *_: object) -> None:
        if self._cell:
            self._leave(self._cell)

    def cell(self) -> Cell:
        """One that has started, with nothing in it."""
        if self._cell and not self._cell.clean:
            self._cell.close()
            self._cell = None
        self._cell = self._cell or self._take().ready()
        return self._cell


def _run(
    programs: _Reused, judges: _Reused, job: dict[str, Any], test: dict[str, Any], timeout: float
) -> tuple[bool, str]:
    """Run one test: (whether the other tests are worth a try, "passed" or the reason why it failed)."""
    limits = {name: job[name] for name in ("cpu_seconds", "memory_mb", "file_mb", "processes")} | {"seconds": timeout}
    running = limits | {"code": job["code"], "kind": test["kind"], "input": test.get("input", "")}
    loaded = test["kind"] == "stdin"
    candidate = programs.cell()
    judging = None if loaded else judges.cell()
    candidate.begin(running)
    deadline = time.monotonic() + timeout
    try:
        if judging is None:
            return loaded, _printed(candidate, test, deadline, job["file_mb"] << 20)
        if candidate.receive(deadline) is None:
            return loaded, _ended(candidate, deadline)
        loaded = True
        nonce = secrets.token_hex(16)
        judging.begin(limits | {"kind": "test", "test": test, "nonce": nonce, "cpu_seconds": math.ceil(timeout) + 1})
        return loaded, _judged(candidate, judging, nonce.encode(), deadline)
    except plain.Malformed as error:
        return loaded, f"gave no answer that can be read: {error}"
    except _Late:
        return loaded, "ran out of time"
    except BrokenPipeError:
        return loaded, _ended(candidate, deadline)


def _judged(candidate: Cell, judging: Cell, nonce: bytes, deadline: float) -> str:
    """Carry questions and answers between the two until there is a verdict."""
    while (message := judging.receive(deadline)) is not None:
        if message[:1] == judge.VERDICT:
            if not message.startswith(verdict := judge.VERDICT + nonce):
                return "forged a verdict"
            kind, text = json.loads(message.removeprefix(verdict))
            if kind == "broken":
                raise Unusable(text)
            for cell, last in ((judging, None), (candidate, program.END)):
                with contextlib.suppress(OSError, _Late, Unusable):
                    if last:
                        cell.send(last, time.monotonic() + _END_SECONDS)
                    cell.ending(time.monotonic() + _END_SECONDS)
            return text
        candidate.send(message, deadline)
        if (answer := candidate.receive(deadline)) is None:
            return _ended(candidate, deadline)
        with contextlib.suppress(BrokenPipeError):  # it has ended
            judging.send(answer, deadline)
    return f"the test was {judging.ending(deadline + _GRACE_SECONDS)[0]}"


def _printed(candidate: Cell, test: dict[str, Any], deadline: float, most: int) -> str:
    data = candidate.printed(deadline, most)
    if len(data) > most:
        return "printed too much"
    ending, error = candidate.ending(deadline + _GRACE_SECONDS)
    if ending != "exited with 0":
        return error[: program.MAX_MESSAGE] or ending
    same = lines(data.decode(errors="replace")) == lines(test["output"])
    return "passed" if same else "printed something else"


def _ended(candidate: Cell, deadline: float) -> str:
    """Why a program has ended that the judge has a question for."""
    ending, error = candidate.ending(deadline + _GRACE_SECONDS)
    return error[: program.MAX_MESSAGE] or ("ended early" if ending.startswith("exited") else ending)


def lines(text: str) -> list[str]:
    """The lines of a program's output that are compared: without trailing spaces and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
