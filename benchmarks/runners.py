"""Rollouts a second in this process, in worker processes and on Ray, for an agent that waits and one that computes.

    python benchmarks/runners.py [--workers 4] [--json FILE]

No model is called: the figures are the cost of running a rollout alone. The agent that waits sleeps for 50 ms, as for a
model; the agent that computes holds the interpreter for about 50 ms, so that threads of one process cannot share it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import agl
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.run.results import require_some
from agl.trainer.run.run import Algorithm, Run
from agl.trainer.run.workplace import Workplace

TASKS = {"nothing": 400, "waits": 200, "computes": 100}


@agl.rollout
def agent(task: Any) -> float:
    if task["what"] == "waits":
        time.sleep(0.05)
    elif task["what"] == "computes":
        return float(sum(i * i for i in range(task["n"])) > 0)
    return 1.0


class Rollouts(Algorithm):
    """An algorithm that runs each kind of task, after a warm-up, and times it."""

    def __init__(self, n: int) -> None:
        self.n, self.per_second, self.start_seconds = n, {}, math.nan

    async def run(self, run: Run) -> None:
        began, workplace = time.perf_counter(), Workplace(run)
        await workplace.start(lambda mode: SamplingRules(), "policy", routed=False)
        try:
            await workplace.rollouts([(0, {"what": "nothing"})] * run.config.n_workers, mode="train", step=0)
            self.start_seconds = time.perf_counter() - began
            for step, (what, count) in enumerate(TASKS.items(), start=1):
                tasks = [(i, {"what": what, "n": self.n}) for i in range(count)]
                began = time.perf_counter()
                require_some(await workplace.rollouts(tasks, mode="train", step=step), "the run")
                self.per_second[what] = count / (time.perf_counter() - began)
        finally:
            await workplace.stop()

    async def dev(self, run: Run, n_tasks: int) -> None:
        await self.run(run)


def fifty_milliseconds() -> int:
    """How far the agent that computes counts."""
    began = time.perf_counter()
    sum(i * i for i in range(1_000_000))
    return int(1_000_000 * 0.05 / (time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    n = fifty_milliseconds()
    print(f"{arguments.workers} workers, {os.cpu_count()} cores; rollouts/s")
    figures: dict[str, Any] = {"workers": arguments.workers, "cores": os.cpu_count()}
    for runners in ("local", "process", "ray"):
        timed = Rollouts(n)
        with tempfile.TemporaryDirectory() as directory:
            trainer = agl.Trainer(
                timed, runners=runners, n_workers=arguments.workers, directory=directory, progress=False
            )
            trainer.fit(agent, [{}])
        figures[runners] = {"start_seconds": timed.start_seconds, "per_second": timed.per_second}
        against = figures["local"]["per_second"]
        cells = "  ".join(f"{k} {v:7.1f} ({v / against[k]:.2f}x)" for k, v in timed.per_second.items())
        print(f"{runners:8s} {cells}  ready after {timed.start_seconds:.1f} s", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
