"""The process that runs programs against tests for `agl.rewards.PythonTests`: a JSON line in, a JSON line out.

Four kinds of processes:

- The worker reads jobs, and has two processes forked for each test, which it gives a deadline.
- The fork server was forked from the worker before it read any job. It stands behind the walls (`isolation`), and forks
  supervisors, which read what to run, fork that, and kill all that it has started at its end.
- The candidate runs the program (`candidate`), and has nothing but a socket to the evaluator.
- The evaluator runs the test (`evaluator`), behind separate walls, as a test may evaluate what a program returns. It
  has a socket to the candidate, and prints the outcome.

Whatever ends badly on the way is the candidate's failure, except for walls that cannot be built and tests that cannot
be run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from agl.trainer.graders.sandbox import candidate, evaluator, isolation, plain

LOADED = b"L"
MAX_MESSAGE = candidate.MAX_MESSAGE
_MEMORY_SECONDS = {"namespaces": 0.02}
"""How often the memory of a program's processes is measured: elsewhere every 0.2 s, as all of /proc is read there."""


class Unusable(Exception):
    """No test can be run, through no fault of the program."""


def main() -> None:
    """Serve jobs until standard input ends."""
    server = ForkServer()
    jobs, answers = os.dup(0), os.dup(1)
    os.write(answers, b"ready\n")
    _no_streams()
    with os.fdopen(jobs, encoding="utf-8") as lines:
        for line in lines:
            try:
                job, answer = json.loads(line), {"isolation": server.level, "lacks": server.lacks}
                if job["required"] and server.level != "namespaces":
                    answer["refused"] = True
                else:
                    answer["outcomes"] = outcomes(server, job)
            except (Unusable, OSError) as error:
                answer = {"failed": str(error)}
            os.write(answers, json.dumps(answer).encode() + b"\n")


def _no_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


class ForkServer:
    """The process that candidates are forked from.

    Attributes:
        level: the isolation that this machine gives (`isolation.LEVELS`).
        lacks: why it gives no better one.
    """

    def __init__(self) -> None:
        self.lacks: list[str] = []
        for self.level in isolation.LEVELS:
            mine, theirs = socket.socketpair()
            self._pid = os.fork()
            if self._pid == 0:
                try:
                    _fork_server(theirs.detach(), self.level)
                finally:
                    os._exit(1)
            theirs.close()
            answer = plain.receive(mine).decode()
            if answer == "ready":
                self._channel = mine
                return
            self.lacks.append(f"{self.level}: {answer}")
            mine.close()
            os.waitpid(self._pid, 0)
        raise Unusable(f"no program can be run: {'; '.join(self.lacks)}")

    def start(self, *ends: int) -> None:
        """Fork a supervisor with these descriptors: to the worker, to the evaluator, and standard output."""
        try:
            socket.send_fds(self._channel, [b"."], ends)
        except OSError:  # killed by a candidate, where nothing prevents it
            self._channel.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self.__init__()
            socket.send_fds(self._channel, [b"."], ends)


