"""Every benchmark in a quick form, and their tables in docs/benchmarks.md or the page of `PAGES`.

    benchmarks/all.sh [NAME ...] [--page FILE]
    benchmarks/all.sh --short          # does each still run? No rivals but TRL; the page stays as it is

What a benchmark prints takes the place of what it printed last time, between two marks in the page: its Markdown table
if it prints one, otherwise all of it as text. A benchmark that fails, because its rival's environment cannot be made
or something is not installed here, keeps its old block; the others run nevertheless. The end names those that failed,
with the reason, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICK: dict[str, tuple[str, ...]] = {
    "import_time": ("--runs", "5"),
    "routing": (),
    "ways_to_learn": ("--rounds", "2", "--tasks", "64", "--held-out", "128"),
    "waiting": ("--seeds", "1", "--steps", "8", "--held-out", "128"),
    "task_sampling": ("--seeds", "1", "--tasks", "48", "--steps", "10"),
    "policies": (),
    "engine": ("--repeats", "1"),
    "learner": ("--turns", "2", "8", "--repeats", "1"),
    "grammar": (),
    "merging": (),
    "memory": (),
    "remembering": (),
    "gateway": ("--requests", "500"),
    "gateway.dialects": ("--dialects", "--requests", "2000"),
    "gateways": (),
    "gateways.share": ("--share", "0.15", "--turns", "10"),
    "flood": ("--rounds", "1", "--seconds", "2"),
    "overhead": ("--rounds", "11"),
    "rollouts": ("--rounds", "3"),
    "store": ("--quick",),
    "store.growth": ("--growth", "--quick"),
    "store.http": ("--http", "--rollouts", "200"),
    "store.memory": ("--memory",),
    "store.readers": ("--readers", "--quick"),
    "record": ("--steps", "100", "--repeats", "3"),
    "scale": ("--turns", "20", "--tokens", "8000"),
    "runners": (),
    "dashboard": ("paint", "--steps", "100"),
    "dashboard.training": ("training", "--steps", "6", "--turns", "2"),
    "loggers": ("--steps", "4", "--rounds", "1"),
    "trl_grpo": ("--rounds", "1", "--steps", "3"),
    "programs": ("--programs", "200"),
    "harnesses": (),
    "verl_bridge": ("--steps", "4", "--rounds", "1"),
    "verl_prefixes": ("--rounds", "2"),
}
"""Name -> the arguments of its quick form, in the order of the page. After a point: which part of the benchmark."""
SHORT: dict[str, tuple[str, ...]] = {
    "import_time": ("--runs", "1"),
    "ways_to_learn": ("--rounds", "2", "--tasks", "16", "--held-out", "8"),
    "waiting": ("--seeds", "1", "--steps", "1", "--held-out", "8", "--seconds", "1"),
    "task_sampling": ("--seeds", "1", "--tasks", "16", "--steps", "1", "--held-out", "8"),
    "policies": ("--steps", "1", "--policies", "1", "2"),
    "engine": ("--repeats", "1", "--agents", "4"),
    "learner": ("--turns", "2", "--rollouts", "8", "--repeats", "1"),
    "grammar": ("--agents", "4", "--repeats", "1"),
    "merging": ("--turns", "16", "--repeats", "1"),
    "remembering": ("--entries", "50", "--searches", "5"),
    "gateway": ("--requests", "100", "--no-rival"),
    "gateway.dialects": ("--dialects", "--requests", "100", "--rounds", "1"),
    "gateways": ("--rounds", "1", "--turns", "4", "--tokens", "1000"),
    "gateways.share": ("--share", "0.15", "--rounds", "1", "--turns", "4", "--tokens", "1000"),
    "flood": ("--rounds", "1", "--seconds", "0.5"),
    "overhead": ("--rounds", "1", "--no-rivals"),
    "rollouts": ("--rounds", "1"),
    "store": ("--rollouts", "20", "--turns", "2", "--repeats", "1", "--no-rival"),
    "store.growth": ("--growth", "--quick", "--no-rival"),
    "store.http": ("--http", "--rollouts", "20", "--turns", "2", "--repeats", "1", "--no-rival"),
    "store.memory": ("--memory", "--no-rival"),
    "store.readers": ("--readers", "--quick", "--no-rival"),
    "record": ("--steps", "100", "--repeats", "1"),
    "scale": ("--turns", "5", "--tokens", "1000"),
    "dashboard.training": ("training", "--steps", "2", "--turns", "1"),
    "loggers": ("--steps", "1", "--rounds", "1"),
    "programs": ("--programs", "8"),
    "harnesses": ("--only", "mini"),
    "trl_grpo": ("--rounds", "1", "--steps", "1", "--cases", "single"),
    "verl_bridge": ("--steps", "3", "--rounds", "1"),
    "verl_prefixes": ("--rounds", "1", "--prompts", "64", "--answers", "2"),
}
"""Name -> the arguments of `--short`, where the quick form takes longer than a look at whether it runs needs."""
PAGES = {"harnesses": "harnesses.md"}
"""Name -> its page in docs/, if that is not benchmarks.md."""
NOT_HERE = {
    "all", "overhead_cases", "engine_sides", "store_sides", "verl_weighed", "chaos", "soak", "gpu", "trl_learning"
}  # fmt: skip
"""Parts of others; chaos and soak, which run longer in `.ci/nightly`; what needs a GPU, or hours."""
TAIL = 15
"""Lines of a failure that are shown."""


def file_of(name: str) -> str:
    """The file of a benchmark."""
    return name.partition(".")[0] + ".py"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- benchmark {name} -->", f"<!-- end of {name} -->"


def block(name: str, printed: str, *, command: str | None = None, where: str | None = None) -> str:
    """What goes into the page for a benchmark, its marks included.

    Args:
        command: as it was run, if it is none of `QUICK`. where: the hardware, if it is not the CPU.
    """
    lines = printed.strip("\n").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    body = tables if any(line.startswith("|--") for line in tables) else ["```text", *lines, "```"]
    command = command or " ".join(("python", f"benchmarks/{file_of(name)}", *QUICK[name]))
    here = where or f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.0f}"
    when = f"{datetime.date.today()}, {here}, CPython {platform.python_version()}"
    begin, end = marks(name)
    return "\n".join([begin, f"`{command}` ({when})", "", *body, end])


def insert(page: str, name: str, new: str) -> str:
    """The page with the benchmark's block replaced, or added at its end."""
    begin, end = marks(name)
    if begin in page:
        before, _, rest = page.partition(begin)
        return before + new + rest.partition(end)[2]
    return page.rstrip("\n") + f"\n\n{new}\n"


