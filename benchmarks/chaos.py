"""The long form of `tests/integration/test_chaos.py`: many disturbed training runs, each with another seed.

    python benchmarks/chaos.py --runs 5 --steps 12 --kills 4
    python benchmarks/chaos.py --postgresql      # a separate server, which is killed too
    python benchmarks/chaos.py --random local process remote verl --kills 10

Prints what was killed and what was counted in each run; exits with 1 at the first run whose counts are wrong.

With `--random`, whole runs of one worker die at a random moment of their lives, the start included, and are resumed,
`--kills` times for each place that rollouts can run in. At their end the policy must equal that of a run that was never
killed, to the bit; but not where the processes that run rollouts were killed alone, for a second attempt samples anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "verl"))

from chaos import Chaos, Plan, power_cut
from postgres import private_server

RANDOM: dict[str, list[tuple[str, ...]]] = {
    "local": [("run", "policy")],
    "process": [("run", "policy"), ("worker",)],
    "remote": [("run", "policy", "trainer", "store"), ("runner",)],
    "verl": [("run",)],
}
"""What is killed, by where rollouts run; each of them is a row of the table."""


def main() -> None:
    from untrained import make_untrained

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runners", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="of each kind; with --random, at each place")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgresql", action="store_true", help="on a private PostgreSQL server, not a SQLite file")
    parser.add_argument("--random", nargs="+", choices=RANDOM, metavar="WHERE", help=", ".join(RANDOM))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        model = make_untrained(Path(scratch, "model"))
        results = (random_kills if options.random else planned_kills)(options, model, Path(scratch), stack)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(any(result.get("fault") for result in results))


def planned_kills(
    options: argparse.Namespace, model: Path, scratch: Path, stack: contextlib.ExitStack
) -> list[dict[str, Any]]:
    """Runs with several runners in which each kind of process is killed `--kills` times."""
    results: list[dict[str, Any]] = []
    for k in range(options.runs):
        kills = dict.fromkeys(("runner", "store", "trainer", "database"), options.kills)
        plan = Plan(
            steps=options.steps, runners=options.runners, kills=kills, seed=options.seed + k,
            seconds=300.0 + 60.0 * options.kills * 4,
        )  # fmt: skip
        chaos = made(plan, model, scratch / f"run-{k}", options, stack)
        began = time.monotonic()
        chaos.run()
        assert chaos.killed == kills, f"training had ended after {dict(chaos.killed)}: plan more steps"
        results.append({"seed": plan.seed, "seconds": time.monotonic() - began, **asyncio.run(chaos.check())})
        print(json.dumps(results[-1]))
    return results


def random_kills(
    options: argparse.Namespace, model: Path, scratch: Path, stack: contextlib.ExitStack
) -> list[dict[str, Any]]:
    """One row of the table for each place and what is killed there."""
    rows: list[dict[str, Any]] = []
    alone: dict[bool, Chaos] = {}
    for where in options.random:
        is_verl = where == "verl"
        if is_verl and any(find_spec(name) is None for name in ("verl", "vllm", "transfer_queue")):
            print("verl: left out, its stack is not installed here (deploy/verl-cpu.sh)")
            continue
        if is_verl not in alone:
            alone[is_verl] = left_alone("verl" if is_verl else "local", options, model, scratch, stack)
        for kinds in RANDOM[where]:
            plan = replace(alone[is_verl].plan, where=where)
            kills = -(-options.kills // len(RANDOM[where]))
            directory = scratch / f"{where}-{len(rows)}"
            rows.append(killed_at_random(plan, kinds, kills, alone[is_verl], directory, options, stack))
            print(json.dumps(rows[-1]), flush=True)
    columns = ("where", "killed", "runs", "seconds", "rollouts", "trained_calls", "witness_spans", "policy", "fault")
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row[c]) for c in columns) + " |")
    return rows


def left_alone(
    where: str, options: argparse.Namespace, model: Path, scratch: Path, stack: contextlib.ExitStack
) -> Chaos:
    """The run that the others are compared with: one worker, one seed, nothing killed."""
    plan = Plan(
        where=where, steps=options.steps, runners=1, workers=1, turn=0.1, kills={}, seed=options.seed, pause=(0.1, 0.1),
        seconds=3600.0,
    )  # fmt: skip
    chaos = made(plan, model, scratch / f"alone-{where}", options, stack)
    chaos.run()
    asyncio.run(chaos.check())
    return chaos


def killed_at_random(
    plan: Plan,
    kinds: tuple[str, ...],
    kills: int,
    alone: Chaos,
    scratch: Path,
    options: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> dict[str, Any]:
    """Runs that are killed until there were `kills`, each compared with one that was left alone."""
    began = time.monotonic()
    moments = sorted(alone.checkpoints.values())
    # A life lasts two steps at most, so that all of it is hit: start, resuming, rollouts, updates, checkpoints.
    pause = (0.0, moments[0] + 2 * (moments[-1] - moments[0]) / (len(moments) - 1))
    draw = random.Random(options.seed)
    row: dict[str, Any] = {"where": plan.where, "killed": Counter(), "fault": "", "policy": "", "rollouts": 0}
    row |= {"runs": 0, "seconds": 0, "trained_calls": 0, "witness_spans": 0, "unlike": 0, "second_attempts": 0}
    while (left := kills - row["killed"].total()) > 0 and not row["fault"]:
        row["runs"] += 1
        due = dict(Counter(draw.choice(kinds) for _ in range(left)))
        disturbed = replace(plan, kills=due, pause=pause, moments=draw.randrange(2**32))
        chaos = made(disturbed, alone.model, scratch / f"run-{row['runs']}", options, stack)
        try:
            chaos.run()
            facts = asyncio.run(chaos.check())
            same = chaos.same_policy(alone)
            for count in ("rollouts", "trained_calls", "witness_spans", "second_attempts"):
                row[count] += facts[count]
            row["unlike"] += not same
            if not same and not facts["second_attempts"] and chaos.exact:
                row["fault"] = "the policy is not that of a run that was left alone"
        except (AssertionError, TimeoutError) as error:
            row["fault"] = str(error) or repr(error)
            print(error)
        row["killed"] += chaos.killed
        if not chaos.killed.total():
            # It was over before its first moment came.
            pause = (0.0, pause[1] / 2)
    row["killed"] = ", ".join(f"{kind} {n}" for kind, n in sorted(row["killed"].items()))
    row["policy"] = f"equal in {row['runs'] - row['unlike']} of {row['runs']}"
    if row["second_attempts"]:
        row["policy"] += f" ({row['second_attempts']} second attempts)"
    return row | {"seconds": round(time.monotonic() - began)}


def made(plan: Plan, model: Path, directory: Path, options: argparse.Namespace, stack: contextlib.ExitStack) -> Chaos:
    """A run in a new directory, on the database that was asked for."""
    directory.mkdir(parents=True)
    url = breaks = None
    if options.postgresql:
        server = stack.enter_context(contextlib.contextmanager(private_server)())
        url, breaks = server.new_database(), power_cut(server)
    return Chaos(plan, model, directory, database=url, break_connections=breaks, say=print)


if __name__ == "__main__":
    main()
