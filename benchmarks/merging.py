"""Merging: milliseconds for one rollout of 16 to 256 turns, and for a step of 128 rollouts of 128 turns.

    python benchmarks/merging.py

A turn adds about 500 tokens, so that 128 turns are 66,000. Time a token should not grow with the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

from learner import conversations

from agl.mdp.sequence import merge


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    shape = argparse.Namespace(rollouts=1, group=1, prompt=400, answer=200, observation=314)
    print(f"{'turns':>6} {'tokens':>8} {'ms':>8} {'ns a token':>11}")
    for turns in arguments.turns:
        (trajectory,) = conversations(shape, turns, 32_000)
        advantages = {t.call.id: 1.0 for t in trajectory.transitions}
        times = []
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            rows = merge(trajectory, advantages)
            times.append(time.perf_counter() - started)
        took, tokens = statistics.median(times), sum(map(len, rows))
        print(f"{turns:>6} {tokens:>8} {took * 1e3:>8.1f} {took / tokens * 1e9:>11.0f}")
        if turns in (64, 128):
            print(f"{'':>6} {'':>8} {took * 128:>8.2f} s for 128 rollouts")


if __name__ == "__main__":
    main()
