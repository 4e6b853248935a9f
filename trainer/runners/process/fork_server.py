"""The process that worker processes are forked from: it imports the agent once, and never runs it.

Invariant: no process of a worker outlives the worker, and no worker outlives the process that started the fork server.
Each worker has a supervisor: a forked process that waits for the worker and ends whatever it leaves behind. Fork server
and supervisors run none of the agent's code after its import, so a stuck agent cannot keep them from ending it. When
its link closes, a process ends.

A process with threads cannot be forked safely. Where importing the agent starts one, the fork server starts again
without importing it, and each worker imports it separately.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agl.agents.frameworks import switched_on
from agl.errors import AglError
from agl.stop_signals import ignore_stop_signals
from agl.trainer.processes.environment import hide_process
from agl.trainer.runners.process.payload import Payload, unpack
from agl.trainer.runners.process.worker import read_journal, run_worker

STOP_SECONDS = 4.0
"""How long a worker may take to end after it was asked to stop."""
_REAP_SECONDS = 5.0
"""How long processes that were killed may take to end."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

KILL = b"k"
STOP = b"s"


class ForkServer:
    """Forks workers as its parent asks; lives until the parent's end of the link closes.

    Args:
        link: to the parent. Lines of JSON come in: {"start": worker}, {"kill": worker}, {"stop": true}; out go
            {"ready": whether the agent is imported once}, {"failed": why}, {"ended": worker, "status": exit code or
            minus the signal, "spans": OTLP requests in JSON}.
        load: returns the payload; called in each worker.
        url, key: of the coordinator.
    """

    def __init__(self, link: socket.socket, load: Callable[[], Payload], url: str, key: str) -> None:
        self._link = link
        self._load = load
        self._url = url
        self._key = key
        self._supervisors: dict[socket.socket, tuple[str, bytearray]] = {}

    def run(self) -> None:
        """Serve until the parent is gone, then end the workers and wait for that; bounded."""
        with contextlib.suppress(OSError):
            self._serve()
        for supervisor in self._supervisors:
            supervisor.close()
        deadline = time.monotonic() + _REAP_SECONDS + 1.0
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.002)

    def _serve(self) -> None:
        rest = b""
        while True:
            readable, _, _ = select.select([self._link, *self._supervisors], [], [])
            for supervisor in readable:
                if supervisor is not self._link:
                    self._receive(supervisor)
            if self._link in readable:
                data = self._link.recv(1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))

    def _handle(self, request: dict[str, Any]) -> None:
        if "start" in request:
            self._start(request["start"])
            return
        for supervisor, (worker, _) in self._supervisors.items():
            if "stop" in request or request.get("kill") == worker:
                with contextlib.suppress(OSError):
                    supervisor.send(STOP if "stop" in request else KILL)

    def _start(self, worker: str) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _exit_with(lambda: self._supervise(worker, theirs, ours))
        theirs.close()
        self._supervisors[ours] = worker, bytearray()

    def _supervise(self, worker: str, link: socket.socket, *others: socket.socket) -> int:
        """The body of a supervisor process."""
        for other in (self._link, *self._supervisors, *others):
            other.close()
        with tempfile.TemporaryFile() as journal:
            file = journal.fileno()
            status = supervise(link, lambda: run_worker(self._load(), worker, self._url, self._key, file))
            spans = read_journal(file)
        with contextlib.suppress(OSError):
            link.sendall(json.dumps({"ended": worker, "status": status, "spans": spans}).encode())
        return 0

    def _receive(self, supervisor: socket.socket) -> None:
        """Read what a supervisor sends, and pass it on when that is complete: when the supervisor has ended."""
        worker, received = self._supervisors[supervisor]
        try:
            data = supervisor.recv(1 << 16)
        except OSError:
            data = b""
        received += data
        if data:
            return
        supervisor.close()
        del self._supervisors[supervisor]
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        # A supervisor that sent nothing was killed; its worker dies with it.
        message = bytes(received) or json.dumps({"ended": worker, "status": -signal.SIGKILL, "spans": []}).encode()
        self._link.sendall(message + b"\n")


