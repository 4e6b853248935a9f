"""Policy processes that are forked from one that has imported torch and transformers, which takes most of the processor
time of their start: 0.2 instead of 6 seconds.

The process is that of `agl.trainer.local.worker`, with the same arguments, environment, directory, socket and log.
Where a test sets another environment, it is started as users' are.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agl.trainer.processes.child import Child

WORKER = "agl.trainer.local.worker"
PROGRAM = Path(__file__).parent / "programs" / "policy_fork_server.py"


class ForkServer:
    """The process that they are forked from; it ends with this one, and they with it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._link, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )

    def fork(self, *fds: int) -> int:
        """The pid of a process with this socket and this log, in the directory that this process is in now."""
        with self._lock:
            socket.send_fds(self._link, [os.fsencode(os.getcwd())], fds)
            return int(self._link.recv(64))

    def exit_code(self, pid: int) -> int | None:
        """None while it runs."""
        with self._lock:
            self._link.send(str(pid).encode())
            code = self._link.recv(64)
        return None if code == b"runs" else int(code)


class Forked:
    """What `Child` needs of a `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)


class ForkedChild(Child):
    """`Child`, forked where it is a policy process in the usual environment."""

    env: Mapping[str, str] = {}
    server: ForkServer | None = None

    def __init__(self, module: str, *arguments: object, env: Mapping[str, str], new_session: bool = False) -> None:
        if module != WORKER or _without_torchs(env) != ForkedChild.env:
            super().__init__(module, *arguments, env=env, new_session=new_session)
            return
        server = ForkedChild.server = ForkedChild.server or ForkServer(ForkedChild.env)
        self.connection, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self.process = Forked(server, server.fork(theirs.fileno(), self.log.fileno()))  # type: ignore[assignment]


def _without_torchs(env: Mapping[str, str]) -> dict[str, str]:
    """Without the variable that torch sets where a part of it is imported."""
    return {name: value for name, value in env.items() if name != "TORCHINDUCTOR_CACHE_DIR"}


@contextlib.contextmanager
def forked_policies() -> Iterator[None]:
    """Policy processes that are started in this block are forked."""
    from agl.trainer.local import policy

    ForkedChild.env = _without_torchs(policy.environment(threads=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "Child", ForkedChild)
        yield


@contextlib.contextmanager
def executed_policies() -> Iterator[None]:
    """Those that are started in this block are not."""
    from agl.trainer.local import policy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "Child", Child)
        yield


def children() -> set[str]:
    """The processes that this one has started, and those that were forked for it."""
    server = [] if ForkedChild.server is None else [str(ForkedChild.server.process.pid)]
    parents = ",".join([str(os.getpid()), *server])
    listed = subprocess.run(["pgrep", "-P", parents], capture_output=True, text=True, check=False).stdout
    return {*listed.split()} - {*server}
