"""Does anything grow? Rollouts by the hundred thousand, and the memory, descriptors and threads of every process.

    python benchmarks/soak.py                                     # 100,000 rollouts: store server, trainer, runner
    python benchmarks/soak.py --runners process --minutes 15      # in worker processes, for at most 15 minutes

Each rollout goes the real way: leased from the store's file, run by an agent in another process, which asks the gateway
over HTTP; its call, spans and reward are stored. The engine answers at once: tokens are not the point. Prints a curve
and exits with 1 if something still grew in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from processes import AGL, family, free_port, programs

import agl
from agl.trainer.run.run import Algorithm
from agl.trainer.store.sql.sqlite import CACHE_KIB

GROWTH_BYTES = 100
"""Of memory per rollout. What one rollout holds takes more: an empty dict 64 bytes and its place in another 100, an id
65, a `Rollout` 600, a call with its tokens 3,000. Anything kept for each rollout is above, rare leftovers are below."""
NOISE_BYTES = 4 * 2**20
"""By which an allocator's arenas move a process up or down; decides in short runs alone."""
HANDLES = 4
"""Descriptors or threads by which a process may differ: a connection that is being replaced, a worker thread."""
BATCH = 256
"""Rollouts that a step waits for."""


# -- the agent, which `agl runner` and worker processes import ---------------------------------------------------------
@agl.rollout
def agent(task: Any, llm: agl.LLM) -> float:
    """Ask twice over one connection."""
    parts = urllib.parse.urlsplit(llm.endpoint)
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    messages: list[Any] = [{"role": "user", "content": f"{task['question']}: " + "7 + 5, and so on; " * 20}]
    # Closed here: a socket that dies with its thread warns, and CPython 3.11 then leaks 200 bytes of that thread.
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=60)) as connection:
        for _ in range(2):
            body = json.dumps({"model": llm.model, "max_tokens": 32, "messages": messages}).encode()
            connection.request("POST", f"{parts.path}/chat/completions", body, headers)
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise RuntimeError(answer.decode())
            messages += [json.loads(answer)["choices"][0]["message"], {"role": "user", "content": "go on"}]
    return 1.0


# -- the trainer's process --------------------------------------------------------------------------------------------
class Soak(Algorithm):
    """An algorithm that trains nothing: it prints after each step how many ended, and waits for "on" or "end"."""

    async def run(self, run: Any) -> None:
        from scale import Instant

        from agl.trainer.gateway.access import SamplingRules
        from agl.trainer.quickstart.tokenizer import build_tokenizer
        from agl.trainer.rendering.rendering import Rendering
        from agl.trainer.run.results import require_some
        from agl.trainer.run.workplace import Workplace

        tokenizer = build_tokenizer()
        engine, rendering = Instant(tokenizer), Rendering(tokenizer)
        rules, workplace = SamplingRules(max_tokens=32), Workplace(run)
        await workplace.start(lambda mode: rules, "policy", register=lambda g: g.serve("policy", engine, rendering))
        done = 0
        try:
            for step in itertools.count():
                tasks = [(i, run.train[i % len(run.train)]) for i in range(BATCH)]
                results = await workplace.rollouts(tasks, mode="train", step=step)
                assert len(require_some(results, f"step {step}")) == BATCH, results
                done += BATCH
                print(done, flush=True)
                # Samples are taken while nothing runs, the last one before anything ends.
                if (await asyncio.to_thread(sys.stdin.readline)).strip() != "on":
                    return
        finally:
            await workplace.stop()

    async def dev(self, run: Any, n_tasks: int) -> None:
        await self.run(run)


def train(options: argparse.Namespace) -> None:
    remote = options.runners == "remote"
    trainer = agl.Trainer(
        Soak(), runners=options.runners, n_workers=options.workers,
        directory=options.directory, store=options.store, port=options.port, progress=False,
    )  # fmt: skip
    trainer.fit(None if remote else f"{__file__}:agent", [{"question": f"what is {i} + {i}?"} for i in range(97)])


# -- what is measured -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sample:
    """A process at a moment. `memory`: its share of resident memory (PSS), in bytes; `resident`: all of it (RSS)."""

    rollouts: int
    seconds: float
    memory: int
    resident: int
    descriptors: int
    threads: int


PARTS = {0: "", 1: ", what forks workers", 2: ", supervisors", 3: ", workers"}
"""What a trainer's descendants are called, by generation."""