def supervise(link: socket.socket | io.FileIO, work: Callable[[], int]) -> int:
    """Run `work` in a forked process with a separate process group, and end all that it leaves behind.

    Returns:
        Its exit code, or minus the signal that ended it.
    """
    with contextlib.suppress(PermissionError):  # the first process of a container leads its session
        os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        link.close()
        os.close(wake_read)
        os.close(wake_write)
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        _exit_with(work)
    status = None
    deadline = None
    while status is None:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([link, wake_read], [], [], timeout)
        if wake_read in readable:
            os.read(wake_read, 4096)
            status = _reap(pid)
        if link in readable:
            if os.read(link.fileno(), 16) == STOP:
                _signal(pid, signal.SIGTERM)
                deadline = time.monotonic() + STOP_SECONDS
            else:
                _kill_group(pid)
        if deadline is not None and time.monotonic() >= deadline:
            deadline = None
            _kill_group(pid)
    _kill_remaining(pid)
    return status


def main(link_file: int, payload_file: int, *, once: bool) -> None:
    """Entry point.

    Args:
        link_file: descriptor of the link to the parent.
        payload_file: descriptor of a file with {"url", "key"} in its
            first line, then the payload. once: whether to import the agent here, rather than in each worker.
    """
    import numpy  # noqa: F401  (its thread pool handles forks itself)

    # The coordinator's key is here and in the workers, which inherit this; what an agent starts is not to read it.
    hide_process()

    threads_before = _thread_count()
    link = socket.socket(fileno=link_file)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, also under PYTHONUNBUFFERED, as several workers write into one pipe.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    head, _, data = os.pread(payload_file, os.fstat(payload_file).st_size, 0).partition(b"\n")
    coordinator = json.loads(head)

    tracing = contextlib.ExitStack()

    def load() -> Payload:
        payload = unpack(data)
        assert not isinstance(payload.agent, str)
        tracing.enter_context(switched_on((*payload.tracers, *payload.agent.tracers)))
        return payload

    load_in_worker: Callable[[], Payload] = lambda: _after_fork(load())  # noqa: E731
    if once:
        try:
            payload = load()
        except BaseException as error:
            why = str(error) if isinstance(error, AglError) else "".join(traceback.format_exception(error))
            link.sendall(json.dumps({"failed": why}).encode() + b"\n")
            return
        if threading.active_count() > 1 or _thread_count() > threads_before:
            for file in (link_file, payload_file):
                os.set_inheritable(file, True)
            os.execv(sys.executable, fork_server_command(link_file, payload_file, once=False))
        load_in_worker = lambda: _after_fork(payload)  # noqa: E731
    os.close(payload_file)
    gc.collect()
    gc.freeze()
    link.sendall(json.dumps({"ready": once}).encode() + b"\n")
    ignore_stop_signals()
    ForkServer(link, load_in_worker, coordinator["url"], coordinator["key"]).run()


def fork_server_command(link_file: int, payload_file: int, *, once: bool) -> list[str]:
    """The command that starts a fork server with these descriptors."""
    code = f"from agl.trainer.runners.process.fork_server import main; main({link_file}, {payload_file}, once={once})"
    return [sys.executable, "-c", code]


def _reap(pid: int) -> int | None:
    """Reap every child that has ended; the exit status of `pid` if it is among them."""
    result = None
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            if child == pid:
                result = os.waitstatus_to_exitcode(status)
    return result


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _signal(pid, signal.SIGKILL)


def _kill_remaining(group: int) -> None:
    """Kill the worker's group, then every process that this one inherits from it, until none is left; bounded."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _REAP_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            _signal(child, signal.SIGKILL)
        _reap(0)
        time.sleep(0.002)


def _children() -> list[int]:
    """Children of this process by /proc; none where there is no /proc."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    """Linux's prctl; other systems rely on the supervisors' links and process groups alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _exit_with(body: Callable[[], int]) -> None:
    """In a forked process: run `body` and exit with the status that it returns."""
    status = 1
    try:
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _thread_count() -> int:
    """Threads of this process, with those that Python did not start where the system lists them."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _after_fork(payload: Payload) -> Payload:
    """Give a forked process its own fault handler and random state."""
    faulthandler.enable()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    return payload
