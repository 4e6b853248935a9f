"""Benchmarks are run at night; what moves or is renamed under them shows here already."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

FOLDER = ROOT / "benchmarks"
FILES = sorted(FOLDER.glob("*.py"))


def all_py() -> dict[str, object]:
    """The tables of all.py."""
    spec = importlib.util.spec_from_file_location("benchmarks_all", FOLDER / "all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def test_every_benchmark_is_run_with_options_that_it_has() -> None:
    names = all_py()
    quick, short, elsewhere, places = names["QUICK"], names["SHORT"], names["NOT_HERE"], names["PAGES"]
    assert isinstance(quick, dict)
    assert isinstance(short, dict)
    assert isinstance(elsewhere, set)
    assert isinstance(places, dict)
    assert set(places) <= set(quick)
    assert {name.partition(".")[0] for name in quick} ^ elsewhere == {file.stem for file in FILES}
    assert set(short) <= set(quick)
    for name in quick:
        page = (ROOT / "docs" / places.get(name, "benchmarks.md")).read_text()
        assert f"<!-- benchmark {name} -->" in page
        assert f"<!-- end of {name} -->" in page
    for name, arguments in [*quick.items(), *short.items()]:
        known = re.findall(r'add_argument\(\s*"(--[\w-]+)"', (FOLDER / f"{name.partition('.')[0]}.py").read_text())
        assert {a for a in arguments if a.startswith("--")} <= set(known), name


def imported_of_agl(file: Path) -> Iterator[tuple[str, str | None]]:
    """Module and name of each import, those within functions as well."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "agl":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.partition(".")[0] == "agl")


def bound_in(module: str) -> set[str] | None:
    """The names of a module of agl, None if there is none: from its source, since imports of all take seconds."""
    path = ROOT.joinpath(".src", *module.split("."))
    stubs, package, single = path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py")
    source = next((file for file in (stubs, package, single) if file.is_file()), None)
    if source is None:
        return None
    names = {file.stem for file in path.glob("*") if file.is_dir() or file.suffix == ".py"}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_benchmark_imports_is_there(file: Path) -> None:
    for module, name in imported_of_agl(file):
        names = bound_in(module)
        assert names is not None, f"{file.name}: there is no {module}"
        assert name is None or name in names, f"{file.name}: {module} has no {name}"


GOOD = 'print("| a |"); print("|---|"); print("| 1 |")'
BAD = 'raise SystemExit("its rival is not to be had")'
HANGS = """
import subprocess, sys, time
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pid", "w").write(str(server.pid))
time.sleep(600)
"""


def test_the_others_run_when_one_fails(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "all.py", tmp_path)
    old = "<!-- benchmark merging -->\nold\n<!-- end of merging -->\n"
    (tmp_path / "page.md").write_text(f"# Page\n\n{old}")
    for name, program in (("merging", BAD), ("runners", HANGS), ("routing", GOOD)):
        (tmp_path / f"{name}.py").write_text(program)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        names = ("merging", "runners", "verl_bridge", "routing")
        options = ("--page", "page.md", "--minutes", "0.03", "--verl-python", "nowhere/python")
        command = [sys.executable, "all.py", *names, *options, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    short = run("--short")
    assert (short.returncode, short.stdout) == (1, "| a |\n|---|\n| 1 |\n\n")
    assert (tmp_path / "page.md").read_text() == f"# Page\n\n{old}"
    done = run()
    assert done.returncode == 1
    page = (tmp_path / "page.md").read_text()
    assert old in page
    assert "| 1 |\n<!-- end of routing -->" in page
    assert "runners" not in page
    *_, first, second, third = done.stderr.strip().splitlines()
    assert first == "merging failed, the page keeps its old block: exit code 1; its rival is not to be had"
    assert second == "runners failed, the page keeps its old block: not done after 0.03 minutes"
    assert third.endswith("No such file or directory: 'nowhere/python'")
    assert re.search(r"^\+ routing done in \d+ s$", done.stderr, re.MULTILINE)
    server = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    assert not server.exists() or server.read_text().rpartition(")")[2].split()[0] == "Z"
