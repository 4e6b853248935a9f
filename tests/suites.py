"""Run frameworks' own test suites without agl and under `agl run`: what passes alone must pass with it, too.

    python tests/suites.py                                   every suite that can be had
    python tests/suites.py --only langgraph --jobs 2         one of them
    python tests/suites.py --source pydantic-ai==2.33.0=DIR  of a checkout, where the source package has no tests
    python tests/suites.py --table docs/programs.md          and write the counts

Each suite has a fresh environment with the newest release of its framework, or that of the checkout. Exits with 1 if a
test that passes alone fails under agl twice, unless the framework itself is known to be the reason.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent / "support"))

from matrix import built

START, END = "<!-- suites -->", "<!-- end of suites -->"


@dataclass(frozen=True)
class Suite:
    """A framework's tests.

    Attributes:
        package: its distribution, whose source package has them. extra: of agl.
        needs: what the tests need. tests: where they are. without: what needs a network, a server or another system.
        known: tests that fail with agl because of the framework itself; docs/programs.md says why.
    """

    package: str
    extra: str
    needs: tuple[str, ...]
    tests: tuple[str, ...] = ("tests",)
    without: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def faults(self, broken: Sequence[str]) -> list[str]:
        """Of the tests that fail with agl alone, those that nothing explains."""
        return [name for name in broken if not name.endswith(self.known)]


SUITES = (
    Suite(
        "langgraph", "langgraph",
        (
            "pytest-mock", "syrupy", "pytest-repeat", "langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres",
            "psycopg[binary]", "uvloop", "pycryptodome", "redis", "langchain-core", "pytest-dotenv",
        ),
        without=("postgres", "redis"),
    ),
    Suite(
        "openai-agents", "openai-agents",
        (
            "pytest-asyncio", "pytest-mock", "inline-snapshot", "rich", "websockets", "graphviz", "eval-type-backport",
            "fastapi", "aiosqlite", "cryptography", "fakeredis", "aiohttp", "pymongo", "textual", "sqlalchemy",
        ),
        without=("sandbox", "docker", "macos"),
    ),
    Suite(
        "pydantic-ai", "pydantic-ai",
        (
            "anyio", "dirty-equals", "inline-snapshot", "pytest-recording", "pytest-mock", "pytest-examples",
            "pytest-pretty", "blockbuster>=1.5.26,<1.6", "asgi-lifespan", "devtools", "fastmcp", "mcp-types", "boto3",
            "logfire", "genai-prices", "markdownify", "brotli", "pydocket",
        ),
        tests=(
            "tests/test_agent.py", "tests/test_streaming.py", "tests/test_tools.py", "tests/test_toolsets.py",
            "tests/test_capabilities.py", "tests/test_history_processor.py", "tests/test_messages.py",
        ),
        known=(
            "test_dynamic_model_id_is_resolved_once_per_run",
            "test_static_capability_model_id_reuses_agent_context_model",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of a suite: its version, and the tests that passed alone and under agl, by name. `broken` fail with agl alone."""

    suite: Suite
    version: str
    alone: frozenset[str]
    under: frozenset[str]
    broken: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], choices=[suite.package for suite in SUITES])
    parser.add_argument("--source", nargs="*", default=[], metavar="PACKAGE[==VERSION]=DIR",
                        help="a checkout with its tests")  # fmt: skip
    parser.add_argument("--wheel", type=Path, help="agl as it is tested; built from this tree otherwise")
    parser.add_argument("--jobs", type=int, default=2, help="processes of each suite")
    parser.add_argument("--table", type=Path, help="Markdown file that the counts are written to")
    options = parser.parse_args(argv)
    sources = {re.split("=", text)[0]: text.rpartition("=")[::2] for text in options.source}
    outcomes = []
    for suite in SUITES:
        if options.only and suite.package not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            wheel = options.wheel.resolve() if options.wheel else built(Path(folder) / "dist")
            requirement, source = sources.get(suite.package, (suite.package, None))
            outcome = run(suite, Path(folder), wheel, requirement, source, options.jobs)
        if outcome is None:
            print(f"left out  {suite.package}: its source package has no tests; give --source {suite.package}=DIR")
            continue
        outcomes.append(outcome)
        verdict = "broken" if suite.faults(outcome.broken) else "ok    "
        print(f"{verdict}  {suite.package} {outcome.version}: {len(outcome.alone)} pass alone, "
              f"{len(outcome.under)} under agl")  # fmt: skip
        for name in outcome.broken:
            print(f"        fails under agl: {name}")
    if options.table:
        write(options.table, outcomes)
    return int(any(outcome.suite.faults(outcome.broken) for outcome in outcomes))


