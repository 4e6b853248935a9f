"""A worker process: executes a coordinator's rollouts one at a time, until it is stopped or an attempt overruns.

What an attempt leaves running (a thread that cannot be stopped, a blocked loop) ends with the process: another worker
takes its place.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback

from agl.agents.agent import Agent
from agl.errors import AglError
from agl.mdp.spans import Span
from agl.tracing import otlp
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.process.payload import Payload
from agl.trainer.runners.remote.client import CoordinatorClient
from agl.trainer.wire.methods import dumps

BROKEN = 3
"""Exit status of a worker that cannot reach its coordinator or is refused by it."""


def run_worker(payload: Payload, name: str, url: str, key: str, journal: int, *, once: bool = False) -> int:
    """Execute rollouts until there is a reason to end; the exit status.

    Args:
        payload: unpacked.
        name: of this worker.
        url, key: of the coordinator.
        journal: file descriptor.
        once: end after one of them.
    """
    try:
        asyncio.run(_run_worker(payload, name, url, key, Journal(journal), once))
    except AglError as error:
        print(f"worker {name}: {error}", file=sys.stderr)
        return BROKEN
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Journal:
    """The ended spans of the running attempt, one per line in a file that outlives this process."""

    def __init__(self, file: int) -> None:
        self._file = file

    def begin(self) -> None:
        """Forget the spans of the previous attempt."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)

    def add(self, span: Span) -> None:
        """Record a span that ended; from any thread."""
        os.write(self._file, dumps(otlp.encode([span])) + b"\n")


def read_journal(file: int) -> list[str]:
    """The spans of a `Journal`, each an OTLP request in JSON; the last one is left out if it is incomplete."""
    complete, _, _ = os.pread(file, os.fstat(file).st_size, 0).rpartition(b"\n")
    # Only a line break ends a line: texts have other characters that `splitlines` takes for one.
    return complete.decode(errors="replace").split("\n") if complete else []


async def _run_worker(payload: Payload, name: str, url: str, key: str, journal: Journal, once: bool) -> None:
    assert isinstance(payload.agent, Agent)
    coordinator = CoordinatorClient(url, key, selection=payload.selection, resources=payload.resources)
    runner = _SequentialRunner(payload.agent, coordinator, journal, payload, name, once)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    os.register_at_fork(after_in_child=_forget_signals)
    try:
        await runner.run(runner.over, stop)
    finally:
        await coordinator.close()


def _forget_signals() -> None:
    """A process that the agent or its reward forks, such as one of a `multiprocessing.Pool`, would tell this worker's
    loop of the SIGTERM that ends it, by the pipe that both have; and the worker would stop."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _SequentialRunner(LocalRunner):
    """One worker with its runner's name, which stops after an attempt that did not end by itself.

    Attributes:
        over: done when the worker has stopped, with the error if it failed.
    """

    def __init__(
        self, agent: Agent, coordinator: CoordinatorClient, journal: Journal, payload: Payload, name: str, once: bool
    ) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        super().__init__(
            agent,
            coordinator,
            n_workers=1,
            on_failure=self._fail,
            hooks=payload.hooks,
            name=name,
            on_span_end=journal.add,
        )
        self._journal = journal
        self._once = once

    def _fail(self, error: BaseException) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    async def _work(self, worker_id: str) -> None:
        while True:
            lease = await self.coordinator.lease(self.name)
            if lease is None:
                continue
            self._journal.begin()
            report = await self.attempt(lease)
            self._journal.begin()
            if self._once or report is None or report.status == "timeout":
                if not self.over.done():
                    self.over.set_result(None)
                return
