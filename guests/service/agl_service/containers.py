"""Workers in containers, each for one attempt: what the attempt writes or leaves running ends with its container.

Invariant: a container ends when its stdin is closed, so none outlives this process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agl._version import __version__
from agl.errors import ConfigError
from agl.trainer.http.unix_sockets import listening_at
from agl.trainer.processes.container import Container, engine_environment
from agl.trainer.processes.environment import values_of
from agl.trainer.processes.frames import to_frame
from agl.trainer.processes.sandbox import Walls
from agl.trainer.runners.options import ProcessRunners
from agl.trainer.runners.process.fork_server import KILL, STOP, STOP_SECONDS
from agl.trainer.runners.process.worker_pool import KILL_SECONDS, START_SECONDS, WorkerExit
from agl_service.contained import SOCKETS, relay

_PROCESSES = 512
_SCRATCH_MB = 1024


def require_container(options: ProcessRunners, payload: bytes) -> None:
    """Import the agent in a container.

    Raises:
        ConfigError: there is no such image, or it cannot run the agent.
    """
    line = f"{options.engine} build --tag {options.container} ."
    hint = f"build it, with agl {__version__}, guests/service and the agent: {line} (docs/runners.md has a Dockerfile)"
    if problem := Container(options.engine, options.container).problem():
        hint = hint if shutil.which(options.engine) else "apt-get install podman; or ProcessRunners(engine='docker')"
        raise ConfigError(f"container={options.container!r} cannot be used: {problem}", hint=hint)
    try:
        done = subprocess.run(
            _command(options, {}),
            input=_frame(options, payload),
            capture_output=True,
            env=engine_environment(),
            timeout=START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the agent was not imported after {START_SECONDS:g} s in {options.container!r}") from None
    failed = json.loads(done.stdout or b"{}").get("failed") if done.returncode == 0 else done.stderr.decode()
    if failed:
        raise ConfigError(f"container={options.container!r} cannot run the agent: {failed.strip()[-2000:]}", hint=hint)


def _command(options: ProcessRunners, folders: dict[str, str]) -> list[str]:
    container = Container(options.engine, options.container, options.network)
    walls = Walls(
        folders=folders,
        environment={"HOME": "/tmp"},
        memory_mb=options.memory_mb,
        scratch_mb=_SCRATCH_MB,
        processes=_PROCESSES,
    )
    code = "from agl_service.contained import main; main()"
    return container.arguments(["python3", "-c", code], walls)


def _frame(options: ProcessRunners, payload: bytes, **more: Any) -> bytes:
    head = {"payload": payload, "release": __version__, "python": list(sys.version_info[:2])}
    return to_frame({**head, "env": values_of(options.env), **more})


class ContainerPool:
    """As `WorkerPool`, with a new container for each attempt, which reaches the coordinator by a socket in a volume."""

    def __init__(
        self,
        options: ProcessRunners,
        payload: bytes,
        url: str,
        key: str,
        *,
        n_workers: int,
        name: str,
        on_exit: Callable[[WorkerExit], Awaitable[None]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.n_workers = n_workers
        self.name = name
        self.on_exit = on_exit
        self.on_failure = on_failure
        self._options = options
        self._payload = payload
        self._url = url
        self._key = key
        self._numbers = itertools.count()
        self._running: dict[str, tuple[asyncio.subprocess.Process, asyncio.Future[WorkerExit]]] = {}
        self._folder: str | None = None
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Start the workers."""
        self._folder = tempfile.mkdtemp(prefix="agl-containers-")  # which other users cannot enter
        sockets = Path(self._folder, "sockets")
        sockets.mkdir()
        at = urlsplit(self._url)
        to_coordinator = relay(lambda: asyncio.open_connection(at.hostname, at.port))
        # For the containers' user.
        self._server = await asyncio.start_unix_server(to_coordinator, sock=listening_at(sockets / "coordinator"))
        self._command = _command(self._options, {SOCKETS: str(sockets)})
        self._tasks = [asyncio.ensure_future(self._keep()) for _ in range(self.n_workers)]

    async def kill(self, worker: str) -> WorkerExit | None:
        """End a worker and all that it started, at once; None if it had ended before, or does not end."""
        if worker not in self._running:
            return None
        process, ended = self._running[worker]
        assert process.stdin is not None
        process.stdin.write(KILL)
        done, _ = await asyncio.wait((ended,), timeout=KILL_SECONDS)
        return ended.result() if done else None

    async def stop(self) -> None:
        """Ask every worker to stop, kill those that do not, and wait for all of it; bounded, idempotent."""
        self._stopping = True
        for signal in (STOP, None):
            for process, _ in self._running.values():
                assert process.stdin is not None
                process.stdin.close() if signal is None else process.stdin.write(signal)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=STOP_SECONDS + 2.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self) -> None:
        """Keep one worker alive."""
        port = None if self._options.network == "host" else urlsplit(self._url).port
        try:
            while not self._stopping:
                worker = f"{self.name}/{next(self._numbers)}"
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=engine_environment(),
                    start_new_session=True,
                )
                assert process.stdin is not None
                assert process.stdout is not None
                ended: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
                self._running[worker] = process, ended
                about = {"worker": worker, "url": self._url, "key": self._key, "port": port}
                process.stdin.write(_frame(self._options, self._payload, **about))
                answer = await process.stdout.read()
                status = await process.wait()
                report = json.loads(answer or b"null") or {"status": status, "spans": []}
                ended.set_result(WorkerExit(worker, report["status"], tuple(report["spans"])))
                del self._running[worker]
                await self.on_exit(ended.result())
        except Exception as error:
            self.on_failure(error)
