"""Run each adapter's tests in a fresh environment with one framework alone: its newest release, and its lower bounds.

    python tests/matrix.py                            everything
    python tests/matrix.py --only strands --jobs 1    one row of the table, or all of one framework
    python tests/matrix.py --table docs/versions.md   and write the table
    python tests/matrix.py --issues DIR               and write an issue for each framework that broke
    python tests/matrix.py --few                      the rows that .ci/run makes of every change
    python tests/matrix.py --minutes 20               as many rows as begin in time, newest releases first

Each row makes two environments' worth of proof in one: first the framework and `agl[extra]` alone, for the conformance
suite; then, with what a gateway needs added (not torch), the adapter's own tests. Exits with 1 if any row fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parent / "support"))

from all_subjects import ALL
from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]
LARGE = ("torch", "safetensors", "peft")
"""What `agl[local]` needs for training alone: a gateway with a scripted engine does without."""
FEW = {
    **dict.fromkeys(("openai", "langchain"), "lowest"),
    "crewai": "newest",
    "the core": "newest, Python 3.13",
}
"""The rows of `--few`: of what the environment of `constraints.txt` has not, lower bounds that are quick to install,
a framework that fits beside no other, and another Python."""
WITHOUT_TORCH = tuple(
    f"../unit/test_{name}.py"
    for name in (
        "import", "advantages", "agents", "air", "answers", "callbacks", "child_environment", "conditions",
        "evaluation_statistics", "gateway_requests", "gateway_security", "gateway_stream",
        "graders_code", "graders_combine", "graders_structure", "graders_text", "messages", "otlp",
        "rendering_package", "responses", "routing", "selection", "sequence", "sessions", "system_prompts",
        "toolparsers", "traces", "tracing", "trajectories",
    )
)  # fmt: skip
"""Of the fast tier, what needs neither torch nor a framework."""
WITH_MORE = (
    "test_explain_shows_every_part", "test_texts_of_langchains_messages",
    "test_a_bypass_in_earnest_a_model_that_no_hook_reaches",
)  # fmt: skip
"""But for these: the first trains a model, the others run LangChain."""
REQUESTS = tuple(f"../api/test_api_{name}.py" for name in ("features", "parameters", "routes"))
"""Requests to the four APIs by the SDK of a row, whose older releases have other parameters and types."""
TEST_TOOLS = ("pytest>=8.3",)
EXTRAS = "integration/test_missing_extras.py"
"""Runs in every row, since each lacks much that agl can use."""
TIMEOUT = 1800
"""Seconds for one command; the slowest takes a thirtieth of that on a free machine, which .ci/run has not."""


@dataclass(frozen=True)
class Framework:
    """One framework of the table.

    Attributes:
        name: as in `--only`. extra: of pyproject, whose bounds are tested; "" for none.
        subjects: its subjects in the conformance suite. files: its adapter's own test files.
        also: requirements beside the extra's whose lower bounds are tested too.
        beside: what the tests need as well, in whichever version fits.
        select: of the own tests, as pytest's -k.
        pins: more rows: a label -> requirements that replace those of the same name.
        resolutions: of "newest" and "lowest". pythons: more rows, the newest releases on other versions of Python.
    """

    name: str
    extra: str
    subjects: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    select: str = ""
    pins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    resolutions: tuple[str, ...] = ("lowest", "newest")
    pythons: tuple[str, ...] = ()


FRAMEWORKS = (
    Framework(
        "openai", "openai", ("openai", "openai_responses"), ("test_openai_streams.py", *REQUESTS),
        pins={"newest 1.x": ("openai<2",), "newest 2.x": ("openai<3",)},
    ),
    Framework(
        "anthropic", "anthropic", ("anthropic",), ("test_adapter_anthropic.py", *REQUESTS),
        pins={"newest 0.x": ("anthropic<1",), "newest 1.x": ("anthropic<2",)},
    ),
    Framework(
        "google-genai", "google-genai", ("google_genai",), ("test_google_clients.py", *REQUESTS), select="not adk",
        pins={"newest 1.x": ("google-genai<2",), "newest 2.x": ("google-genai<3",)},
    ),
    Framework(
        "langchain", "langchain", ("langchain", "langchain_responses"), ("test_langchain.py",),
        pythons=("3.12", "3.13"),
    ),
    Framework(
        "langchain with Anthropic", "langchain", ("langchain_anthropic",), ("test_adapter_anthropic.py",),
        also=("langchain-anthropic>=1.0",), select="langchain",
    ),
    Framework(
        "langgraph", "langgraph", ("langgraph",), ("test_langgraph.py",), beside=("langchain", "langchain-openai"),
    ),
    Framework(
        "openai-agents", "openai-agents", ("openai_agents", "openai_agents_responses"), ("test_openai_agents.py",),
        pythons=("3.13",),
    ),
    Framework(
        "agent-framework", "agent-framework", ("agent_framework", "agent_framework_responses"),
        ("test_agent_framework.py",),
    ),
    Framework("strands", "strands", ("strands",), ("test_strands.py",)),
    Framework(
        "pydantic-ai", "pydantic-ai", ("pydantic_ai", "pydantic_ai_responses"), ("test_pydantic_ai.py",),
    ),
    Framework("autogen-agentchat", "autogen", ("autogen",), ("test_autogen.py",)),
    Framework("ag2", "ag2", ("ag2", "ag2_responses"), ("test_autogen_ag2.py",)),
    Framework(
        # mcpadapt needs mcp 1.
        "smolagents", "smolagents", ("smolagents",), ("test_smolagents.py",), beside=("mcpadapt", "mcp<2"),
    ),
    Framework("crewai", "crewai", ("crewai",), ("test_crewai.py",)),
    Framework("classic autogen", "autogen-classic", files=("test_autogen_classic.py", "test_autogen_beta.py")),
    Framework(
        "pyautogen 0.2", "", files=("test_autogen_classic.py",), also=("pyautogen>=0.2.35,<0.3",),
        resolutions=("newest",),
    ),
    Framework(
        "beside instrumentors", "langchain", files=("test_beside_instrumentors.py",), resolutions=("newest",),
        also=(
            "opentelemetry-instrumentation-openai>=0.62", "opentelemetry-instrumentation-anthropic>=0.62",
            "opentelemetry-instrumentation-langchain>=0.62", "openinference-instrumentation-openai>=0.1.66",
            "openinference-instrumentation-anthropic>=3", "openinference-instrumentation-langchain>=0.1.80",
            "openinference-instrumentation-openai-agents>=2.6",
        ),
        beside=("anthropic", "openai-agents"),
    ),
    Framework(
        "the core", "openai", files=WITHOUT_TORCH, select=" and ".join(f"not {name}" for name in WITH_MORE),
        beside=(*(text for extra in ("rewards", "server") for text in OPTIONAL[extra]), "hypothesis", "blockbuster"),
        resolutions=(), pythons=("3.13",),
    ),
)  # fmt: skip

HEAD = """\
# Versions that pass

