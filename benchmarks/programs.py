"""Small programs graded per second: in each sandbox, without one, and as an evaluation script runs them.

    python benchmarks/programs.py                     # 1,000 programs with three asserts, 1,000 with three inputs
    python benchmarks/programs.py --programs 100

"a process for each" is the rival: a new interpreter runs the program and its tests together, as the usual scripts for
HumanEval do, without limits or walls. As many programs are graded at a time as there are
cores, and the sides take turns.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agl.errors import ConfigError
from agl.rewards import PythonTests

ASSERTS = {"tests": [f"assert f({n}) == {n + 1}" for n in range(3)]}
INPUTS = {"test_cases": [{"input": f"{n}\n", "output": f"{n + 1}\n"} for n in range(3)]}
PROGRAMS = {"asserts": (ASSERTS, "def f(x):\n    return x + 1 + {0} - {0}\n"),
            "inputs": (INPUTS, "print(int(input()) + 1 + {0} - {0})\n")}  # fmt: skip
TURNS = 4


def bare(task: dict[str, Any], code: str) -> float:
    """The share of passed tests, each in a plain process."""
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=60, check=False)
    if "tests" in task:
        ended = [run([sys.executable, "-c", f"{code}\n{test}"]).returncode == 0 for test in task["tests"]]
    else:
        ended = [
            run([sys.executable, "-c", code], input=case["input"]).stdout == case["output"]
            for case in task["test_cases"]
        ]
    return sum(ended) / len(ended)


def sides() -> dict[str, Callable[[Any, str], float]]:
    found: dict[str, Callable[[Any, str], float]] = {"a process for each": bare}
    for isolation in ("bubblewrap", "podman", "docker", "none"):
        try:
            found[f"agl, {isolation}"] = PythonTests(isolation=isolation)
        except ConfigError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    options = parser.parse_args()
    n = max(1, options.programs // TURNS)
    graders = sides()
    seconds = {(kind, side): 0.0 for kind in PROGRAMS for side in graders}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for turn in range(TURNS):
            for kind, (task, code) in PROGRAMS.items():
                for side, grade in graders.items():
                    grade(task, code.format(0))
                    start = time.perf_counter()
                    shares = list(threads.map(lambda i: grade(task, code.format(i)), range(turn * n, turn * n + n)))  # noqa: B023
                    seconds[kind, side] += time.perf_counter() - start
                    assert shares == [1.0] * n, f"{side} grades right programs {shares}"
    print("| programs graded per second | three asserts | three inputs |\n|---|---|---|")
    for side in graders:
        rates = {kind: TURNS * n / seconds[kind, side] for kind in PROGRAMS}
        print(f"| {side} | {rates['asserts']:.0f} | {rates['inputs']:.0f} |")


if __name__ == "__main__":
    main()