@dataclass
class Curves:
    """Samples of all processes by name; what a process has several of is added up, for they share the rollouts."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def take(self, roots: dict[str, int], rollouts: int, seconds: float) -> None:
        now: dict[str, list[Sample]] = {}
        for name, pid in roots.items():
            for process, depth in family(pid):
                with contextlib.suppress(OSError):
                    now.setdefault(name + PARTS[depth], []).append(look(process, rollouts, seconds))
        for name, parts in now.items():
            sums = (sum(getattr(p, slot) for p in parts) for slot in Sample.__slots__[2:])
            self.samples.setdefault(name, []).append(Sample(rollouts, seconds, *sums))

    def faults(self) -> list[str]:
        """What grew after half of the rollouts, or came and went then."""
        most = max(curve[-1].rollouts for curve in self.samples.values())
        found = []
        for name, curve in self.samples.items():
            if curve[-1].rollouts < most:
                found.append(f"{name} ended after {curve[-1].rollouts} rollouts")
                continue
            late = [s for s in curve if s.rollouts >= most / 2]
            if len(late) < 4 or curve[0].rollouts > most / 2:
                found.append(f"{name} began after {curve[0].rollouts} rollouts: {len(late)} samples are too few")
                continue
            slope = growth(late)
            if slope * most / 2 > max(GROWTH_BYTES * most / 2, NOISE_BYTES):
                found.append(f"{name} grows by {slope:.0f} bytes a rollout, more than {GROWTH_BYTES}")
            for what in ("descriptors", "threads"):
                early = [s for s in curve if most / 4 <= s.rollouts < most / 2] or late[:1]
                last = [s for s in late if s.rollouts >= most * 3 / 4]
                before, after = (max(getattr(s, what) for s in part) for part in (early, last))
                if after > before + HANDLES:
                    found.append(f"{name} had {before} {what} and has {after}")
        return found

    def table(self, rows: int = 8) -> str:
        """Markdown: the memory of each process along the run, and what it grew by at its end."""
        most = max(curve[-1].rollouts for curve in self.samples.values())
        marks = [round(most * (i + 1) / rows) for i in range(rows)]
        lines = [
            "| process | "
            + " | ".join(f"{m:,}" for m in marks)
            + " | bytes a rollout, second half | descriptors | threads |"
        ]
        lines.append("|" + "---|" * (rows + 4))
        for name, curve in self.samples.items():
            near = [min(curve, key=lambda s: abs(s.rollouts - mark)) for mark in marks]
            late = [s for s in curve if s.rollouts >= most / 2]
            cells = [f"{s.memory / 2**20:.1f}" for s in near]
            cells += [f"{growth(late):.0f}" if len(late) > 1 else ""]
            cells += [f"{near[0].descriptors} - {near[-1].descriptors}", f"{near[0].threads} - {near[-1].threads}"]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        return "\n".join(lines)


def growth(curve: list[Sample]) -> float:
    """Bytes a rollout: the slope of a line through the samples' memory."""
    x = np.array([s.rollouts for s in curve], float)
    return float(np.polyfit(x, np.array([s.memory for s in curve], float), 1)[0]) if np.ptp(x) else 0.0


def look(pid: int, rollouts: int, seconds: float) -> Sample:
    """Raises OSError for a process that has ended."""
    rollup = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    status = Path(f"/proc/{pid}/status").read_text()
    threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    memory, resident = int(rollup["Pss:"]) * 1024, int(rollup["Rss:"]) * 1024
    return Sample(rollouts, seconds, memory, resident, descriptors, threads)


# -- the run ----------------------------------------------------------------------------------------------------------
def soak(options: argparse.Namespace, directory: Path) -> tuple[Curves, int, float]:
    """Run it; the curves, the rollouts that ended and the seconds that took.

    Raises:
        RuntimeError: the trainer failed.
    """
    curves, roots = Curves(), {}
    words = ["--role", "train", "--runners", options.runners, "--workers", options.workers]
    words += ["--directory", directory / "run"]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    with programs(directory, **quiet) as started:
        if options.runners == "remote":
            store, port = free_port(), free_port()
            roots["store"] = started.start(
                *AGL, "store", "--db", directory / "store.db", "--port", store, log="store.log"
            ).pid
            words += ["--store", f"http://127.0.0.1:{store}", "--port", port]
            listening(store)
        began, done, last = time.monotonic(), 0, 0.0
        trainer = started.start(
            sys.executable, __file__, *words, log="trainer.log", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        roots["trainer"] = trainer.pid
        if options.runners == "remote":
            name = f"{Path(__file__)}:agent"
            roots["runner"] = started.start(
                *AGL, "runner", "--store", f"http://127.0.0.1:{port}", "--agent", name, "--n-workers", options.workers,
                log="runner.log",
            ).pid  # fmt: skip
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        for line in trainer.stdout:
            done, now = int(line), time.monotonic()
            over = done >= options.rollouts or now - began > 60 * options.minutes
            if over or now - last >= options.every:
                last = now
                curves.take(roots, done, now - began)
                memory = ", ".join(f"{n} {c[-1].memory / 2**20:.0f}" for n, c in curves.samples.items())
                print(f"{done:8,} rollouts, {done / (now - began):5.0f}/s; MiB: {memory}", flush=True)
            print("end" if over else "on", file=trainer.stdin, flush=True)
        seconds = time.monotonic() - began
        if trainer.wait():
            raise RuntimeError(f"the trainer failed\n{started.text('trainer.log')[-3000:]}")
        return curves, done, seconds


def listening(port: int, seconds: float = 60.0) -> None:
    """Wait until a server listens. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on port {port} after {seconds:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=120.0, help="end after so long, with fewer rollouts")
    parser.add_argument("--runners", choices=("remote", "process"), default="remote")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--json", type=Path, help="write all samples here")
    for hidden in ("--role", "--directory", "--store"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "train":
        train(options)
        return
    with tempfile.TemporaryDirectory(prefix="agl-soak-") as scratch:
        curves, done, seconds = soak(options, Path(scratch))
        files = sum(path.stat().st_size for path in Path(scratch).rglob("*.db"))
    faults = curves.faults()
    if files < 2 * CACHE_KIB * 1024:
        faults.append(f"{done} rollouts are too few: the store's page cache was not full after half of them")
    print(
        f"\n{done:,} rollouts in {seconds:.0f} s ({done / seconds:.0f}/s), store {files / 2**20:.0f} MiB; PSS in MiB:\n"
    )
    print(curves.table())
    print("\n" + "\n".join(faults or ["flat: nothing grew in the second half"]))
    if options.json:
        facts = {
            name: [[getattr(s, slot) for slot in Sample.__slots__] for s in c] for name, c in curves.samples.items()
        }
        verdict = {"rollouts": done, "seconds": seconds, "store_bytes": files, "faults": faults}
        options.json.write_text(json.dumps({**verdict, "columns": Sample.__slots__, "samples": facts}) + "\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
