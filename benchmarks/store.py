"""Rollouts per second of agl's store on a SQLite file against Agent Lightning 0.3.0's store in memory.

Both sides run the same workload, each in a process of its own, in turn: N concurrent runners, and for every rollout
enqueue, dequeue, "running", one span per turn, "succeeded", query the spans. agl's writes are on disk when they return.

    python benchmarks/store.py                 # builds a venv for the rival on first use
    python benchmarks/store.py --json out.json

The rival's venv runs this same file, so nothing but the standard library is imported at the top.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

RIVAL = "agentlightning==0.3.0"
SIDES = {"agl": "agl, SQLite file", "agl-memory": "agl, memory", "rival": "Agent Lightning 0.3.0, memory"}
TASK = {"question": "What is 17 * 23?", "answer": 391}


class Side(Protocol):
    """One store, driven by the operations of the workload."""

    async def open(self) -> None: ...
    async def enqueue(self) -> None: ...
    async def dequeue(self) -> tuple[str, Any]: ...
    async def move(self, rollout: str, attempt: Any, status: Any) -> None: ...
    async def add_span(self, rollout: str, attempt: Any, turn: int) -> None: ...
    async def count_spans(self, rollout: str, attempt: Any) -> int: ...
    async def close(self) -> None: ...


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


class Agl:
    """agl's store; `url` as `open_store` takes it."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.numbers = itertools.count(1)

    async def open(self) -> None:
        from agl.trainer.store import open_store

        self.store = await open_store(self.url)

    async def enqueue(self) -> None:
        from agl.trainer.store.base import NewRollout

        await self.store.enqueue_rollouts([NewRollout(TASK)])

    async def dequeue(self) -> tuple[str, Any]:
        leased = await self.store.dequeue_rollout("worker")
        assert leased is not None
        return leased.rollout.rollout_id, leased.attempt.attempt

    async def move(self, rollout: str, attempt: Any, status: Any) -> None:
        await self.store.update_attempt(rollout, attempt, status)

    async def add_span(self, rollout: str, attempt: Any, turn: int) -> None:
        from agl.spans import Span

        now, number = time.time(), next(self.numbers)
        span = Span(
            f"{number:032x}", f"{number:016x}", None, rollout, attempt, "chat", now, now, attributes=attributes(turn)
        )
        await self.store.add_spans([span])

    async def count_spans(self, rollout: str, attempt: Any) -> int:
        return len(await self.store.query_spans(rollout, attempt))

    async def close(self) -> None:
        await self.store.close()


class AgentLightning:
    """Agent Lightning's `InMemoryLightningStore`."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)

    async def open(self) -> None:
        from agentlightning.store.memory import InMemoryLightningStore  # pyright: ignore[reportMissingImports]

        self.store = InMemoryLightningStore()

    async def enqueue(self) -> None:
        await self.store.enqueue_rollout(input=TASK, mode="train")

    async def dequeue(self) -> tuple[str, Any]:
        leased = await self.store.dequeue_rollout("worker")
        assert leased is not None
        return leased.rollout_id, leased.attempt.attempt_id

    async def move(self, rollout: str, attempt: Any, status: Any) -> None:
        await self.store.update_attempt(rollout, attempt, status=status)

    async def add_span(self, rollout: str, attempt: Any, turn: int) -> None:
        from agentlightning.types import OtelResource, Span, TraceStatus  # pyright: ignore[reportMissingImports]

        now, number = time.time(), next(self.numbers)
        span = Span(
            rollout_id=rollout,
            attempt_id=attempt,
            sequence_id=turn + 1,
            trace_id=f"{number:032x}",
            span_id=f"{number:016x}",
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
        await self.store.add_span(span)

    async def count_spans(self, rollout: str, attempt: Any) -> int:
        return len(await self.store.query_spans(rollout, attempt))

    async def close(self) -> None:
        pass


async def workload(side: Side, rollouts: int, runners: int, turns: int) -> float:
    """Seconds that the runners need for all rollouts."""
    await side.open()
    todo = iter(range(rollouts))

    async def runner() -> None:
        for _ in todo:
            await side.enqueue()
            rollout, attempt = await side.dequeue()
            await side.move(rollout, attempt, "running")
            for turn in range(turns):
                await side.add_span(rollout, attempt, turn)
            await side.move(rollout, attempt, "succeeded")
            found = await side.count_spans(rollout, attempt)
            assert found == turns, f"{found} spans of {turns}"

    start = time.perf_counter()
    await asyncio.gather(*(runner() for _ in range(runners)))
    seconds = time.perf_counter() - start
    await side.close()
    return seconds


def run_side(name: str, args: argparse.Namespace) -> float:
    """Rollouts per second of one side, measured in this process."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        ours = Agl(f"{folder}/store.db" if name == "agl" else None)
        side = AgentLightning() if name == "rival" else ours
        return args.rollouts / asyncio.run(workload(side, args.rollouts, args.runners, args.turns))


def measure(name: str, python: str, args: argparse.Namespace) -> float:
    """Rollouts per second of one side, measured in a process of its own."""
    command = [python, __file__, "--side", name, "--rollouts", str(args.rollouts)]
    command += ["--runners", str(args.runners), "--turns", str(args.turns)]
    # Without it litellm, which the rival imports, first looks for a price list on the network.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{SIDES[name]} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def rival_python(venv: Path) -> str:
    """The Python of a venv that has the rival, built if it is not there."""
    python = venv / "bin" / "python"
    if not list(venv.glob("lib/*/site-packages/agentlightning")):
        print(f"building {venv} with {RIVAL}, once ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", RIVAL], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--runners", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side; the median counts")
    parser.add_argument("--rival-venv", type=Path, default=Path(__file__).with_name(".venv-agentlightning"))
    parser.add_argument("--json", type=Path, help="write the same facts here")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(run_side(args.side, args))
        return
    pythons = dict.fromkeys(SIDES, sys.executable) | {"rival": rival_python(args.rival_venv)}
    runs: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(args.repeats):
        for name in SIDES:
            runs[name].append(measure(name, pythons[name], args))
    medians = {name: statistics.median(values) for name, values in runs.items()}
    ratio = medians["agl"] / medians["rival"]
    print(f"{args.rollouts} rollouts, {args.runners} runners, {args.turns} turns; rollouts/s, {args.repeats} runs each")
    for name, title in SIDES.items():
        every = "  ".join(f"{value:7.1f}" for value in runs[name])
        print(f"  {title:32} {medians[name]:8.1f}   ({every} )")
    print(f"  agl on disk / Agent Lightning in memory: {ratio:.2f}x")
    if args.json:
        facts = {"rollouts": args.rollouts, "runners": args.runners, "turns": args.turns}
        facts |= {"rollouts_per_second": medians, "runs": runs, "ratio": ratio}
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
