"""The process that worker processes are forked from: it imports the agent once, and never runs it.

Invariant: no process of a worker outlives the worker, and no worker outlives the process that started the nursery.
Each worker has a guard, a fork of its own that waits for it and ends whatever it leaves behind. Nursery and guards run
no code of the agent's after its import, so a stuck agent cannot keep them from ending it. A closed link means: end.

A process with threads cannot be forked safely. Where importing the agent starts one, the nursery starts again without
importing, and each worker imports for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
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

from agl.agents.registry import switched_on
from agl.errors import AglError
from agl.trainer.runners.process.payload import Payload, unpack
from agl.trainer.runners.process.worker import journal_of, serve

STOP_SECONDS = 4.0
"""How long a worker that is told to stop has to end by itself."""
_BURY_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_KILL, _STOP = b"k", b"s"


class ForkServer:
    """Forks workers as its parent asks; lives until the parent's end of the link closes.

    Args:
        link: to the parent. Lines of JSON come in: {"start": worker}, {"kill": worker}, {"stop": true}; out go
            {"ready": whether the agent is imported once}, {"failed": why}, {"ended": worker, "status": exit code or
            minus the signal, "spans": OTLP requests in JSON}.
        make: the payload; called in each worker. url, key: of the desk.
    """

    def __init__(self, link: socket.socket, make: Callable[[], Payload], url: str, key: str) -> None:
        self._link, self._make, self._url, self._key = link, make, url, key
        self._guards: dict[socket.socket, tuple[str, bytearray]] = {}

    def run(self) -> None:
        """Serve until the parent is gone, then end the workers and wait for that; bounded."""
        with contextlib.suppress(OSError):
            self._serve()
        for guard in self._guards:
            guard.close()
        deadline = time.monotonic() + _BURY_SECONDS + 1.0
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.002)

    def _serve(self) -> None:
        rest = b""
        while True:
            readable, _, _ = select.select([self._link, *self._guards], [], [])
            for guard in readable:
                if guard is not self._link:
                    self._hear(guard)
            if self._link in readable:
                data = self._link.recv(1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._do(json.loads(line))

    def _do(self, asked: dict[str, Any]) -> None:
        if "start" in asked:
            self._start(asked["start"])
            return
        for guard, (worker, _) in self._guards.items():
            if "stop" in asked or asked.get("kill") == worker:
                with contextlib.suppress(OSError):
                    guard.send(_STOP if "stop" in asked else _KILL)

    def _start(self, worker: str) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _as_fork(lambda: self._guard(worker, theirs, ours))
        theirs.close()
        self._guards[ours] = worker, bytearray()

    def _guard(self, worker: str, link: socket.socket, *others: socket.socket) -> int:
        for other in (self._link, *self._guards, *others):
            other.close()
        with tempfile.TemporaryFile() as journal:
            file = journal.fileno()
            status = guarded(link, lambda: serve(self._make(), worker, self._url, self._key, file))
            spans = journal_of(file)
        with contextlib.suppress(OSError):
            link.sendall(json.dumps({"ended": worker, "status": status, "spans": spans}).encode())
        return 0

    def _hear(self, guard: socket.socket) -> None:
        worker, heard = self._guards[guard]
        try:
            data = guard.recv(1 << 16)
        except OSError:
            data = b""
        heard += data
        if data:
            return
        guard.close()
        del self._guards[guard]
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        # A guard that said nothing was killed itself; its worker dies with it.
        said = bytes(heard) or json.dumps({"ended": worker, "status": -signal.SIGKILL, "spans": []}).encode()
        self._link.sendall(said + b"\n")


def guarded(link: socket.socket, work: Callable[[], int]) -> int:
    """Run `work` in a forked process of its own group, and end all that it left behind when it is over.

    Returns:
        Its exit code, or minus the signal that ended it.
    """
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        link.close()
        os.close(woken)
        os.close(wake)
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        _as_fork(work)
    status, deadline = None, None
    while status is None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([link, woken], [], [], left)
        if woken in readable:
            os.read(woken, 4096)
            status = _reaped(pid)
        if link in readable:
            said = link.recv(16)
            if said == _STOP:
                _signal(pid, signal.SIGTERM)
                deadline = time.monotonic() + STOP_SECONDS
            else:
                _killed(pid)
        if deadline is not None and time.monotonic() >= deadline:
            deadline = None
            _killed(pid)
    _bury(pid)
    return status


def _reaped(pid: int) -> int | None:
    """Reap every child that has ended; the status of this one if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            one, status = os.waitpid(-1, os.WNOHANG)
            if one == 0:
                break
            if one == pid:
                found = os.waitstatus_to_exitcode(status)
    return found


def _killed(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _signal(pid, signal.SIGKILL)


def _bury(group: int) -> None:
    """Kill the worker's group, and then whoever this process inherits from it, until there is nobody; bounded."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _BURY_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            _signal(child, signal.SIGKILL)
        _reaped(0)
        time.sleep(0.002)


def _children() -> list[int]:
    """Of this process, by /proc; none where there is no /proc."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    """Linux's prctl; without it the guards' links and process groups have to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _as_fork(body: Callable[[], int]) -> None:
    """End this process with what `body` returns, and never return to what it was forked from."""
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


def _threads() -> int:
    """Of this process, those that are not Python's included where that can be told."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _fresh(payload: Payload) -> Payload:
    """What makes a fork another process than its twins."""
    faulthandler.enable()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    return payload


def main(link_file: int, payload_file: int, *, once: bool) -> None:
    """Entry point.

    Args:
        link_file: descriptor of the link to the parent. payload_file: of {"url", "key"} in a line, then the payload.
        once: whether to import the agent here, rather than in each worker.
    """
    import numpy  # noqa: F401  (its thread pool is made ready for forks by itself)

    before = _threads()
    link = socket.socket(fileno=link_file)
    for stream in (sys.stdout, sys.stderr):
        # Lines whole, also under PYTHONUNBUFFERED, as several workers write into one pipe.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    head, _, data = os.pread(payload_file, os.fstat(payload_file).st_size, 0).partition(b"\n")
    desk = json.loads(head)

    tracing = contextlib.ExitStack()

    def made() -> Payload:
        payload = unpack(data)
        assert not isinstance(payload.agent, str)
        tracing.enter_context(switched_on((*payload.tracers, *payload.agent.tracers)))
        return payload

    make: Callable[[], Payload] = lambda: _fresh(made())  # noqa: E731
    if once:
        try:
            payload = made()
        except BaseException as error:
            why = str(error) if isinstance(error, AglError) else "".join(traceback.format_exception(error))
            link.sendall(json.dumps({"failed": why}).encode() + b"\n")
            return
        if threading.active_count() > 1 or _threads() > before:
            for file in (link_file, payload_file):
                os.set_inheritable(file, True)
            os.execv(sys.executable, command(link_file, payload_file, once=False))
        make = lambda: _fresh(payload)  # noqa: E731
    os.close(payload_file)
    gc.collect()
    gc.freeze()
    link.sendall(json.dumps({"ready": once}).encode() + b"\n")
    ForkServer(link, make, desk["url"], desk["key"]).run()


def command(link_file: int, payload_file: int, *, once: bool) -> list[str]:
    """The command that starts a nursery with these descriptors."""
    run = f"from agl.trainer.runners.process.fork_server import main; main({link_file}, {payload_file}, once={once})"
    return [sys.executable, "-c", run]