Each row is a fresh environment with one framework only, in which that adapter's cases of the conformance suite and its
own tests ran. *lowest* is the lower bound in `pyproject.toml`, *newest* the newest releases that resolve together.
`python tests/matrix.py --table docs/versions.md` runs everything again and writes this page.

| framework | | versions | passed | failed | skipped | gaps |
|---|---|---|---|---|---|---|"""

FOOT = """
Gaps are properties that a framework itself lacks; those cases are skipped, and the adapter's own tests say what holds
instead. `tool_errors`: a tool's exception is returned to the model, or wrapped. `call_errors`: a failed call is raised
as the framework's own exception. `response_facts`: the response's id or finish reason is dropped.
"""


@dataclass(frozen=True)
class Row:
    """What one environment showed.

    Attributes:
        framework: of the table. resolution: which versions.
        versions: of what was asked for, and of the SDKs: distribution -> version.
        passed, failed, skipped: how many tests. gaps: what the subjects name as the framework's own doing.
        problems: the tests that failed; or why there was no environment.
        seconds: wall time.
    """

    framework: str
    resolution: str
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    gaps: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)


class Broken(Exception):
    """A command failed; its text is the end of what it printed."""


# -- what to install --------------------------------------------------------------------------------------------------


def bounds(framework: Framework) -> list[Requirement]:
    """The requirements whose versions a row is about."""
    given = OPTIONAL[framework.extra] if framework.extra else ()
    return [Requirement(text) for text in (*given, *framework.also)]


def lowest(requirement: Requirement) -> str:
    """The lower bound of a requirement."""
    [bound] = [s.version for s in requirement.specifier if s.operator in (">=", "~=")]
    return bound


def requested(framework: Framework, resolution: str) -> list[str]:
    """The requirements of a row, as texts."""
    pins = {Requirement(text).name: text for text in framework.pins.get(resolution, ())}
    found = []
    for requirement in bounds(framework):
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        if resolution == "lowest":
            found.append(f"{requirement.name}{extras}=={lowest(requirement)}")
        else:
            found += [str(requirement), *([pins[requirement.name]] if requirement.name in pins else [])]
    return found


def gateway() -> list[str]:
    """What a gateway with a scripted engine needs."""
    local = map(Requirement, OPTIONAL["local"])
    return [str(r) for r in local if r.name not in LARGE]


# -- one row ----------------------------------------------------------------------------------------------------------


def run_row(framework: Framework, resolution: str, *, wheel: Path, scratch: Path) -> Row | None:
    """Make a row's environment and run its tests in it; None where its Python is not on this machine."""
    started = time.monotonic()
    row = partial(Row, framework.name, resolution, gaps=gaps(framework))
    venv = scratch / f"{framework.name} {resolution}".replace(" ", "-")
    counts = Counts()
    versions: dict[str, str] = {}
    asked = requested(framework, resolution)
    wanted = {canonicalize_name(Requirement(text).name) for text in asked} | {"openai", "anthropic"}
    try:
        python = interpreter(resolution)
        if python is None:
            return None
        uv("venv", "--quiet", "--python", python, str(venv))
        install(venv, [f"agl @ {wheel.as_uri()}", *asked, *framework.beside, *TEST_TOOLS])
        uv("pip", "check", "--python", str(venv))
        versions = {name: version for name, version in installed(venv).items() if name in wanted}
        if framework.subjects:
            chosen = ("--subjects", ",".join(framework.subjects))
            pytest(venv, counts, ("unit/test_adapter_conformance.py", EXTRAS), chosen)
        if framework.files:
            kept = [f"{name}=={version}" for name, version in versions.items()]
            # `renderers` asks for a newer openai than its parts for a gateway need; what is tested stays as it is.
            install(venv, gateway(), overrides=kept)
            own = [*(f"integration/{file}" for file in framework.files), EXTRAS]
            pytest(venv, counts, own, ("-k", framework.select) if framework.select else ())
    except Broken as problem:
        counts.failed += 1
        counts.problems.append(str(problem))
    seconds = round(time.monotonic() - started, 1)
    done = row(versions, counts.passed, counts.failed, counts.skipped, problems=tuple(counts.problems), seconds=seconds)
    report(done)
    return done


