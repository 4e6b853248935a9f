"""Programs that know nothing of agl: traced, named, undisturbed, trained (tests/programs)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from program_table import COLUMNS, Row, check, expected, programs, table
from untrained import make_untrained

TABLE = "AGL_PROGRAMS_TABLE"
IN_CI = {("langgraph", "supervisor_by_hand"), ("openai_agents", "handoff")}
"""What .ci/run does of it, too."""


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """Collected for the table, which is written where it is asked for; programs that do not run keep their rows."""
    found: list[Row] = []
    yield found
    if path := os.environ.get(TABLE):
        page = Path(path)
        before, mark, rest = page.read_text().partition("<!-- programs -->\n")
        assert mark, f"{page} has no place for the table"
        old, end, after = rest.partition("<!-- end of programs -->")
        page.write_text(f"{before}{mark}{table(found, old)}\n{end}{after}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that knows nothing, with room for the prompts that frameworks write by themselves."""
    return make_untrained(tmp_path_factory.mktemp("policy") / "untrained", context=16_384)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "name"),
    [pytest.param(*key, marks=[] if key in IN_CI else pytest.mark.night) for key in programs()],
)
def test_a_program(framework: str, name: str, model: Path, tmp_path: Path, rows: list[Row]) -> None:
    for module in expected(framework)[name].needs:
        pytest.importorskip(module)
    row = check(framework, name, model, tmp_path)
    rows.append(row)
    problems = [f"{column}: {problem}" for column in COLUMNS for problem in row.problems[column]]
    assert not problems, "\n".join(problems)
