"""The long form of `tests/integration/test_chaos.py`: many disturbed training runs, each with another seed.

    python benchmarks/chaos.py --runs 5 --steps 12 --kills 4
    python benchmarks/chaos.py --postgresql      # a separate server, which is killed too

Prints what was killed and what was counted in each run; exits with 1 at the first run whose counts are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))


def main() -> None:
    from chaos import Chaos, Plan, power_cut
    from postgres import private_server
    from untrained import make_untrained

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runners", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgresql", action="store_true", help="on a private PostgreSQL server, not a SQLite file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        model = make_untrained(Path(scratch, "model"))
        for k in range(options.runs):
            kills = dict.fromkeys(("runner", "store", "trainer", "database"), options.kills)
            plan = Plan(
                steps=options.steps, runners=options.runners, kills=kills, seed=options.seed + k,
                seconds=300.0 + 60.0 * options.kills * 4,
            )  # fmt: skip
            directory = Path(scratch, f"run-{k}")
            directory.mkdir()
            url = breaks = None
            if options.postgresql:
                server = stack.enter_context(contextlib.contextmanager(private_server)())
                url, breaks = server.new_database(), power_cut(server)
            chaos = Chaos(plan, model, directory, database=url, break_connections=breaks, say=print)
            began = time.monotonic()
            chaos.run()
            results.append({"seed": plan.seed, "seconds": time.monotonic() - began, **asyncio.run(chaos.check())})
            print(json.dumps(results[-1]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
