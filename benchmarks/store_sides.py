"""The stores that `store.py` compares, and their tasks; runs in each side's own Python.

The rival's venv runs this file too, so nothing but the standard library is imported at the top.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

TASK = {"question": "What is 17 * 23?", "answer": 391}
GROUP = 64
"""Rollouts that are enqueued at a time where a trainer is played."""


def attributes(turn: int) -> dict[str, Any]:
    """Of the span of one LLM call."""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "policy",
        "gen_ai.response.id": f"chatcmpl-{turn:06d}",
        "gen_ai.usage.input_tokens": 200 + 50 * turn,
        "gen_ai.usage.output_tokens": 40,
        "gen_ai.input.messages": "Use the calculator, then answer with the number alone. " * 8,
        "gen_ai.output.messages": "calculator(17 * 23)" * 4,
    }


class Side(Protocol):
    """One store, driven by the operations of the workloads."""

    async def open(self) -> None: ...
    async def enqueue(self, count: int) -> None: ...
    async def dequeue(self) -> tuple[str, Any]: ...
    async def move(self, rollout: str, attempt: Any, status: Any) -> None: ...
    async def add_spans(self, rollout: str, attempt: Any, turns: range) -> None: ...
    async def count_spans(self, rollout: str, attempt: Any) -> int: ...
    async def close(self) -> None: ...


class Agl:
    """agl's store; `url` as `open_store` takes it."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        # Traces of several runs against one server have to differ.
        self.numbers = itertools.count(time.time_ns())

    async def open(self) -> None:
        from agl.trainer.store import open_store

        self.store = await open_store(self.url)

    async def enqueue(self, count: int) -> None:
        from agl.trainer.store.types import NewRollout

        await self.store.enqueue_rollouts([NewRollout(TASK) for _ in range(count)])

    async def dequeue(self) -> tuple[str, Any]:
        leased = await self.store.dequeue_rollout("worker")
        assert leased is not None
        return leased.rollout.rollout_id, leased.attempt.attempt

    async def move(self, rollout: str, attempt: Any, status: Any) -> None:
        await self.store.update_attempt(rollout, attempt, status)

    async def add_spans(self, rollout: str, attempt: Any, turns: range) -> None:
        from agl.mdp.spans import Span

        now, trace = time.time(), f"{next(self.numbers):032x}"
        await self.store.add_spans(
            [
                Span(trace, f"{turn:016x}", None, rollout, attempt, "chat", now, now, attributes=attributes(turn))
                for turn in turns
            ]
        )

    async def count_spans(self, rollout: str, attempt: Any) -> int:
        return len(await self.store.query_spans(rollout, attempt))

    async def close(self) -> None:
        await self.store.close()


