"""Child processes for policies: started, prepared before their policies are known, and kept for the next ones.

Invariant: importing this module loads no torch. However this process ends, its children end too.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

from agl.child_environment import child_environment
from agl.trainer.local.protocol import PATIENCE

__all__ = ["Child", "end_waiting", "environment", "last_output", "prepare_process", "take"]

_TAIL_BYTES = 2000
_SPARE_SECONDS = 20.0
"""Before its patience ends, a process is left alone: it might end as it is taken."""


def last_output(log: Any) -> str:
    """The end of a child's log, which is an open file."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()


@dataclass(slots=True, eq=False)
class Child:
    """A policy process.

    Attributes:
        process: as started. connection: our end of its socket. log: the file of its output.
        start: its environment and working directory.
        until: it takes policies until this time, by `time.monotonic`.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket
    log: Any
    start: tuple[dict[str, str], str]
    until: float = math.inf

    def wait(self) -> None:
        """Have it taken by the next policy that it suits."""
        self.log.seek(0)  # For it, too: the offset is that of both.
        self.log.truncate()
        self.until = time.monotonic() + PATIENCE - _SPARE_SECONDS
        with _lock:
            _waiting.append(self)

    def close(self) -> None:
        """Close what belongs to it here; it ends by itself."""
        with contextlib.suppress(OSError):  # it is gone
            # A transport's copy of the socket stays open until the event loop's next turn.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self.log.close()


_waiting: list[Child] = []
_lock = threading.Lock()


def prepare_process(threads: int | None = None) -> None:
    """Start a process that loads its libraries while its model is still made; the next policy with as many `threads`
    gets it. It ends with this process.
    """
    child = _spawn(threads, "prepare")
    with _lock:
        _waiting.append(child)


def end_waiting() -> None:
    """End the processes that wait for a policy, and wait for their end."""
    with _lock:
        ended = [_waiting.pop() for _ in range(len(_waiting))]
    for child in ended:
        child.close()
        child.process.wait()


atexit.register(end_waiting)


def take(threads: int | None) -> Child:
    """The last process that began to wait, was started as one for these policies would be, and is still alive; else a
    new one."""
    start = _start(threads)
    taken = None
    with _lock:
        for child in reversed(_waiting.copy()):
            if child.process.poll() is not None or child.until < time.monotonic():
                child.close()
                _waiting.remove(child)
            elif taken is None and child.start == start:
                taken = child
                _waiting.remove(child)
    return taken or _spawn(threads)


def _spawn(threads: int | None, *options: str) -> Child:
    start = _start(threads)
    ours, theirs = socket.socketpair()
    log = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agl.trainer.local.worker", str(theirs.fileno()), *options],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=start[0],
        )
    except OSError:
        ours.close()
        log.close()
        raise
    finally:
        theirs.close()
    return Child(process, ours, log, start)


def _start(threads: int | None) -> tuple[dict[str, str], str]:
    # Torch sets this variable in a process that imports it, which ours may do at any time.
    env = {name: value for name, value in environment(threads).items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    return env, os.getcwd()


def environment(threads: int | None) -> dict[str, str]:
    """The child's environment: thread pools must be sized before torch is imported."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = str(threads or os.environ.get("OMP_NUM_THREADS") or max(1, cores - 1))
    return child_environment(["HF_TOKEN"]) | {
        "OMP_NUM_THREADS": pool,
        "MKL_NUM_THREADS": pool,
        "TOKENIZERS_PARALLELISM": "false",
    }
