"""A few helper processes that answer JSON lines, one job at a time each; one that dies or hangs is replaced."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

MOST_ANSWER = 64 << 20
"""Bytes of an answer; a worker that writes more is killed."""

KEPT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""The variables of this process's environment that every worker gets."""


class WorkerDied(Exception):
    """The process ended during a job."""


class WorkerStuck(Exception):
    """The process did not answer in time, and was killed."""


class WorkerUnavailable(Exception):
    """The process could not be started; the text says why."""


class Workers:
    """Up to `most` processes of one program, started on demand and ended with this process.

    A worker prints "ready", then answers each line on its standard input with one on its standard output, and ends when
    its input does. It has a separate session and environment: of this one's variables, those in `KEPT` and those
    that the caller names.

    Args:
        arguments: of the interpreter: a script, or `-c` and a program.
        first: what a worker finds in the first line of its input, before it is ready; None for no such line.
        python: the interpreter; the current one if None.
        keep: names, and beginnings of names that end in "*", of further variables that a worker gets.
        most: processes; as many as there are cores if None, at most four.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        first: dict[str, Any] | None = None,
        python: str | None = None,
        keep: Sequence[str] = (),
        most: int | None = None,
    ) -> None:
        self._command = [python or sys.executable, "-I", *arguments]
        self._first = b"" if first is None else json.dumps(first).encode() + b"\n"
        self._keep = keep
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._slots = threading.BoundedSemaphore(most or min(4, os.cpu_count() or 1))
        atexit.register(self.close)

    @classmethod
    def of_module(
        cls,
        module: str,
        keep: Sequence[str] = (),
        first: dict[str, Any] | None = None,
        most: int | None = None,
    ) -> Workers:
        """Processes that run `main()` of a module, found where this process finds it."""
        start = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {module} as worker; worker.main()"
        return cls(["-c", start, json.dumps(sys.path)], keep=keep, first=first, most=most)

    def ask(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to one job. Waits for a free worker; `timeout`, in seconds, starts when there is one.

        Raises:
            WorkerDied, WorkerStuck, WorkerUnavailable.
        """
        with self._slots:
            worker = self._worker()
            try:
                answer = worker.ask(json.dumps(job), timeout)
            except BaseException:
                worker.kill()
                raise
            self._idle.put(worker)
            return json.loads(answer)

    def close(self) -> None:
        """End the idle workers."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().kill()

    def _worker(self) -> _Worker:
        with contextlib.suppress(queue.Empty):
            while True:
                worker = self._idle.get_nowait()
                if worker.mine and worker.process.poll() is None:
                    return worker
        return _Worker(self._command, environment(self._keep), self._first)


def environment(keep: Sequence[str] = ()) -> dict[str, str]:
    """The variables of a worker: those in `KEPT` and in `keep`, and no other."""
    names = {*KEPT, *keep}
    starts = tuple(name[:-1] for name in keep if name.endswith("*"))
    return {name: value for name, value in os.environ.items() if name in names or (starts and name.startswith(starts))}


class _Worker:
    START_SECONDS = 120.0

    def __init__(self, command: Sequence[str], env: Mapping[str, str], first: bytes) -> None:
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerUnavailable(str(error)) from error
        self.owner = os.getpid()
        try:
            self._write(first)
            self._line(self.START_SECONDS)
        except (WorkerDied, WorkerStuck) as error:
            self.process.kill()
            text = self.process.communicate()[1].decode(errors="replace").strip()
            raise WorkerUnavailable(text.splitlines()[-1] if text else "it wrote no error") from error

    @property
    def mine(self) -> bool:
        """Whether this process started it, and not the process that this one was forked from."""
        return self.owner == os.getpid()

    def ask(self, line: str, timeout: float) -> bytes:
        self._write(line.encode() + b"\n")
        return self._line(timeout)

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerDied from error

    def _line(self, timeout: float) -> bytes:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerStuck
                data = os.read(self.process.stdout.fileno(), 65536)
                if not data:
                    raise WorkerDied
                line += data
                if len(line) > MOST_ANSWER:
                    raise WorkerDied
        return line

    def kill(self) -> None:
        if not self.mine:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
