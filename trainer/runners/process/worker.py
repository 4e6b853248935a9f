"""A worker process: executes a desk's rollouts one at a time, until it is told to stop or an attempt outlives its end.

What an attempt leaves running (a thread that cannot be stopped, a blocked loop) ends with the process: another worker
takes its place.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback

import orjson

from agl.agents.agent import Agent
from agl.errors import AglError
from agl.mdp.spans import Span
from agl.tracing import otlp
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.process.payload import Payload
from agl.trainer.runners.remote.coordinator import CoordinatorClient

BROKEN = 3
"""Exit status of a worker that cannot reach its desk or is refused by it."""


class Journal:
    """The spans of the running attempt as they end, one per line in a file that outlives this process."""

    def __init__(self, file: int) -> None:
        self._file = file

    def begin(self) -> None:
        """Forget those of the attempt before."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)

    def add(self, span: Span) -> None:
        """Note a span that ended; from any thread."""
        os.write(self._file, orjson.dumps(otlp.encode([span])) + b"\n")


def journal_of(file: int) -> list[str]:
    """What a `Journal` noted, an OTLP request in JSON each; the last one is left out if it was cut off."""
    whole, _, _ = os.pread(file, os.fstat(file).st_size, 0).rpartition(b"\n")
    return whole.decode(errors="replace").splitlines() if whole else []


class _OneAtATime(LocalRunner):
    """One worker under its runner's own name, which stops where an attempt did not end by itself."""

    def __init__(self, agent: Agent, desk: CoordinatorClient, journal: Journal, payload: Payload, name: str) -> None:
        self.spent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        super().__init__(
            agent, desk, n_workers=1, broken=self._fail, hooks=payload.hooks, name=name, span_ended=journal.add
        )
        self._journal = journal

    def _fail(self, error: BaseException) -> None:
        if not self.spent.done():
            self.spent.set_exception(error)

    async def _work(self, worker_id: str) -> None:
        while True:
            lease = await self.desk.lease(self.name)
            if lease is None:
                continue
            self._journal.begin()
            report = await self.attempt(lease)
            self._journal.begin()
            if report is None or report.status == "timeout":
                if not self.spent.done():
                    self.spent.set_result(None)
                return


async def _serve(payload: Payload, name: str, url: str, key: str, journal: Journal) -> None:
    assert isinstance(payload.agent, Agent)
    desk = CoordinatorClient(url, key, selection=payload.selection, resources=payload.resources)
    runner = _OneAtATime(payload.agent, desk, journal, payload, name)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await runner.start()
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((runner.spent, stopped), return_when=asyncio.FIRST_COMPLETED)
        if runner.spent.done():
            runner.spent.result()
    finally:
        stopped.cancel()
        await runner.stop()
        await desk.close()


def serve(payload: Payload, name: str, url: str, key: str, journal: int) -> int:
    """Work until there is a reason to end; the exit status.

    Args:
        payload: unpacked. name: of this worker, at the desk. url, key: of the desk. journal: file descriptor.
    """
    try:
        asyncio.run(_serve(payload, name, url, key, Journal(journal)))
    except AglError as error:
        print(f"worker {name}: {error}", file=sys.stderr)
        return BROKEN
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