def _fork_server(end: int, level: str) -> None:
    # Nothing of the worker's stays open, neither its jobs nor its answers.
    _no_streams()
    os.dup2(end, 3)
    os.closerange(4, 1 << 16)
    channel = socket.socket(fileno=3)
    try:
        isolation.enter(level)
    except BaseException as error:
        plain.send(channel, str(error).encode())
        os._exit(1)
    plain.send(channel, b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    while True:
        data, ends, _, _ = socket.recv_fds(channel, 1, 3)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            try:
                _supervise(level, *ends)
            finally:
                os._exit(1)
        for end in ends:
            os.close(end)


def _supervise(level: str, control: int, connection: int, output: int) -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(fileno=control) as worker:
        job = plain.parse(plain.receive(worker))
        try:
            isolation.begin(level, job["file_mb"])
            isolation.adopt_orphans()
            bell, ring = os.pipe()
            os.set_blocking(ring, False)
            signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run(level, job, connection, output)
        except BaseException as error:
            plain.send(worker, {"failed": f"cannot isolate a program: {error}"})
            os._exit(1)
        os.close(connection)
        os.close(output)
        ended: dict[str, Any] = {}
        poll = _MEMORY_SECONDS.get(level, 0.2)
        while not ended:
            ready, _, _ = select.select([worker, bell], [], [], poll)
            if worker in ready:
                break
            if bell in ready:
                os.read(bell, 4096)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended = {"status": status}
            elif isolation.resident_mb() > job["memory_mb"]:
                ended = {"reason": "used too much memory"}
        isolation.end_all(pid)
        with contextlib.suppress(OSError):
            plain.send(worker, ended)
    os._exit(0)


def _run(level: str, job: dict[str, Any], connection: int, output: int) -> None:
    try:
        os.dup2(connection, 3)
        os.dup2(output, 4)
        os.closerange(5, 1 << 16)
        folder = isolation.HOME if level == "namespaces" else job["folder"]
        if level == "uid":
            os.chown(folder, isolation.other_uid(), -1)
        isolation.drop(level, job)
        os.setsid()
        os.chdir(folder)
        with open("stdin", "w", encoding="utf-8", errors="replace") as file:
            file.write(job.get("input", ""))
        os.dup2(os.open("stdin", os.O_RDONLY), 0)
        os.unlink("stdin")
        # The output of a program with tested functions is not read.
        os.dup2(os.open(os.devnull, os.O_WRONLY) if job["kind"] == "python" else 4, 1)
        os.closerange(4, 1 << 10)
        # Its own environment, from which nothing can be read of this one's.
        os.environ.clear()
        os.environ.update(job["environment"], HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None
        del sys.path[0]  # where this module was found
        if job["kind"] == "evaluate":
            isolation.hide()
            _evaluate(socket.socket(fileno=3), job["test"])
        candidate.run(socket.socket(fileno=3), job)
    finally:
        os._exit(1)


def outcomes(server: ForkServer, job: dict[str, Any]) -> list[str]:
    """Run a job's tests: for each "passed", or the reason why it failed."""
    deadline = time.monotonic() + job["total_timeout"]
    results: list[str] = []
    for test in job["tests"]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            results.append("no time left")
            continue
        loaded, outcome = run(server, job, test, min(job["timeout"], remaining))
        results.append(outcome)
        if not loaded:  # every other test would end alike
            results += [outcome] * (len(job["tests"]) - len(results))
            break
    return results


def run(server: ForkServer, job: dict[str, Any], test: dict[str, Any], timeout: float) -> tuple[bool, str]:
    """Run one test: (whether the other tests are worth a try, "passed" or the reason why it failed).

    Raises:
        Unusable: it cannot be run.
    """
    deadline = time.monotonic() + timeout
    limits = {name: job[name] for name in ("cpu_seconds", "memory_mb", "file_mb", "processes", "environment")}
    connection, served = socket.socketpair()
    program = limits | {"code": job["code"], "kind": test["kind"], "input": test.get("input", "")}
    with contextlib.ExitStack() as ends, connection, served:
        if test["kind"] == "stdin":
            control, printed = ends.enter_context(_started(server, program, job["folder"], served))
            return True, _printed(control, connection, printed, test, deadline, job["file_mb"] << 20)
        evaluation = limits | {"kind": "evaluate", "test": test, "cpu_seconds": math.ceil(timeout) + 1}
        control, _ = ends.enter_context(_started(server, program, job["folder"], served))
        judge, report = ends.enter_context(_started(server, evaluation, job["folder"], connection))
        return _evaluated(control, judge, report, deadline)


@contextlib.contextmanager
def _started(
    server: ForkServer, told: dict[str, Any], parent: str, connection: socket.socket
) -> Iterator[tuple[socket.socket, int]]:
    """A process behind the walls: (socket to its supervisor, what it prints); ended with all that it has started."""
    folder = tempfile.mkdtemp(prefix="agl-tests-", dir=parent) if server.level != "namespaces" else ""
    control, theirs = socket.socketpair()
    printed, output = os.pipe()
    try:
        server.start(theirs.fileno(), connection.fileno(), output)
        theirs.close()
        connection.close()
        os.close(output)
        plain.send(control, told | {"folder": folder})
        yield control, printed
    finally:
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_WR)
            control.settimeout(10.0)
            while control.recv(4096):
                pass
        control.close()
        theirs.close()
        os.close(printed)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _printed(
    control: socket.socket, connection: socket.socket, printed: int, test: dict[str, Any], deadline: float, most: int
) -> str:
    data, ended = bytearray(), False
    while True:
        wait = 0.0 if ended else deadline - time.monotonic()
        if wait < 0:
            return "ran out of time"
        ready, _, _ = select.select([printed] if ended else [printed, control], [], [], wait)
        part = b""
        if printed in ready and (part := os.read(printed, 1 << 16)):
            data += part
            if len(data) > most:
                return "printed too much"
        elif printed in ready and not ended:  # closed, yet not at its end
            ready, _, _ = select.select([control], [], [], max(0.0, deadline - time.monotonic()))
            ended = bool(ready)
        elif control in ready:
            ended = True
        elif ended:
            break
    ending = _ending(control, deadline)
    if ending != "exited with 0":
        with contextlib.suppress(EOFError, plain.Malformed, OSError):
            connection.setblocking(False)
            name, text = plain.parse(plain.receive(connection, 1 << 16))["error"]
            return f"{name}: {text}"[:MAX_MESSAGE]
        return ending
    same = lines(data.decode(errors="replace")) == lines(test["output"])
    return "passed" if same else "printed something else"


def _evaluated(control: socket.socket, judge: socket.socket, report: int, deadline: float) -> tuple[bool, str]:
    data = b""
    while (wait := deadline - time.monotonic()) > 0 and select.select([report], [], [], wait)[0]:
        part = os.read(report, 1 << 16)
        data += part
        if not part or len(data) > 1 << 20:
            break
    loaded = data.startswith(LOADED)
    try:
        kind, text = json.loads(data.removeprefix(LOADED))
    except ValueError:
        if time.monotonic() >= deadline:
            return loaded, "ran out of time"
        return loaded, f"the test was {_ending(judge, deadline)}"
    if kind == "broken":
        raise Unusable(text)
    if kind == "ended":
        ending = _ending(control, deadline)
        return loaded, text if ending.startswith("exited") else ending
    return loaded, text


def _evaluate(connection: socket.socket, test: dict[str, Any]) -> None:
    """Run a test, and print its outcome."""
    report = os.dup(1)
    _no_streams()
    program = evaluator.Program(connection)
    try:
        program.load()
        os.write(report, LOADED)
        evaluator.evaluate(program, test)
        kind, text = "passed", "passed"
    except BaseException as error:
        error = program.ending or error
        kind, text = "failed", f"{type(error).__name__}: {_text(error)}"
        if isinstance(error, evaluator.Broken):
            kind, text = "broken", str(error)
        elif isinstance(error, evaluator.Lost):
            kind, text = "ended" if str(error) == evaluator.ENDED else "failed", str(error)
    os.write(report, json.dumps([kind, text[:MAX_MESSAGE]]).encode())
    os._exit(0)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return type(failed).__name__


def _ending(control: socket.socket, deadline: float) -> str:
    """How the program ended."""
    control.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        message = plain.parse(plain.receive(control))
    except TimeoutError:
        return "ran out of time"
    except (EOFError, OSError, plain.Malformed):
        return "killed with its supervisor"
    if "failed" in message:
        raise Unusable(message["failed"])
    if "reason" in message:
        return message["reason"]
    status = message.get("status", 0)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with {os.WEXITSTATUS(status)}"


def lines(text: str) -> list[str]:
    """The lines of a program's output that are compared: without trailing spaces and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
