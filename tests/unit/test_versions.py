"""`docs/versions.md` proves what `pyproject.toml` promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from all_subjects import ALL
from matrix import FRAMEWORKS, PROJECT, ROOT, Framework, Row, bounds, lowest, planned, requested, write_issues
from packaging.requirements import Requirement
from packaging.version import Version

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "docs" / "versions.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| framework")
]


def test_the_table_has_every_row_and_none_failed() -> None:
    shown = [(row[0], row[1]) for row in ROWS]
    plan = [(f.name, resolution) for f, resolution in planned((), ())]
    # Another Python is not on every machine that writes the table.
    assert shown == [row for row in plan if "Python" not in row[1] or row in shown]
    assert {row[4] for row in ROWS} == {"0"}
    assert all(int(row[3]) > 0 for row in ROWS)


@pytest.mark.parametrize("framework", [f for f in FRAMEWORKS if "lowest" in f.resolutions], ids=lambda f: f.name)
def test_the_lower_bounds_are_the_versions_that_passed(framework: Framework) -> None:
    [row] = [row for row in ROWS if row[:2] == [framework.name, "lowest"]]
    proven = dict(entry.rsplit(" ", 1) for entry in row[2].split(", "))
    for requirement in bounds(framework):
        assert Version(proven[requirement.name]) == Version(lowest(requirement)), requirement


def test_every_frameworks_extra_and_every_subject_has_a_row() -> None:
    others = {
        "local",
        "gguf",
        "structured",
        "quantize",
        "server",
        "postgres",
        "ray",
        "verl-core",
        "verl",
        "export",
        "rewards",
        "track",
        "vllm",
        "prompts",
        "prices",
        "agentlightning",
        "massgen",
        "plan",
        "environments",
        "harnesses",
        "sandboxes",
        "service",
    }
    others |= {"dev", "docs"}
    extras = set(PROJECT["optional-dependencies"]) - others
    assert {framework.extra for framework in FRAMEWORKS} - {""} == extras
    assert {name for framework in FRAMEWORKS for name in framework.subjects} == {subject.name for subject in ALL}


def test_the_set_that_ci_proves_lies_within_the_bounds() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for framework in FRAMEWORKS:
        for requirement in bounds(framework):
            if requirement.name in pinned:
                assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_a_row_asks_for_its_versions_and_nothing_else_of_the_same_name() -> None:
    openai = next(f for f in FRAMEWORKS if f.name == "openai")
    assert requested(openai, "lowest") == [f"openai=={lowest(bounds(openai)[0])}"]
    assert {Requirement(text).name for text in requested(openai, "newest 1.x")} == {"openai"}
    assert not Requirement(requested(openai, "newest 1.x")[-1]).specifier.contains("2.0.0")


def test_what_broke_is_an_issue_with_the_versions_that_passed(tmp_path: Path) -> None:
    rows = [
        Row("openai", "lowest", {"openai": "1.66.0"}, passed=136),
        Row(
            "strands", "newest", {"strands-agents": "99.0"}, passed=70, failed=2, problems=("test_a: no", "test_b: {}")
        ),
        Row("strands", "lowest", failed=1, problems=("uv pip install: no solution",)),
    ]
    [file] = write_issues(rows, tmp_path / "issues", (ROOT / "docs" / "versions.md").read_text(encoding="utf-8"))
    title, *_ = lines = file.read_text(encoding="utf-8").splitlines()
    assert file.name == "strands.md"
    assert title == "# strands: newest, lowest fail"
    assert {"test_a: no", "test_b: {}", "- now: strands-agents 99.0", "- now: they do not install together"} <= {*lines}
    [proven] = [row[2] for row in ROWS if row[:2] == ["strands", "newest"]]
    assert f"- passed last: {proven}" in lines
    assert 'python tests/matrix.py --only "strands" --resolution "newest" --jobs 1' in file.read_text(encoding="utf-8")
