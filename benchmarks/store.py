"""agl's store against Agent Lightning 0.3.0's: throughput, cost as it grows, memory of a server.

All sides run the same workload, each in a separate process, in turn. agl's writes are on disk when they return; the
rival's are in memory. For every rollout: enqueue, dequeue, "running", spans, "succeeded", query the spans. `each`
enqueues one rollout and stores one span at a time; `runner` enqueues by 64 and stores an attempt's spans together.

    python benchmarks/store.py                     # SQLite file and memory against the rival's memory
    python benchmarks/store.py --http              # `agl store` against the rival's server, each with its client
    python benchmarks/store.py --postgresql URL    # PostgreSQL as well; its tables are emptied
    python benchmarks/store.py --growth            # single operations at 10,000, 100,000 and 1,000,000 spans
    python benchmarks/store.py --memory            # of a server: 10,000 rollouts waiting, 1,000 runners polling
    python benchmarks/store.py --readers           # queries of a SQLite file while writers are busy
    python benchmarks/store.py --quick             # a minute; any of these with few rollouts

A venv for the rival is made on first use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RIVAL = "agentlightning==0.3.0"
SIDES = Path(__file__).with_name("store_sides.py")
TITLES = {
    "sqlite": "agl, SQLite file",
    "memory": "agl, memory",
    "postgresql": "agl, PostgreSQL",
    "http": "agl, HTTP to SQLite file",
    "rival": "Agent Lightning 0.3.0, memory",
    "rival-http": "Agent Lightning 0.3.0, HTTP to memory",
}
FULL = [("each", 300, 32, 6), ("each", 3000, 32, 6), ("each", 3000, 1000, 3)]
FULL += [("runner", 3000, 32, 3), ("runner", 3000, 32, 20), ("runner", 3000, 1000, 20)]
"""Workload, rollouts, runners, turns."""
QUICK = [("each", 300, 32, 6), ("runner", 1000, 32, 6), ("runner", 1000, 1000, 20)]
OVER_HTTP = [("each", 300, 32, 6), ("runner", 1000, 32, 6), ("runner", 1000, 1000, 20)]


class Bench:
    """Where the sides run, and what a side is started with."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.runs = args, folder, 0
        self.rival = rival_python(args.rival_venv) if args.rival else ""

    def sides(self, *names: str) -> list[str]:
        """Those of these that are compared."""
        return [name for name in names if self.rival or not name.startswith("rival")]

    def command(self, name: str, task: str, *options: object) -> list[str]:
        kind = "rival" if name.startswith("rival") else "agl"
        python = self.rival if kind == "rival" else sys.executable
        return [python, str(SIDES), kind, task, *map(str, options)]

    def run(self, name: str, task: str, *options: object) -> Any:
        """A side's report of a task, done in a separate process."""
        with self.url(name) as url:
            return self.do(name, task, *(["--url", url] if url else []), *options)

    def do(self, name: str, task: str, *options: object) -> Any:
        done = subprocess.run(self.command(name, task, *options), env=environment(), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{TITLES[name]} failed at {task}:\n{done.stderr[-4000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    @contextlib.contextmanager
    def url(self, name: str) -> Iterator[str | None]:
        """A new and empty store of that side, with the server it needs."""
        self.runs += 1
        if name == "sqlite":
            yield f"sqlite:///{self.folder}/{self.runs}.db"
        elif name == "postgresql":
            empty(self.args.postgresql)
            yield self.args.postgresql
        elif name.endswith("http"):
            with self.server(name) as (url, _):
                yield url
        else:
            yield None

    @contextlib.contextmanager
    def server(self, name: str) -> Iterator[tuple[str, int]]:
        """A store's server in a separate process: its URL and the process id."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if name == "http":
            database = f"sqlite:///{self.folder}/{self.runs}-{port}.db"
            command = [sys.executable, "-c", "from agl.trainer.cli import main; main()", "store"]
            command += ["--db", database, "--port", str(port)]
        else:
            command = self.command(name, "serve", "--port", port)
        with (self.folder / "server.log").open("w+") as log:
            process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
            try:
                url = f"http://127.0.0.1:{port}"
                while not answers(url):
                    if process.poll() is not None:
                        log.seek(0)
                        sys.exit(f"the server of {TITLES[name]} ended:\n{log.read()[-4000:]}")
                    time.sleep(0.1)
                yield url, process.pid
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    # -- what is measured -----------------------------------------------------------------------------------------
    def throughput(self) -> list[dict[str, Any]]:
        """The sides in turn, `repeats` times over; a table for each shape of the workload."""
        args = self.args
        names = self.sides("http", "rival-http") if args.http else self.sides("sqlite", "memory", "rival")
        names[1:1] = ["postgresql"] if args.postgresql else []
        shapes = QUICK if args.quick else OVER_HTTP if args.http else FULL
        if args.rollouts:
            shapes = [(args.workload, args.rollouts, args.runners, args.turns)]
        facts = []
        for workload, rollouts, runners, turns in shapes:
            options = ["--rollouts", rollouts, "--runners", runners, "--turns", turns]
            options += ["--each"] if workload == "each" else []
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for _ in range(args.repeats):
                for name in names:
                    runs[name].append(self.run(name, "throughput", *options))
            medians = {
                name: {key: statistics.median(one[key] for one in every) for key in every[0]}
                for name, every in runs.items()
            }
            ratio = medians[names[0]]["rollouts_per_second"] / medians[names[-1]]["rollouts_per_second"]
            print(f"{ratio:5.2f}x  {workload}: {rollouts} rollouts, {runners} runners, {turns} turns", flush=True)
            for name in names:
                m = medians[name]
                every = " ".join(f"{one['rollouts_per_second']:.0f}" for one in runs[name])
                rates = f"{m['rollouts_per_second']:7.0f} rollouts/s {m['spans_per_second']:8.0f} spans/s"
                print(f"    {TITLES[name]:38} {rates} {m['cpu_ms_per_rollout']:7.3f} ms CPU   ({every})", flush=True)
            shape = {"workload": workload, "rollouts": rollouts, "runners": runners, "turns": turns}
            facts.append(shape | {"ratio": ratio, "medians": medians, "runs": runs})
        return facts

    def growth(self) -> dict[str, Any]:
        """Single operations at several sizes."""
        sizes = [10_000, 50_000] if self.args.quick else [10_000, 100_000, 1_000_000]
        names = self.sides("sqlite", *(["postgresql"] if self.args.postgresql else []), "rival")
        facts = {}
        for name in names:
            seconds = 20 if self.args.quick else self.args.growth_seconds
            facts[name] = self.run(name, "growth", "--turns", 20, "--seconds", seconds, "--spans", *sizes)
            print(f"{TITLES[name]}: median ms of one operation, 20 spans an attempt")
            for row in facts[name]:
                costs = "  ".join(f"{key} {row[key]:.3f}" for key in ("dequeue", "add_spans", "query_spans", "move"))
                print(f"    {row['spans']:9,} spans after {row['seconds']:5.0f} s   {costs}", flush=True)
            if len(facts[name]) < len(sizes):
                print(f"    did not reach {sizes[len(facts[name])]:,} spans in {seconds} s")
        return facts

    def readers(self) -> list[dict[str, dict[str, float]]]:
        """Latencies of queries beside four writers of 200 spans at a time, three times over."""
        facts = self.do("sqlite", "readers", "--seconds", 2 if self.args.quick else 5, "--rollouts", self.args.repeats)
        for row in facts:
            for name, costs in row.items():
                rest = "  ".join(f"{key} {value:.2f}" for key, value in costs.items())
                print(f"{name:16} ms of a query: {rest}", flush=True)
        return facts

    def memory(self) -> dict[str, Any]:
        """Resident memory of the two servers, in MiB."""
        facts: dict[str, Any] = {}
        for name in self.sides("http", "rival-http"):
            with self.server(name) as (url, pid), (self.folder / "polls.log").open("w") as log:
                row = {"empty": resident(pid)}
                self.do(name, "fill", "--url", url, "--rollouts", 10_000)
                row["10,000 waiting"] = resident(pid)
                if name == "http":
                    options = ["--url", url, "--runners", 1000, "--seconds", 15]
                    polls = subprocess.Popen(self.command(name, "poll", *options), env=environment(), stdout=log)
                    time.sleep(10)
                    row["and 1,000 runners polling"] = resident(pid)
                    polls.wait(60)
            facts[name] = row
            print(f"{TITLES[name]}: " + ", ".join(f"{key} {value:.0f} MiB" for key, value in row.items()), flush=True)
        return facts


def resident(pid: int) -> float:
    """MiB of memory that a process has resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def answers(url: str) -> bool:
    """Whether an HTTP server answers there, whatever it says."""
    try:
        urllib.request.urlopen(url, timeout=1)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def empty(url: str) -> None:
    """Delete all rows of agl's tables there."""
    from sqlalchemy import create_engine, inspect

    from agl.trainer.store.sql.schema import metadata

    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    there = set(inspect(engine).get_table_names())
    with engine.begin() as connection:
        for table in metadata.sorted_tables:
            if table.name in there:
                connection.execute(table.delete())
    engine.dispose()


def environment() -> dict[str, str]:
    """Without this litellm, which the rival imports, first looks for a price list on the network."""
    return {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def rival_python(venv: Path) -> str:
    """The Python of a venv that has the rival; made if missing."""
    python = venv / "bin" / "python"
    if not list(venv.glob("lib/*/site-packages/agentlightning")):
        print(f"building {venv} with {RIVAL}, once ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", RIVAL], check=True)
    return str(python)


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agl" / "agentlightning"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--postgresql", metavar="URL")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--growth-seconds", type=int, default=240, help="limit of each side")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--readers", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side; the median counts")
    parser.add_argument("--rollouts", type=int, help="one shape of your own, with the three below")
    parser.add_argument("--workload", choices=["each", "runner"], default="runner")
    parser.add_argument("--runners", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rival-venv", type=Path, default=cache, help="(default: %(default)s)")
    parser.add_argument("--no-rival", dest="rival", action="store_false", help="leave Agent Lightning out")
    parser.add_argument("--json", type=Path, help="write the same facts here")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder:
        bench = Bench(args, Path(folder))
        chosen = [name for name in ("growth", "memory", "readers") if getattr(args, name)]
        facts = getattr(bench, chosen[0] if chosen else "throughput")()
    if args.json:
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
