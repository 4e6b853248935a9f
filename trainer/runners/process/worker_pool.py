"""The run's side of worker processes: keeps N of them alive, kills the stuck ones, and reports those that ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agl.errors import ConfigError, RolloutError
from agl.trainer.processes.environment import child_environment, hide_process
from agl.trainer.runners.process.fork_server import STOP_SECONDS, fork_server_command

log = logging.getLogger("agl.runner")

START_SECONDS = 300.0
"""How long the agent may take to be imported."""
KILL_SECONDS = 10.0
"""How long a process may take to end after it was killed."""
_LINE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The end of a worker process.

    Attributes:
        worker: its name.
        status: its exit code, or minus the signal that ended it.
        spans: those of its unfinished attempt that had ended: OTLP requests in JSON.
    """

    worker: str
    status: int
    spans: tuple[str, ...] = ()

    @property
    def how(self) -> str:
        """The exit status in words."""
        if self.status >= 0:
            return f"ended with exit status {self.status}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-self.status).name}"
        return f"was ended by signal {-self.status}"


class WorkerPool:
    """Worker processes of one payload, made by `start` and ended by `stop`. Lives on one event loop.

    Args:
        payload: packed.
        url, key: of the coordinator whose rollouts they execute.
        n_workers: how many.
        name: prefix of the workers' names; each pool of a coordinator needs a different one.
        on_exit: called with each exit, before another worker takes the place.
        on_failure: called once when the workers cannot be kept alive.
    """

    def __init__(
        self,
        payload: bytes,
        url: str,
        key: str,
        *,
        n_workers: int,
        name: str,
        on_exit: Callable[[WorkerExit], Awaitable[None]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._payload = json.dumps({"url": url, "key": key}).encode() + b"\n" + payload
        self.n_workers = n_workers
        self.name = name
        self.on_exit = on_exit
        self.on_failure = on_failure
        self.imports_once = True
        self._numbers = itertools.count()
        self._running: dict[str, asyncio.Future[WorkerExit]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listen_task: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The fork server's process id; None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Import the agent and start the workers.

        Raises:
            ConfigError: the agent cannot be imported there, or this system cannot fork.
        """
        if not hasattr(os, "fork"):
            raise ConfigError("this system has no fork", hint='use runners="local" here')
        reader = await self._start_server()
        for _ in range(self.n_workers):
            self._add()
        self._listen_task = asyncio.ensure_future(self._listen(reader))

    async def kill(self, worker: str) -> WorkerExit | None:
        """End a worker and all that it started, at once; None if it had ended before, or does not end."""
        running = self._running.get(worker)
        if running is None:
            return None
        self._send(kill=worker)
        done, _ = await asyncio.wait((running,), timeout=KILL_SECONDS)
        return running.result() if done else None

    async def stop(self) -> None:
        """Ask every worker to stop, kill those that do not, and wait for all of it; bounded, idempotent."""
        self._stopping = True
        if self._running and self._writer is not None:
            self._send(stop=True)
            await asyncio.wait(self._running.values(), timeout=STOP_SECONDS + 2.0)
        if self._listen_task is not None:
            self._listen_task.cancel()
            await asyncio.gather(self._listen_task, return_exceptions=True)
            self._listen_task = None
        await self._close_server()

    # -- the fork server ----------------------------------------------------------------------------------------------
    async def _start_server(self) -> asyncio.StreamReader:
        # Agents in the workers are not to read the keys of the process that starts them.
        hide_process()
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as payload:
            payload.write(self._payload)
            payload.flush()
            files = theirs.fileno(), payload.fileno()
            self._process = subprocess.Popen(
                fork_server_command(*files, once=True),
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                env=child_environment(own_program=True),
                start_new_session=True,
            )
        theirs.close()
        ours.setblocking(False)
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE_BYTES)
            line = await asyncio.wait_for(reader.readline(), START_SECONDS)
        except BaseException as error:
            await self._close_server()
            if isinstance(error, TimeoutError):
                raise ConfigError(
                    f"the agent was not imported after {START_SECONDS:g} s", hint="see what its module does on import"
                ) from None
            raise
        message = json.loads(line or b'{"failed": "the process that imports the agent died"}')
        if "failed" in message:
            await self._close_server()
            raise ConfigError(
                f"the agent cannot be imported in a worker process: {message['failed']}",
                hint="it is imported there again: what it needs has to be importable and not only be set up here",
            )
        self.imports_once = bool(message["ready"])
        if not self.imports_once:
            log.info("importing the agent starts threads, so each worker imports it separately")
        return reader

    async def _close_server(self) -> None:
        """End the fork server and any workers that are left."""
        writer = self._writer
        process = self._process
        self._writer = None
        self._process = None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_SECONDS):
                    while process.poll() is None:
                        await asyncio.sleep(0.005)
            if process.poll() is None:
                process.kill()
                process.wait()

    def _send(self, **request: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(request).encode() + b"\n")

    def _add(self) -> None:
        worker = f"{self.name}/{next(self._numbers)}"
        self._running[worker] = asyncio.get_running_loop().create_future()
        self._send(start=worker)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                line = await reader.readline()
                if line:
                    message = json.loads(line)
                    await self._on_worker_exit(WorkerExit(message["ended"], message["status"], tuple(message["spans"])))
                    continue
                if self._stopping:
                    return
                # The fork server was killed; the supervisors end the workers.
                for worker in list(self._running):
                    await self._on_worker_exit(WorkerExit(worker, -signal.SIGKILL), replace=False)
                await self._close_server()
                reader = await self._start_server()
                while len(self._running) < self.n_workers:
                    self._add()
        except Exception as error:
            self.on_failure(error)

    async def _on_worker_exit(self, worker_exit: WorkerExit, *, replace: bool = True) -> None:
        running = self._running.pop(worker_exit.worker, None)
        if running is not None and not running.done():
            running.set_result(worker_exit)
        await self.on_exit(worker_exit)
        if replace and not self._stopping:
            self._add()


class CrashLoopGuard:
    """Recognises that workers die for a reason that is no rollout's.

    Args:
        max_crashes: how many workers in a row may die without a rollout.
    """

    def __init__(self, max_crashes: int) -> None:
        self.max_crashes = max_crashes
        self._crashes = 0

    def check(self, worker_exit: WorkerExit, *, had_work: bool) -> None:
        """Count the end of a worker.

        Raises:
            RolloutError: too many workers in a row died without a rollout.
        """
        if had_work or worker_exit.status == 0:
            self._crashes = 0
            return
        self._crashes += 1
        if self._crashes >= self.max_crashes:
            raise RolloutError(
                f"{self._crashes} worker processes in a row died before they had a rollout; the last {worker_exit.how}",
                hint="see their stderr; if it is empty, check whether memory ran out (dmesg)",
            )
