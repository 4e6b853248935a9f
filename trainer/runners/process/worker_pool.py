"""The owner's side of worker processes: keeps N of them alive, ends those it is told to, and says who has ended."""

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
from agl.trainer.runners.process.fork_server import STOP_SECONDS, command

log = logging.getLogger("agl.runner")

START_SECONDS = 300.0
"""How long the agent may take to be imported."""
_KILL_SECONDS = 10.0
_LINE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker process that is over.

    Attributes:
        worker: its name. status: its exit code, or minus the signal that ended it.
        spans: of the attempt it was at, as they had ended: OTLP requests in JSON.
    """

    worker: str
    status: int
    spans: tuple[str, ...] = ()

    @property
    def how(self) -> str:
        """In words."""
        if self.status >= 0:
            return f"ended with exit status {self.status}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-self.status).name}"
        return f"was ended by signal {-self.status}"


class WorkerPool:
    """Worker processes of one payload, made by `start` and ended by `stop`. Lives on one event loop.

    Args:
        payload: packed. url, key: of the desk that they serve.
        n_workers: how many. name: what they are counted after, unlike any other pool's of the desk.
        ended: called with each worker that is over, before another takes its place.
        broken: called once when the workers cannot be kept alive.
    """

    def __init__(
        self,
        payload: bytes,
        url: str,
        key: str,
        *,
        n_workers: int,
        name: str,
        ended: Callable[[WorkerExit], Awaitable[None]],
        broken: Callable[[BaseException], None],
    ) -> None:
        self._payload = json.dumps({"url": url, "key": key}).encode() + b"\n" + payload
        self.n_workers, self.name, self.ended, self.broken = n_workers, name, ended, broken
        self.imports_once = True
        self._numbers = itertools.count()
        self._running: dict[str, asyncio.Future[WorkerExit]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the nursery; None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Import the agent and start the workers.

        Raises:
            ConfigError: the agent cannot be imported there, or this system cannot fork.
        """
        if not hasattr(os, "fork"):
            raise ConfigError("this system has no fork", hint='use runners="local" here')
        reader = await self._launch()
        for _ in range(self.n_workers):
            self._add()
        self._listening = asyncio.ensure_future(self._listen(reader))

    async def kill(self, worker: str) -> WorkerExit | None:
        """End a worker and all that it started, at once; None if it is gone already, or does not go."""
        running = self._running.get(worker)
        if running is None:
            return None
        self._tell(kill=worker)
        done, _ = await asyncio.wait((running,), timeout=_KILL_SECONDS)
        return running.result() if done else None

    async def stop(self) -> None:
        """Tell every worker to stop, end those that do not, and wait for all of it; bounded, idempotent."""
        self._stopping = True
        if self._running and self._writer is not None:
            self._tell(stop=True)
            await asyncio.wait(self._running.values(), timeout=STOP_SECONDS + 2.0)
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self._listening = None
        await self._close()

    # -- the nursery --------------------------------------------------------------------------------------------------
    async def _launch(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as payload:
            payload.write(self._payload)
            payload.flush()
            files = theirs.fileno(), payload.fileno()
            self._process = subprocess.Popen(
                command(*files, once=True), pass_fds=files, stdin=subprocess.DEVNULL, start_new_session=True
            )
        theirs.close()
        ours.setblocking(False)
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE_BYTES)
            line = await asyncio.wait_for(reader.readline(), START_SECONDS)
        except BaseException as error:
            await self._close()
            if isinstance(error, TimeoutError):
                raise ConfigError(
                    f"the agent was not imported after {START_SECONDS:g} s", hint="see what its module does on import"
                ) from None
            raise
        said = json.loads(line or b'{"failed": "the process that imports the agent died"}')
        if "failed" in said:
            await self._close()
            raise ConfigError(
                f"the agent cannot be imported in a worker process: {said['failed']}",
                hint="it is imported there anew: what it needs has to be importable and not only be set up here",
            )
        self.imports_once = bool(said["ready"])
        if not self.imports_once:
            log.info("importing the agent starts threads, so each worker imports it for itself")
        return reader

    async def _close(self) -> None:
        """End the nursery, and with it whatever workers there are left."""
        writer, process, self._writer, self._process = self._writer, self._process, None, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_SECONDS):
                    while process.poll() is None:
                        await asyncio.sleep(0.005)
            if process.poll() is None:
                process.kill()
                process.wait()

    def _tell(self, **what: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(what).encode() + b"\n")

    def _add(self) -> None:
        worker = f"{self.name}/{next(self._numbers)}"
        self._running[worker] = asyncio.get_running_loop().create_future()
        self._tell(start=worker)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                line = await reader.readline()
                if line:
                    said = json.loads(line)
                    await self._gone(WorkerExit(said["ended"], said["status"], tuple(said["spans"])))
                    continue
                if self._stopping:
                    return
                # The nursery was killed; its guards end the workers.
                for worker in list(self._running):
                    await self._gone(WorkerExit(worker, -signal.SIGKILL), replace=False)
                await self._close()
                reader = await self._launch()
                while len(self._running) < self.n_workers:
                    self._add()
        except Exception as error:
            self.broken(error)

    async def _gone(self, ended: WorkerExit, *, replace: bool = True) -> None:
        running = self._running.pop(ended.worker, None)
        if running is not None and not running.done():
            running.set_result(ended)
        await self.ended(ended)
        if replace and not self._stopping:
            self._add()


class CrashLoopGuard:
    """Tells when workers die of something that no rollout can be blamed for.

    Args:
        most: how many of them in a row.
    """

    def __init__(self, most: int) -> None:
        self.most, self._n = most, 0

    def check(self, ended: WorkerExit, *, had_work: bool) -> None:
        """Count a worker that is over.

        Raises:
            RolloutError: too many in a row ended, other than by themselves, without a rollout.
        """
        if had_work or ended.status == 0:
            self._n = 0
            return
        self._n += 1
        if self._n >= self.most:
            raise RolloutError(
                f"{self._n} worker processes in a row died before they had a rollout; the last {ended.how}",
                hint="what they wrote to stderr says why; if nothing is there, see whether memory runs out (dmesg)",
            )