def run(suite: Suite, folder: Path, wheel: Path, requirement: str, source: str | None, jobs: int) -> Outcome | None:
    """Both runs in a fresh environment with what `requirement` names; None if there are no tests."""
    python = folder / "venv" / "bin" / "python"
    _call([sys.executable, "-m", "venv", str(folder / "venv")])
    _call([str(python), "-m", "pip", "install", "--quiet", "uv"])
    agl = f"agl[server,{suite.extra}] @ {wheel.as_uri()}"
    _call([str(python), "-m", "uv", "pip", "install", "--quiet", "--upgrade", "--python", str(python), agl,
           requirement, "pytest", "pytest-xdist", "pytest-timeout", *suite.needs])  # fmt: skip
    shown = _call([str(python), "-m", "pip", "show", suite.package])
    version = re.findall(r"^Version: (.+)$", shown, re.MULTILINE)[0]
    tree = Path(source) if source else _source(python, suite.package, version, folder)
    if not (tree / suite.tests[0]).exists():
        return None
    test = [str(python), "-m", "pytest", *suite.tests, "-q", "-n", str(jobs), "-p", "no:cacheprovider", "--timeout=120"]
    if suite.without:
        test += ["-k", " and ".join(f"not {word}" for word in suite.without)]
    under = [str(python.with_name("agl")), "run", "--quiet", "--store", str(folder / "traces.db"), "--"]
    alone = passed(test, tree, folder / "alone.xml")
    if not alone:
        raise SystemExit(f"no test of {suite.package} {version} passes even alone: what do they need? ({tree})")
    together = passed([*under, *test], tree, folder / "under.xml")
    missed = sorted(alone - together)
    if missed:
        # Suites of this size have tests that depend on time.
        missed = sorted(alone - together - passed([*under, *test], tree, folder / "again.xml"))
    return Outcome(suite, version, alone, together, tuple(missed))


def passed(command: Sequence[str], tree: Path, report: Path) -> frozenset[str]:
    """The names of the tests that pass."""
    subprocess.run([*command, f"--junit-xml={report}"], cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if not report.is_file():
        raise SystemExit(f"pytest wrote no report: {' '.join(command)}, in {tree}")
    cases = ElementTree.parse(report).getroot().iter("testcase")
    bad = {"failure", "error", "skipped"}
    return frozenset(f"{c.get('classname')}::{c.get('name')}" for c in cases if not bad & {child.tag for child in c})


def _source(python: Path, package: str, version: str, folder: Path) -> Path:
    """The source package, unpacked."""
    fetch = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
    _call([str(python), "-m", "pip", *fetch])
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def _call(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def write(page: Path, outcomes: Sequence[Outcome]) -> None:
    """The counts, between the marks of the page, beside those of the suites that did not run."""
    before, mark, rest = page.read_text().partition(START)
    if not mark:
        raise SystemExit(f"{page} has no {START}")
    kept, _, after = rest.partition(END)
    rows = {line.split()[1]: line for line in kept.strip().splitlines()[2:]}
    rows |= {
        o.suite.package: f"| {o.suite.package} {o.version} | {len(o.alone):,} | {len(o.under):,} | {len(o.broken)} |"
        for o in outcomes
    }
    head = "| framework | pass alone | pass under `agl run` | fail under agl alone |\n|---|---|---|---|"
    table = "\n".join([head, *(line for _, line in sorted(rows.items()))])
    page.write_text(f"{before}{START}\n{table}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
