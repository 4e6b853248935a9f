"""The long form of `tests/test_chaos.py`: many disturbed training runs, each with another seed.

    python benchmarks/chaos.py --runs 5 --steps 12 --kills 4
    python benchmarks/chaos.py --database postgresql+psycopg:///agl_chaos   # a database of its own, which is emptied

Prints what was killed and what was counted in each run; ends with 1 at the first that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def terminate_postgres(url: str) -> Callable[[], None]:
    """What ends every connection of others to that database."""

    def terminate() -> None:
        import sqlalchemy

        engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            connection.execute(sqlalchemy.text(others + "AND pid <> pg_backend_pid()"))
        engine.dispose()

    return terminate


def main() -> None:
    from chaos import Chaos, Plan
    from untrained import make_untrained

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runners", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", help="URL of a PostgreSQL database; a SQLite file if left out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = make_untrained(Path(scratch, "model"))
        for k in range(options.runs):
            kills = dict.fromkeys(("runner", "store", "trainer", "database"), options.kills)
            plan = Plan(
                steps=options.steps, runners=options.runners, kills=kills, seed=options.seed + k,
                seconds=300.0 + 60.0 * options.kills * 4,
            )  # fmt: skip
            directory = Path(scratch, f"run-{k}")
            directory.mkdir()
            breaks = terminate_postgres(options.database) if options.database else None
            chaos = Chaos(plan, model, directory, database=options.database, break_connections=breaks, say=print)
            began = time.monotonic()
            chaos.run()
            results.append({"seed": plan.seed, "seconds": time.monotonic() - began, **asyncio.run(chaos.check())})
            print(json.dumps(results[-1]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
