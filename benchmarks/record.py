"""What it takes to show a long run: the list of runs, its curves, and the table of one step's rollouts.

    python benchmarks/record.py                       # 1,000 steps, 100,000 rollouts, 40 metrics a step; SQLite
    python benchmarks/record.py --url postgresql://user@host/db
    python benchmarks/record.py --steps 100           # a tenth of it
    python benchmarks/record.py --keep run.db         # keep the file, and use it the next time

The store is opened anew for the figures. `first` is the first time, when SQL is compiled and pages are read; `again` is
the median of the others. The last figure is the ratio to a table that asks for each rollout's attempts, calls, spans
and training records in turn, as a reader without `query_step` has to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from agl import semconv
from agl.mdp.spans import Span
from agl.mdp.types import Call, float_array, int_array
from agl.trainer.store import open_store
from agl.trainer.store.base import Store
from agl.trainer.store.types import NewRollout, TrainedCall, TrainingRun

RUN = "run-long"
OTHERS, ROLLOUTS, TABLE, GROUP, TURNS, METRICS = 20, 100, 128, 8, 3, 40
PROMPT, RESPONSE = 400, 60
"""Tokens of the first prompt, and of each answer."""
TEXT = "Every word of a conversation is in the attributes of its spans. " * 30


async def fill(store: Store, steps: int) -> None:
    """A run of so many steps, and the metrics of others."""
    for run_id in (RUN, *(f"run-{n}" for n in range(OTHERS))):
        await store.put_run(TrainingRun(run_id, algorithm="GRPO", step=steps, steps=steps, created_at=1.0))
        for first in range(0, steps, 100):
            await asyncio.gather(
                *(store.add_metrics(run_id, step + 1, numbers()) for step in range(first, first + 100))
            )
    for step in range(steps):
        await fill_step(store, step, TABLE if step == steps // 2 else ROLLOUTS)


def numbers() -> dict[str, float]:
    return {f"learner/metric_{n}": random.random() for n in range(METRICS)}


async def fill_step(store: Store, step: int, n: int) -> None:
    ids = [f"ro-{step:06d}-{k:03d}" for k in range(n)]
    await store.enqueue_rollouts(
        [
            NewRollout({"question": TEXT[:300]}, run_id=RUN, step=step, group=f"train-{step}-{k // GROUP}", index=k,
                       rollout_id=rollout_id)
            for k, rollout_id in enumerate(ids)
        ]
    )  # fmt: skip
    await asyncio.gather(*(store.dequeue_rollout("worker", run_id=RUN) for _ in ids))
    await asyncio.gather(
        *(store.add_calls(calls(rollout_id)) for rollout_id in ids),
        *(store.add_spans(spans(rollout_id)) for rollout_id in ids),
        *(store.update_attempt(rollout_id, 1, "succeeded") for rollout_id in ids),
        store.add_trained_calls(
            RUN,
            [
                TrainedCall(f"{i}/{turn}", i, step + 1, step, turn, 1.0, 1.0, random.gauss(0, 1), RESPONSE)
                for i in ids
                for turn in range(TURNS)
            ],
        ),
    )


def calls(rollout_id: str) -> list[Call]:
    """A conversation: each prompt extends the one before."""
    made, prompt = [], np.random.randint(0, 50_000, PROMPT, dtype=np.int32)
    for turn in range(TURNS):
        response = np.random.randint(0, 50_000, RESPONSE, dtype=np.int32)
        made.append(
            Call(
                f"{rollout_id}/{turn}", rollout_id, 1, turn, "writer", "policy", 1, int_array(prompt),
                int_array(response), float_array(np.full(RESPONSE, -0.5, np.float32)),
                parent_id=f"{rollout_id}/{turn - 1}" if turn else None, request={"messages": TEXT},
                response={"content": TEXT[:200]},
            )
        )  # fmt: skip
        prompt = np.concatenate([prompt, response, np.zeros(20, np.int32)])
    return made


def spans(rollout_id: str) -> list[Span]:
    """The agent's, one per call and tool, and a reward."""
    reward = {semconv.OPERATION_NAME: semconv.REWARD, semconv.REWARD_NAME: "reward", semconv.REWARD_VALUE: 1.0}
    names = ["invoke_agent writer", *["chat model", "execute_tool calculator"] * TURNS, "reward reward"]
    return [
        Span(
            rollout_id, f"{k:016x}", None, rollout_id, 1, name, k, k + 1,
            attributes=reward if k == len(names) - 1 else {semconv.INPUT_MESSAGES: TEXT},
        )
        for k, name in enumerate(names)
    ]  # fmt: skip


async def one_by_one(store: Store, step: int) -> None:
    """The same table without `query_step`."""
    for rollout in await store.query_rollouts(run_id=RUN, step=step, mode="train"):
        await store.query_attempts(rollout.rollout_id)
        await store.query_calls(rollout.rollout_id, rollout.attempts)
        await store.query_spans(rollout.rollout_id, rollout.attempts)
        await store.query_trained_calls(rollout.rollout_id)


async def measured(what: Callable[[], Awaitable[Any]], repeats: int) -> tuple[float, float]:
    """Milliseconds: the first time, and the median of the others."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        await what()
        times.append(1000 * (time.perf_counter() - began))
    return times[0], statistics.median(times[1:])


async def report(url: str, steps: int, repeats: int) -> dict[str, tuple[float, float]]:
    store = await open_store(url)
    middle = steps // 2
    run_ids = [run.run_id for run in await store.query_runs()]

    async def runs() -> None:
        await store.query_runs()
        await store.query_metrics(run_ids, ends=True)

    reads: dict[str, Callable[[], Awaitable[Any]]] = {
        f"{len(run_ids)} runs with the ends of {METRICS} metrics": runs,
        "all metrics of a run": lambda: store.query_metrics([RUN]),
        "one metric of every run": lambda: store.query_metrics(run_ids, names=["learner/metric_7"]),
        "the last step's metrics": lambda: store.query_metrics([RUN], after_step=steps - 1),
        f"a step of {TABLE} rollouts": lambda: store.query_step(RUN, middle),
        "a group of it": lambda: store.query_step(RUN, middle, group=f"train-{middle}-3"),
        f"a step of {TABLE} rollouts, one by one": lambda: one_by_one(store, middle),
    }
    figures = {}
    for name, read in reads.items():
        figures[name] = await measured(read, repeats)
        print(f"{name:45} first {figures[name][0]:8.1f} ms   again {figures[name][1]:8.1f} ms", flush=True)
    await store.close()
    table, naive = figures[f"a step of {TABLE} rollouts"], figures[f"a step of {TABLE} rollouts, one by one"]
    print(f"one by one / query_step: first {naive[0] / table[0]:.1f}, again {naive[1] / table[1]:.1f}")
    return figures


async def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = args.url or f"sqlite:///{args.keep or Path(folder) / 'run.db'}"
        store = await open_store(url)
        try:
            if not await store.query_runs(run_ids=[RUN]):
                began = time.perf_counter()
                await fill(store, args.steps)
                print(f"filled in {time.perf_counter() - began:.0f} s")
        finally:
            await store.close()
        figures = await report(url, args.steps, args.repeats)
    if args.json:
        args.json.write_text(
            json.dumps({name: dict(zip(("first", "again"), ms, strict=True)) for name, ms in figures.items()})
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a store to fill and to read; a new SQLite file if not given")
    parser.add_argument("--keep", type=Path, help="the SQLite file")
    parser.add_argument("--steps", type=int, default=1000, help="a multiple of 100")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asyncio.run(main(parser.parse_args()))
