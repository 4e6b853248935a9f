"""An adapter that is not agl's: another distribution, found by its entry points (docs/write-an-adapter.md).

It is tested where agl is installed from its wheel, without its source.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT, SUPPORT, TESTS

from agl.testing import conformance
from agl.testing.conformance import GAPS, Subject

SEVENTH = TESTS / "seventh"
ADAPTER = SEVENTH / "agl-tinyagents"


class Environment:
    """A virtual environment over the one that runs this, with an agl of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Without pip: the one below installs here too, and brings a setuptools that needs no wheel package.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / "venv"], check=True)
        self.python = directory / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        [purelib] = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.splitlines()
        # Its own packages come first, and what is installed in editable mode here is so there.
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
        Path(purelib, "below.pth").write_text(lines)
        self.install(ROOT, "agl")
        assert self.run("-c", "import agl; print(agl.__file__)").stdout.startswith(purelib)

    def install(self, source: Path, name: str) -> None:
        """Install a distribution as its user would, but for what is there already. Builds a wheel, in a copy."""
        ignored = shutil.ignore_patterns(".git", "tests", "docs", "*.egg-info", "__pycache__")
        copied = shutil.copytree(source, self.directory / name, symlinks=True, ignore=ignored)
        options = ("-q", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed")
        self.run("-m", "pip", "install", *options, str(copied))
        shutil.rmtree(copied)

    def run(self, *args: str | Path, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python. Programs here do not find our tree, but for what `variables` set of the environment."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
        done = subprocess.run(
            [self.python, *args], capture_output=True, text=True, cwd=self.directory, timeout=300, env=environment
        )
        assert done.returncode == 0 or not check, done.stdout[-5000:] + done.stderr[-3000:]
        return done

    def fails(self, code: str) -> str:
        """The last of what a program writes that fails."""
        done = self.run("-c", code, check=False)
        assert done.returncode == 1
        return done.stderr


@pytest.fixture(scope="module")
def with_framework(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """tinyagents is installed, its adapter is not."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.install(SEVENTH / "tinyagents", "tinyagents")
    return environment


@pytest.fixture(scope="module")
def with_adapter(with_framework: Environment) -> Environment:
    """Both are installed. Tests that want the framework alone come before."""
    with_framework.install(ADAPTER, "agl-tinyagents")
    return with_framework


WRAP = "import agl, tinyagents; agent = agl.wrap(tinyagents.Agent('solver', 'm')); print(agent.name)"


@pytest.mark.slow
def test_without_the_adapter_the_error_says_what_is_missing(with_framework: Environment) -> None:
    said = with_framework.fails(WRAP)
    assert "no adapter knows tinyagents.Agent" in said
    assert "agl found the adapters agent_framework, anthropic, autogen" in said
    assert "An adapter for another framework is found once it is installed" in said


@pytest.mark.slow
def test_installed_it_is_found_by_type_and_by_opentelemetry(with_adapter: Environment) -> None:
    assert with_adapter.run("-c", WRAP).stdout == "solver\n"
    code = (
        "from importlib.metadata import entry_points; from agl.agents.frameworks import adapters;"
        "[e] = entry_points(group='opentelemetry_instrumentor', name='agl_tinyagents');"
        "tracer = e.load(); assert tracer is adapters()['tinyagents'];"
        "import sys; assert 'tinyagents' not in sys.modules; tracer().instrument();"
        "import tinyagents; print(len(tinyagents._listeners))"
    )
    assert with_adapter.run("-c", code).stdout == "1\n"


@pytest.mark.slow
@pytest.mark.night
def test_it_passes_the_conformance_suite_whole(with_adapter: Environment, tmp_path: Path) -> None:
    table = tmp_path / "capabilities.md"
    suite = shutil.copy(ADAPTER / "test_tinyagents_conformance.py", tmp_path)
    plain = with_adapter.run("-m", "pytest", suite, "-q", "--strict-markers", "-k", "imports")
    assert "1 passed" in plain.stdout
    pytest_and_table = ("-m", "pytest", "-p", "agl.testing.capabilities", suite, "-q", "--capabilities", table)
    done = with_adapter.run(*pytest_and_table)
    assert " passed" in done.stdout
    lines = [line for line in table.read_text().splitlines() if line.startswith("| ")]
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in lines[1:]]
    assert len(rows) > 15
    short = [row for row in rows if row[1:] != ["all", "", ""]]
    assert [sum(bool(row[column]) for row in short) for column in (1, 2, 3)] == [0, 2, 9], short

    # A subject that promises too much, or a run of a part of the suite, makes no table.
    table.unlink()
    part = with_adapter.run(*pytest_and_table, "-k", "imports", check=False)
    assert part.returncode == 1
    assert "the capability matrix is not written" in part.stdout
    assert not table.exists()


@pytest.mark.night
@pytest.mark.slow
def test_an_adapter_by_patching_passes_it_too(with_adapter: Environment, tmp_path: Path) -> None:
    for name in ("patched_tinyagents.py", "test_patched_tinyagents.py", "test_tinyagents_conformance.py"):
        shutil.copy(ADAPTER / name, tmp_path)
    suite = f"{tmp_path / 'test_patched_tinyagents.py'}::TestPatchedTinyAgents"
    assert " passed" in with_adapter.run("-m", "pytest", "-q", suite, PYTHONPATH=str(tmp_path)).stdout


@pytest.mark.night
@pytest.mark.slow
def test_a_program_that_imports_it_is_traced_without_code(with_adapter: Environment) -> None:
    code = "import agl.instrument.auto as auto; auto.begin(); import tinyagents; print(len(tinyagents._listeners))"
    assert with_adapter.run("-c", code).stdout == "1\n"


@pytest.mark.night
@pytest.mark.slow
def test_its_own_tests_pass_with_our_trainer(with_adapter: Environment) -> None:
    # With the scripted policy of our own tests.
    tests = str(ADAPTER / "test_tinyagents.py")
    done = with_adapter.run("-m", "pytest", "-q", "--noconftest", "--rootdir", ADAPTER, tests, PYTHONPATH=str(SUPPORT))
    assert "3 passed" in done.stdout


@pytest.mark.slow
def test_without_its_framework_an_adapter_is_in_nobodys_way(with_adapter: Environment) -> None:
    hidden = "import sys; sys.modules['tinyagents'] = None\nimport agl\n"
    with_adapter.run("-c", hidden + "print(agl.wrap(lambda task: task, name='f').name)")
    code = """
import openai
from agl.agents.frameworks import adapters
before = openai.OpenAI.__dict__.get("request")
try:
    adapters()["tinyagents"]().instrument()
except ImportError as error:
    print(error, openai.OpenAI.__dict__.get("request") is before)
"""
    assert with_adapter.run("-c", hidden + code).stdout.endswith("in sys.modules True\n")


@pytest.mark.slow
@pytest.mark.night
def test_an_adapter_that_cannot_be_imported_is_named_and_left_out(with_adapter: Environment) -> None:
    hidden = "import sys; sys.modules['agl_tinyagents'] = None\nimport agl\n"
    done = with_adapter.run("-c", hidden + "print(agl.wrap(lambda task: task, name='f').name)")
    assert done.stdout == "f\n"
    assert "an adapter cannot be imported: tinyagents of agl-tinyagents 0.1.0" in done.stderr
    said = with_adapter.fails(hidden + "import tinyagents; agl.wrap(tinyagents.Agent('solver', 'm'))")
    assert "it cannot import tinyagents of agl-tinyagents 0.1.0 (ModuleNotFoundError" in said


def test_it_is_small_and_the_guide_shows_all_of_it() -> None:
    adapter = (ADAPTER / "agl_tinyagents.py").read_text()
    assert len(adapter.splitlines()) < 200
    guide = (ROOT / "docs" / "write-an-adapter.md").read_text()
    shown = [block.partition("```")[0] for block in guide.split("```python\n")[1:]]
    for code in (adapter, (ADAPTER / "patched_tinyagents.py").read_text()):
        parts = [block for block in shown if block.strip() in code]
        assert "".join("".join(parts).split()) == "".join(code.split())
    for name in ("agl-tinyagents/pyproject.toml", "agl-tinyagents/test_tinyagents_conformance.py"):
        source = (SEVENTH / name).read_text()
        blocks = [b.partition("\n")[2].partition("```")[0] for b in guide.split("```")[1:]]
        assert any(b.strip() and b.strip() in source for b in blocks), name


def test_the_guide_lists_all_that_a_subject_says_and_every_gap() -> None:
    section = (ROOT / "docs" / "write-an-adapter.md").read_text().partition("### Attributes of a `Subject`")[2]
    listed = re.findall(r"^\| `(\w+)(?:\(.*?\))?` \|", section, re.MULTILINE)
    said = {name for name in (*vars(Subject), *Subject.__annotations__) if not name.startswith("_")}
    assert sorted(listed) == sorted([*said, *GAPS])

    [block] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    scope = dict(vars(conformance))
    exec(block, scope)
    policy = scope["script"](None)
    assert policy({"messages": [{"role": "user", "content": "?"}], "tools": [1]}).tools == (("add", {"a": 2, "b": 3}),)
    observed = policy({"messages": [{"role": "user", "content": "Observation: 5"}], "tools": [1]})
    assert observed.tools == (("final_answer", {"answer": "sum 5"}),)