def run(command: list[str], seconds: float) -> tuple[str, str]:
    """What a benchmark printed, and why it failed ("" where it did not)."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            # A session of its own: at the limit the servers that it has started end as well.
            process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:
            return "", str(error)
        try:
            code = process.wait(seconds)
            reason = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            reason = f"not done after {seconds / 60:g} minutes"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (out, err):
            file.seek(0)
        said = err.read().strip().splitlines()
        if reason:
            print(*said[-TAIL:], sep="\n", file=sys.stderr)
            reason = "; ".join((reason, *said[-1:]))
        return out.read(), reason


def main() -> None:
    """Run them one after the other; the page is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUICK)}; all without")
    parser.add_argument("--page", type=Path, help="instead of those in docs/")
    parser.add_argument("--short", action="store_true", help="the smallest forms, printed only")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit of each benchmark")
    parser.add_argument("--verl-python", default=sys.executable, help="interpreter of deploy/verl-cpu.sh's environment")
    options = parser.parse_args()
    if unknown := set(options.names) - set(QUICK):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(QUICK)}")
    failed: dict[str, str] = {}
    began = time.monotonic()
    for name in options.names or QUICK:
        python = options.verl_python if name.startswith("verl_") else sys.executable
        arguments = SHORT.get(name, QUICK[name]) if options.short else QUICK[name]
        print("+", name, *arguments, file=sys.stderr, flush=True)
        started = time.monotonic()
        printed, reason = run([python, str(HERE / file_of(name)), *arguments], 60 * options.minutes)
        print(f"+ {name} {'failed' if reason else 'done'} in {time.monotonic() - started:.0f} s", file=sys.stderr)
        if reason:
            failed[name] = reason
        elif options.short:
            print(printed, flush=True)
        else:
            page = options.page or HERE.parent / "docs" / PAGES.get(name, "benchmarks.md")
            page.write_text(insert(page.read_text(), name, block(name, printed)))
    print(f"+ all of it took {time.monotonic() - began:.0f} s", file=sys.stderr)
    for name, reason in failed.items():
        print(f"{name} failed{'' if options.short else ', the page keeps its old block'}: {reason}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
