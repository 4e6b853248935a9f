"""Every benchmark in a quick form, and their tables in docs/benchmarks.md.

    benchmarks/all.sh [NAME ...] [--page FILE]

What a benchmark prints takes the place of what it printed last time, between two marks in the page: its Markdown table
if it prints one, otherwise all of it as text. A benchmark that fails, because its rival's environment cannot be made
or something is not installed here, keeps its old block, and the reason is shown at the end.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICK: dict[str, tuple[str, ...]] = {
    "import_time": ("--runs", "5"),
    "routing": (),
    "engine": ("--repeats", "1"),
    "learner": ("--turns", "2", "8", "--repeats", "1"),
    "merging": (),
    "memory": (),
    "remembering": (),
    "gateway": ("--requests", "500"),
    "flood": ("--rounds", "1", "--seconds", "2"),
    "overhead": ("--rounds", "11"),
    "rollouts": ("--rounds", "3"),
    "store": ("--quick", "--repeats", "1"),
    "record": ("--steps", "100", "--repeats", "3"),
    "scale": ("--turns", "20", "--tokens", "8000"),
    "runners": (),
    "dashboard": ("paint", "--steps", "100"),
    "trl_grpo": ("--rounds", "1", "--steps", "3"),
    "verl_bridge": ("--steps", "4", "--rounds", "1"),
}
"""Name -> the arguments of its quick form, in the order of the page."""
NOT_HERE = {"all", "overhead_cases", "store_sides", "verl_weighed", "chaos", "soak", "loggers"}
"""Parts of others; and what takes longer by nature: `.ci/nightly` runs chaos and soak, loggers needs trackers."""
HEADING = "## In a quick form: `benchmarks/all.sh`"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- benchmark {name} -->", f"<!-- end of {name} -->"


def block(name: str, printed: str) -> str:
    """What goes into the page for a benchmark, its marks included."""
    lines = printed.strip("\n").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    body = tables if any(line.startswith("|--") for line in tables) else ["```text", *lines, "```"]
    command = " ".join(("python", f"benchmarks/{name}.py", *QUICK[name]))
    when = f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.0f}, " + (
        f"CPython {platform.python_version()}"
    )
    begin, end = marks(name)
    return "\n".join([begin, f"`{command}` ({when})", "", *body, end])


def insert(page: str, name: str, new: str) -> str:
    """The page with the benchmark's block replaced, or added to the section of quick forms."""
    begin, end = marks(name)
    if begin in page:
        before, _, rest = page.partition(begin)
        return before + new + rest.partition(end)[2]
    if HEADING not in page:
        page = page.rstrip("\n") + f"\n\n{HEADING}\n"
    return page.rstrip("\n") + f"\n\n{new}\n"


def main() -> None:
    """Run them one after the other; the page is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUICK)}; all without")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit of each benchmark")
    options = parser.parse_args()
    if unknown := set(options.names) - set(QUICK):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(QUICK)}")
    kept: dict[str, str] = {}
    for name in options.names or QUICK:
        command = [sys.executable, str(HERE / f"{name}.py"), *QUICK[name]]
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60 * options.minutes)
        except subprocess.TimeoutExpired:
            kept[name] = f"not done after {options.minutes:g} minutes"
            continue
        if done.returncode:
            kept[name] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            continue
        options.page.write_text(insert(options.page.read_text(), name, block(name, done.stdout)))
    for name, reason in kept.items():
        print(f"{name}: the page keeps its old block: {reason}", file=sys.stderr)
    if kept:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
