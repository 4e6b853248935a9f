"""A child process that runs a module of agl's: how it is started, what it printed last, and how it ends.

Invariant: however the parent ends, a child that calls `exit_with_parent` ends too, whatever it is computing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

from agl.stop_signals import ignore_stop_signals
from agl.trainer.processes.environment import hide_process
from agl.trainer.processes.peer import Peer

_TAIL_BYTES = 2000
_EXIT_SECONDS = 2.0
_PARENT_CHECK_MS = 2000


class Child:
    """`python -m MODULE FD ARGUMENT ...`, where FD is the child's end of a socket pair. Its output goes to a file.

    Args:
        module: its program.
        arguments: after FD.
        env: its whole environment; see `agl.trainer.processes.environment`.
        new_session: whether it leads a process group.

    Attributes:
        process: as started.
        connection: our end of the socket pair.
        log: the file of its output.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, module: str, *arguments: object, env: Mapping[str, str], new_session: bool = False) -> None:
        self.connection, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *map(str, (theirs.fileno(), *arguments))],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                    env=env,
                    start_new_session=new_session,
                )
        except OSError:
            self.close()
            raise

    async def connect(self, peer: Peer) -> None:
        """Have `peer` call and be called over the socket."""
        # The transport closes its socket at the event loop's next turn, or never where that has ended.
        connection = self.connection.dup()
        connection.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: peer, sock=connection)

    def last_output(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()

    def how_it_ended(self) -> str:
        """Its exit code in words, once the socket is closed, which it is when the process ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit code {self.process.wait(_EXIT_SECONDS)}"
        return "connection lost"

    async def end(self) -> None:
        """Have it end, kill it if it does not, and close what belongs to it here. Idempotent."""
        self.close()
        for _ in range(2):
            deadline = time.monotonic() + _EXIT_SECONDS
            while self.process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            if self.process.returncode is None:
                self.process.kill()

    def close(self) -> None:
        """Close the socket and the log; the child then exits."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # a transport may have a copy
        self.connection.close()
        self.log.close()


def connection_to_parent() -> socket.socket:
    """In the child: the socket to its parent, with which it ends. Its memory and environment are hidden from others."""
    # They reach the whole process group; the parent decides when this process ends.
    ignore_stop_signals()
    hide_process()
    connection = socket.socket(fileno=int(sys.argv[1]))
    exit_with_parent(connection, lambda: os._exit(0))
    return connection


def exit_with_parent(connection: socket.socket, end: Callable[[], object]) -> None:
    """End this process, whatever it is computing, when the other end of the socket closes or the parent dies.

    Args:
        connection: to the parent.
        end: ends the process.
    """
    parent = os.getppid()

    def watch() -> None:
        poller = select.poll()
        poller.register(connection, 0)
        while not poller.poll(_PARENT_CHECK_MS) and os.getppid() == parent:
            pass
        end()

    threading.Thread(target=watch, daemon=True).start()


async def serve_parent(peer: Peer) -> None:
    """In the child: have the parent's calls handled by `peer`, until the parent or this process ends."""
    connection = connection_to_parent()
    connection.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: peer, sock=connection)
    await asyncio.Event().wait()