class AgentLightning:
    """Agent Lightning's `InMemoryLightningStore`, or its client to a server of that at `url`."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.numbers = itertools.count(time.time_ns())

    async def open(self) -> None:
        # pyright: basic, reportMissingImports=false
        from agentlightning.store.client_server import LightningStoreClient
        from agentlightning.store.memory import InMemoryLightningStore

        self.store = InMemoryLightningStore() if self.url is None else LightningStoreClient(self.url)

    async def enqueue(self, count: int) -> None:
        from agentlightning.types import EnqueueRolloutRequest

        if count == 1:
            await self.store.enqueue_rollout(input=TASK, mode="train")
        else:
            many = [EnqueueRolloutRequest(input=TASK, mode="train") for _ in range(count)]
            await self.store.enqueue_many_rollouts(many)

    async def dequeue(self) -> tuple[str, Any]:
        leased = await self.store.dequeue_rollout("worker")
        assert leased is not None
        return leased.rollout_id, leased.attempt.attempt_id

    async def move(self, rollout: str, attempt: Any, status: Any) -> None:
        await self.store.update_attempt(rollout, attempt, status=status)

    async def add_spans(self, rollout: str, attempt: Any, turns: range) -> None:
        from agentlightning.types import OtelResource, Span, TraceStatus

        now, trace = time.time(), f"{next(self.numbers):032x}"
        spans = [
            Span(
                rollout_id=rollout,
                attempt_id=attempt,
                sequence_id=turn + 1,
                trace_id=trace,
                span_id=f"{turn:016x}",
                parent_id=None,
                name="chat",
                status=TraceStatus(status_code="OK"),
                attributes=attributes(turn),
                events=[],
                links=[],
                start_time=now,
                end_time=now,
                context=None,
                parent=None,
                resource=OtelResource(attributes={}, schema_url=""),
            )
            for turn in turns
        ]
        if len(spans) == 1:
            await self.store.add_span(spans[0])
        else:
            await self.store.add_many_spans(spans)

    async def count_spans(self, rollout: str, attempt: Any) -> int:
        return len(await self.store.query_spans(rollout, attempt))

    async def close(self) -> None:
        if self.url is not None:
            await self.store.close()


# -- workloads ----------------------------------------------------------------------------------------------------
class Runners:
    """N concurrent runners on a side; each takes rollouts until none are left to begin.

    `each`: a runner enqueues the rollout that it runs and stores every span as it ends. Otherwise rollouts are
    enqueued by the group, as a trainer does, and an attempt's spans are stored together, as agl's runner does.
    """

    def __init__(self, side: Side, runners: int, turns: int, each: bool) -> None:
        self.side, self.runners, self.turns, self.each = side, runners, turns, each

    async def run(self, rollouts: int) -> None:
        todo = iter(range(rollouts))

        async def runner() -> None:
            for number in todo:
                if self.each:
                    await self.side.enqueue(1)
                elif number % GROUP == 0:
                    await self.side.enqueue(min(GROUP, rollouts - number))
                    self._enqueued(number + GROUP)
                else:
                    await self._until(number)
                await self.one()

        self._groups: dict[int, asyncio.Event] = {}
        await asyncio.gather(*(runner() for _ in range(self.runners)))

    def _enqueued(self, end: int) -> None:
        self._groups.setdefault(end // GROUP, asyncio.Event()).set()

    async def _until(self, number: int) -> None:
        await self._groups.setdefault(number // GROUP + 1, asyncio.Event()).wait()

    async def one(self) -> None:
        rollout, attempt = await self.side.dequeue()
        await self.side.move(rollout, attempt, "running")
        if self.each:
            for turn in range(self.turns):
                await self.side.add_spans(rollout, attempt, range(turn, turn + 1))
        else:
            await self.side.add_spans(rollout, attempt, range(self.turns))
        await self.side.move(rollout, attempt, "succeeded")
        spans = await self.side.count_spans(rollout, attempt)
        assert spans == self.turns, f"{spans} spans of {self.turns}"


def cpu_seconds() -> float:
    """Of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def throughput(side: Side, rollouts: int, runners: int, turns: int, each: bool) -> dict[str, float]:
    """Rollouts and spans per second, and CPU milliseconds of this process per rollout."""
    await side.open()
    start, cpu = time.perf_counter(), cpu_seconds()
    await Runners(side, runners, turns, each).run(rollouts)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    await side.close()
    return {
        "rollouts_per_second": rollouts / seconds,
        "spans_per_second": rollouts * turns / seconds,
        "cpu_ms_per_rollout": cpu / rollouts * 1000,
    }


async def growth(side: Side, spans: list[int], turns: int, seconds: float) -> list[dict[str, float]]:
    """What single operations cost in a store that holds so many spans: median milliseconds of 200, one at a time.

    Gives up before a size that has not been reached within `seconds`. 1,000 rollouts wait in the queue all along.
    """
    await side.open()
    workers = Runners(side, 32, turns, each=False)
    await side.enqueue(1000)
    points, rollouts, start = [], 0, time.perf_counter()
    for size in spans:
        while rollouts * turns < size and time.perf_counter() - start < seconds:
            await workers.run(960)
            rollouts += 960
        if rollouts * turns < size:
            break
        costs: dict[str, list[float]] = {"dequeue": [], "add_spans": [], "query_spans": [], "move": []}

        async def timed(name: str, call: Callable[[], Awaitable[Any]], costs: Any = costs) -> Any:
            before = time.perf_counter()
            result = await call()
            costs[name].append((time.perf_counter() - before) * 1000)
            return result

        for _ in range(200):
            await side.enqueue(1)
            rollout, attempt = await timed("dequeue", side.dequeue)
            await side.move(rollout, attempt, "running")
            await timed("add_spans", lambda r=rollout, a=attempt: side.add_spans(r, a, range(turns)))
            await timed("query_spans", lambda r=rollout, a=attempt: side.count_spans(r, a))
            await timed("move", lambda r=rollout, a=attempt: side.move(r, a, "succeeded"))
        rollouts += 200
        medians = {name: statistics.median(values) for name, values in costs.items()}
        points.append({"spans": rollouts * turns, "seconds": time.perf_counter() - start, **medians})
    await side.close()
    return points