def interpreter(resolution: str) -> str | None:
    """The Python of a row: this one, or another on this machine, on the PATH or installed by pyenv; None without it."""
    version = resolution.partition("Python ")[2]
    if not version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        # A shim of pyenv's may lead nowhere.
        if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(candidate)
    return None


def gaps(framework: Framework) -> tuple[str, ...]:
    """The named gaps of a framework's subjects."""
    return tuple(sorted({gap for subject in ALL if subject.name in framework.subjects for gap in subject.gaps}))


def install(venv: Path, requirements: Iterable[str], *, overrides: Sequence[str] = ()) -> None:
    given = venv / "overrides.txt"
    given.write_text("\n".join(overrides), encoding="utf-8")
    uv("pip", "install", "--quiet", "--python", str(venv), "--overrides", str(given), *requirements)


def installed(venv: Path) -> dict[str, str]:
    """Distribution -> version of everything in an environment."""
    listed = json.loads(uv("pip", "list", "--quiet", "--format", "json", "--python", str(venv)))
    return {canonicalize_name(entry["name"]): entry["version"] for entry in listed}


def pytest(venv: Path, counts: Counts, files: Sequence[str], options: Sequence[str]) -> None:
    """Run test files in an environment and count. What fails is run again once, alone: the machine may just be slow."""
    report = venv / "report.xml"
    command = [
        str(venv / "bin" / "python"), "-m", "pytest", "-q", "-o", f"cache_dir={venv / 'cache'}", "--tb=short",
        f"--junit-xml={report}", *options, *(f"tests/{file}" for file in files),
    ]  # fmt: skip
    cases: dict[tuple[str | None, str | None], ElementTree.Element] = {}
    for again in ((), ("--last-failed", "--last-failed-no-failures", "none")):
        report.unlink(missing_ok=True)
        done = execute([*command, *again])
        if done.returncode not in (0, 1) or not report.exists():
            raise Broken(f"pytest {' '.join(files)}: {tail(done.stdout + done.stderr)}")
        cases |= {(c.get("classname"), c.get("name")): c for c in ElementTree.parse(report).iter("testcase")}
        if done.returncode == 0:
            break
    for case in cases.values():
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts.failed += 1
            said = next((child.get("message") or "" for child in case if child.tag in ("failure", "error")), "")
            counts.problems.append(f"{case.get('name')}: {said[:200]}")
        elif "skipped" in kinds:
            counts.skipped += 1
        else:
            counts.passed += 1


