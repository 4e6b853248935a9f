"""What tracing costs per LLM call: agl outside and inside a rollout, and the rivals, against no tracing.

    python benchmarks/overhead.py                         # builds a venv with the rivals on first use
    python benchmarks/overhead.py --only openai langchain --rounds 41 --json out.json

Each case (`overhead_cases.CASES`) is real SDK or framework code over a transport that answers in its own process.
Instrumentation is global, so each variant has a separate process, of the same Python with the same packages. They
take turns, one at a time, in a new order each round. A cost is CPU time of all threads above that of no tracing,
divided by the run's LLM calls: of the least disturbed rounds (the first decile of each side; other programs only ever
add), and as the median of the differences within a round. Garbage collection is off within a round.

agl in a rollout includes the rollout's own set-up where a run is a whole agent's; its spans end where the runner
collects them. The rivals' go through a `BatchSpanProcessor` to an exporter that drops them.

A second figure is not disturbed by other programs: how many functions, of Python and of C, a call adds in the agent's
thread. Outside a rollout the cost is below the noise; how many of agl's functions are entered there is exact, and
`routing.py` times one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import site
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overhead_cases import CASES, RIVALS, VARIANTS

PACKAGES = (
    *(f"openinference-instrumentation-{name}" for name in (
        "openai", "anthropic", "langchain", "openai-agents", "agent-framework", "strands-agents", "autogen-agentchat",
    )),
    *(f"opentelemetry-instrumentation-{name}" for name in ("openai", "anthropic", "langchain", "openai-agents")),
)  # fmt: skip
WORKER = Path(__file__).with_name("overhead_cases.py")
ROUND_SECONDS = 0.02
"""CPU time that a round of the untraced variant is made to take."""


def venv_python(venv: Path) -> str:
    """The Python of a venv that has the rivals in addition to everything that this one has; built if missing."""
    python = venv / "bin" / "python"
    if not list(venv.glob("lib/*/site-packages/openinference")):
        print(f"building {venv} with {len(PACKAGES)} instrumentors, once ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        [folder] = venv.glob("lib/*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (folder / "beside.pth").write_text("\n".join(lines) + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return str(python)


class Worker:
    """A process that runs one variant of a case on request."""

    def __init__(self, python: str, case: str, variant: str) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([python, WORKER, case, variant], **pipes)
        self.what = f"{case}, {variant}"

    def ready(self) -> None:
        self._line()

    def run(self, what: int | str) -> dict[str, float]:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if line := self.process.stdout.readline():
            return line
        raise RuntimeError(f"{self.what} stopped:\n{self.process.stderr.read()[-2000:]}")

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def workers(python: str, case: str, variants: list[str]) -> Iterator[dict[str, Worker]]:
    running: dict[str, Worker] = {}
    try:
        for variant in variants:
            running[variant] = Worker(python, case, variant)
            running[variant].ready()
        yield running
    finally:
        for worker in running.values():
            worker.stop()


def measure(python: str, case: str, *, rounds: int, rivals: bool) -> dict[str, Any]:
    """The figures of a case, µs per LLM call."""
    variants = [*VARIANTS, *(RIVALS[case] if rivals else ())]
    calls = CASES[case].calls
    taken: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    with workers(python, case, variants) as running:
        n = max(2, round(ROUND_SECONDS / running["nothing"].run(10)["cpu"]))
        for worker in running.values():
            worker.run(n)
        for i in range(rounds):
            order = variants.copy()
            random.Random(i).shuffle(order)
            for variant in order:
                taken[variant].append(running[variant].run(n))
        counted = {variant: worker.run("count") for variant, worker in running.items()}

    def us(variant: str, clock: str) -> list[float]:
        return [row[clock] / calls * 1e6 for row in taken[variant]]

    plain = _undisturbed(us("nothing", "cpu"))
    functions = counted["nothing"]["all"] / calls
    figures: dict[str, Any] = {"calls": calls, "runs_per_round": n, "plain_us": plain, "plain_functions": functions}
    figures["variants"] = {}
    for variant in variants[1:]:
        figures["variants"][variant] = facts = {"spans_per_run": taken[variant][-1]["spans"]}
        for clock in ("cpu", "wall"):
            base, here = us("nothing", clock), us(variant, clock)
            facts[f"{clock}_us"] = _undisturbed(here) - _undisturbed(base)
            facts[f"{clock}_median_us"] = statistics.median(a - b for a, b in zip(here, base, strict=True))
        facts["ratio"] = 1 + facts["cpu_us"] / plain
        facts["functions"] = counted[variant]["all"] / calls - functions
        facts["functions_ratio"] = 1 + facts["functions"] / functions
        facts["agl_functions"] = counted[variant]["agl"] / calls
    # What records nothing has no cost to compare with.
    for clock, key in (("cpu_us", "best_rival"), ("functions", "fewest_functions")):
        known = {v: f[clock] for v, f in figures["variants"].items() if v in RIVALS[case] and f["spans_per_run"] >= 1}
        if known:
            best = min(known, key=lambda v: known[v])
            figures[key] = {"rival": best, "ratio": figures["variants"]["agl"][clock] / known[best]}
    return figures


def _undisturbed(times: list[float]) -> float:
    """The first decile."""
    return sorted(times)[len(times) // 10]


def show(case: str, figures: dict[str, Any]) -> None:
    print(f"\n{case}: {figures['plain_us']:.0f} µs of CPU per LLM call untraced, {figures['calls']} in a run")
    print(f"  {'':14}{'CPU':>9}{'median':>9}{'wall':>9} µs{'ratio':>7}{'functions':>11}{'ratio':>7}{'spans':>7}")
    for variant, f in figures["variants"].items():
        own = f"   {f['agl_functions']:.1f} of agl's own" if variant == "agl outside" else ""
        print(
            f"  {variant:14}{f['cpu_us']:+9.1f}{f['cpu_median_us']:+9.1f}{f['wall_us']:+9.1f}   {f['ratio']:7.2f}"
            f"{f['functions']:+11.1f}{f['functions_ratio']:7.2f}{f['spans_per_run']:7.1f}{own}"
        )
    for key, what in (("best_rival", "CPU"), ("fewest_functions", "functions")):
        if key in figures:
            print(f"  {what}, agl / {figures[key]['rival']}: {figures[key]['ratio']:.2f}", flush=True)


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agl" / "instrumentors"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=[*CASES], metavar="CASE", help="of " + ", ".join(CASES)
    )
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--rival-venv", type=Path, default=cache, help="the rivals' environment (default: %(default)s)")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help="leave the rivals out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    python = venv_python(options.rival_venv) if options.rivals else sys.executable
    facts: dict[str, Any] = {"cores": os.cpu_count(), "python": sys.version.split()[0], "cases": {}}
    for case in options.only:
        facts["cases"][case] = figures = measure(python, case, rounds=options.rounds, rivals=options.rivals)
        show(case, figures)
        if options.json:
            options.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