async def readers(seconds: float, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Latencies of queries while writers are busy, milliseconds: with one connection for both, as SQLite files had
    before, and with one beside the writer's, in turn. "idle": without writers."""
    import tempfile
    from unittest import mock

    from agl.trainer.store.sql.sqlite import Sqlite

    async def measured(path: str, writers: int) -> dict[str, float]:
        side = Agl(path)
        await side.open()
        await side.enqueue(20_000)
        rollout, attempt = await side.dequeue()
        await side.add_spans(rollout, attempt, range(20))
        end, latencies, written = time.perf_counter() + seconds, [], 0

        async def write() -> None:
            nonlocal written
            while time.perf_counter() < end:
                other, number = await side.dequeue()
                await side.add_spans(other, number, range(200))
                written += 200

        writing = [asyncio.ensure_future(write()) for _ in range(writers)]
        while time.perf_counter() < end:
            started = time.perf_counter()
            await side.count_spans(rollout, attempt)
            latencies.append(1e3 * (time.perf_counter() - started))
            await asyncio.sleep(0.002)
        await asyncio.gather(*writing)
        await side.close()
        latencies.sort()
        at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        percentiles = {name: latencies[int(q * len(latencies))] for name, q in at.items()}
        return {**percentiles, "queries": len(latencies), "spans_per_second": written / seconds}

    facts = []
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        for n in range(rounds):
            row = {}
            for name, beside, writers in (("one connection", False, 4), ("two", True, 4), ("idle", True, 0)):
                with mock.patch.object(Sqlite, "reads_beside_writes", beside):
                    row[name] = await measured(f"{folder}/{n}-{name}.db", writers)
            facts.append(row)
    return facts


async def fill(side: Side, waiting: int) -> None:
    """Leave so many rollouts waiting in the queue."""
    await side.open()
    for _ in range(0, waiting, 1000):
        await side.enqueue(1000)
    await side.close()


async def poll(url: str, runners: int, seconds: float) -> None:
    """`runners` that wait for work of a run that has none, with one request open each."""
    from agl.trainer.store import open_store

    store = await open_store(url)
    await asyncio.gather(
        *(store.dequeue_rollout(f"w{n}", run_id="no-such-run", wait=seconds) for n in range(runners))  # pyright: ignore
    )
    await store.close()


async def serve_agent_lightning(port: int) -> None:
    """The rival's server over its store in memory, until this process is ended."""
    from agentlightning.store.client_server import LightningStoreServer
    from agentlightning.store.memory import InMemoryLightningStore

    server = LightningStoreServer(InMemoryLightningStore(thread_safe=True), "127.0.0.1", port, launch_mode="asyncio")
    await server.run_forever()


def main() -> None:
    """Run one side in this process; the facts are printed as one line of JSON, the last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["agl", "rival"])
    parser.add_argument("task", choices=["throughput", "growth", "readers", "fill", "poll", "serve"])
    parser.add_argument("--url")
    parser.add_argument("--rollouts", type=int, default=0)
    parser.add_argument("--runners", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--spans", type=int, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    side: Side = (Agl if args.kind == "agl" else AgentLightning)(args.url)
    facts: Any = None
    # Libraries print to standard output as they are imported.
    with contextlib.redirect_stdout(sys.stderr):
        if args.task == "throughput":
            facts = asyncio.run(throughput(side, args.rollouts, args.runners, args.turns, args.each))
        elif args.task == "growth":
            facts = asyncio.run(growth(side, args.spans, args.turns, args.seconds))
        elif args.task == "readers":
            facts = asyncio.run(readers(args.seconds, args.rollouts))
        elif args.task == "fill":
            asyncio.run(fill(side, args.rollouts))
        elif args.task == "poll":
            asyncio.run(poll(args.url, args.runners, args.seconds))
        else:
            asyncio.run(serve_agent_lightning(args.port))
    print(json.dumps(facts), flush=True)
    # The rival leaves threads behind.
    os._exit(0)


if __name__ == "__main__":
    main()