def uv(*arguments: str) -> str:
    done = execute([sys.executable, "-m", "uv", *arguments])
    if done.returncode:
        raise Broken(f"uv {arguments[0]} {arguments[1]}: {tail(done.stderr)}")
    return done.stdout


def execute(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        raise Broken(f"{' '.join(command[:4])} ... took more than {TIMEOUT} s: {tail(said)}") from None


def tail(text: str) -> str:
    return text.strip()[-1500:]


# -- results ----------------------------------------------------------------------------------------------------------


def report(row: Row) -> None:
    verdict = "FAILED" if row.failed else "ok"
    numbers = f"{row.passed} passed, {row.failed} failed, {row.skipped} skipped in {row.seconds:.0f} s"
    print(f"{verdict:6} {row.framework} {row.resolution}: {numbers} ({versions_text(row.versions)})", flush=True)
    for problem in row.problems:
        print(f"       {problem}", flush=True)


def versions_text(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def table(rows: Iterable[Row]) -> str:
    """The rows as a page of Markdown, the same for the same results."""
    lines = [HEAD]
    for row in rows:
        cells = (
            row.framework, row.resolution, versions_text(row.versions), row.passed, row.failed, row.skipped,
            ", ".join(f"`{gap}`" for gap in row.gaps),
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append(FOOT)
    return "\n".join(lines)


def passed_last(page: str, row: Row) -> str:
    """The versions that the page shows for this row; all that it shows passed."""
    cells = (line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| "))
    return next((cell[2] for cell in cells if cell[:2] == [row.framework, row.resolution]), "none")


def issue(rows: Sequence[Row], page: str) -> str:
    """An issue about one framework, ready to be filed: what broke with which versions, what passed, how to see it.

    Args:
        rows: those of the framework that failed. page: of the versions that passed.
    """
    [name] = {row.framework for row in rows}
    lines = [f"# {name}: {', '.join(row.resolution for row in rows)} fail", ""]
    for row in rows:
        lines += [
            f"## {row.resolution}", "",
            f"{row.failed} failed, {row.passed} passed, {row.skipped} skipped.", "",
            f"- now: {versions_text(row.versions) or 'they do not install together'}",
            f"- passed last: {passed_last(page, row)}",
            f'- to see it: `python tests/matrix.py --only "{name}" --resolution "{row.resolution}" --jobs 1`', "",
            "```text", *row.problems, "```", "",
        ]  # fmt: skip
    return "\n".join(lines)


def write_issues(rows: Iterable[Row], folder: Path, page: str) -> list[Path]:
    """A file for each framework of which a row failed."""
    broken: dict[str, list[Row]] = {}
    for row in rows:
        if row.failed:
            broken.setdefault(row.framework, []).append(row)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name.replace(' ', '-')}.md" for name in broken]
    for file, failed in zip(files, broken.values(), strict=True):
        file.write_text(issue(failed, page), encoding="utf-8")
    return files


def planned(only: Sequence[str], resolutions: Sequence[str], *, few: bool = False) -> list[tuple[Framework, str]]:
    """The rows to run."""
    rows = [
        (framework, resolution)
        for framework in FRAMEWORKS
        for resolution in (
            *framework.resolutions,
            *framework.pins,
            *(f"newest, Python {version}" for version in framework.pythons),
        )
    ]
    unknown = {*only} - {f.name for f in FRAMEWORKS}
    if unknown:
        raise SystemExit(f"no such framework: {', '.join(sorted(unknown))}; there are {[f.name for f in FRAMEWORKS]}")
    return [
        (f, r)
        for f, r in rows
        if (not only or f.name in only) and (not resolutions or r in resolutions) and (not few or FEW.get(f.name) == r)
    ]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", default=[], metavar="FRAMEWORK")
    options.add_argument(
        "--resolution", nargs="+", default=[], help='"lowest", "newest", or another label of the table'
    )
    options.add_argument("--few", action="store_true", help="lower bounds, and frameworks that fit beside no other")
    options.add_argument("--jobs", type=int, default=2, help="environments at a time")
    options.add_argument("--minutes", type=float, default=math.inf, help="start no row later; name those left out")
    options.add_argument("--json", type=Path, help="write the results here; rows that are there already stay")
    options.add_argument("--table", type=Path, help="write the table here; of all rows in --json, if given")
    options.add_argument("--issues", type=Path, metavar="DIR", help="write an issue here for each framework that broke")
    options.add_argument("--wheel", type=Path, help="agl as it is tested; built from this tree otherwise")
    given = options.parse_args()
    plan = sorted(
        planned(given.only, given.resolution, few=given.few), key=lambda row: ("Python" in row[1], row[1] != "newest")
    )
    with tempfile.TemporaryDirectory(prefix="agl-matrix-") as made:
        scratch = Path(made)
        wheel = given.wheel.resolve() if given.wheel else built(scratch / "dist")
        deadline = time.monotonic() + 60 * given.minutes

        def run(row: tuple[Framework, str]) -> Row | None:
            return None if time.monotonic() > deadline else run_row(*row, wheel=wheel, scratch=scratch)

        with ThreadPoolExecutor(given.jobs) as pool:
            results = [*zip(plan, pool.map(run, plan), strict=True)]
    left_out = [f"{framework.name} {resolution}" for (framework, resolution), row in results if row is None]
    rows = [row for _, row in results if row is not None]
    failed, n_run = sum(row.failed > 0 for row in rows), len(rows)
    if given.issues is not None:
        page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
        for file in write_issues(rows, given.issues, page):
            print(f"an issue to file: {file}", flush=True)
    write(rows, given.json, given.table)
    if left_out:
        print(f"no time was left, or there is no such Python, for {', '.join(left_out)}", flush=True)
    print(f"{n_run - failed} of {n_run} rows passed", flush=True)
    return 1 if failed else 0


def built(directory: Path) -> Path:
    """The wheel of this tree."""
    uv("build", "--quiet", "--out-dir", str(directory), str(ROOT))
    [wheel] = directory.glob("*.whl")
    return wheel


def write(rows: list[Row], results: Path | None, page: Path | None) -> list[Row]:
    """Save the results and the table, in the order of `FRAMEWORKS`."""
    found = {(row.framework, row.resolution): row for row in rows}
    if results is not None and results.exists():
        earlier = [Row(**entry) for entry in json.loads(results.read_text(encoding="utf-8"))]
        found = {(row.framework, row.resolution): row for row in earlier} | found
    order = {(f.name, r): i for i, (f, r) in enumerate(planned((), ()))}
    rows = sorted((row for key, row in found.items() if key in order), key=lambda r: order[r.framework, r.resolution])
    if results is not None:
        results.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    if page is not None:
        page.write_text(table(rows), encoding="utf-8")
    return rows


if __name__ == "__main__":
    sys.exit(main())
