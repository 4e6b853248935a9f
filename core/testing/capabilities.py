"""The capability matrix: what the conformance suite proves of each adapter, row by row. A pytest plugin:

    pytest -p agl.testing.capabilities test_my_adapter.py --capabilities capabilities.md

runs the suite and writes the table between the file's markers. A cell is "yes" only if every case behind it passed; a
run that contradicts what the subjects declare writes nothing and fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from agl.testing.subject import GAPS, Subject

Case = TypeVar("Case", bound=Callable[..., Any])

YES = "yes"
NONE = "–"
GAP = "gap"

WAYS = {
    "sync": ("invoke",),
    "async": ("ainvoke",),
    "streaming": ("stream", "astream", "astream_events"),
    "batch": ("batch", "abatch"),
    "raw responses": ("raw", "raw_stream", "raw_body", "araw", "araw_stream", "araw_body"),
}
"""In the reader's word -> the suite's ways to run an agent."""


@dataclass(frozen=True)
class Row:
    """A row: what is proven, in the reader's words, and by which case.

    Attributes:
        case: the test function's name.
        ways: the ways to run that count here; empty = whatever the case runs.
        gap: the gap that a subject may declare instead.
        needs: the attribute of `Subject` without which there is
            nothing to prove.
    """

    words: str
    case: str
    ways: tuple[str, ...] = ()
    gap: str | None = None
    needs: str | None = None

    def declared(self, subject: Subject) -> str:
        """The cell that a subject declares."""
        if self.needs is not None and not getattr(subject, self.needs):
            return NONE
        if self.ways and not {*self.ways} & {*subject.ways, *subject.async_ways}:
            return NONE
        return GAP if self.gap in subject.gaps else YES


def capability(
    words: str, *, gap: str | None = None, needs: str | None = None, by_way: bool = False
) -> Callable[[Case], Case]:
    """Declare that a case of the suite proves a row of the matrix; with `by_way`, one for each of `WAYS`."""

    def declare(case: Case) -> Case:
        name = case.__name__
        ways = WAYS.items() if by_way else ()
        new = [Row(f"{words}: {word}", name, w, gap, needs) for word, w in ways] or [Row(words, name, (), gap, needs)]
        # Decorators are applied from the last to the first.
        vars(case)["capabilities"] = (*new, *declared_by(case))
        return case

    return declare


def declared_by(case: Callable[..., Any]) -> tuple[Row, ...]:
    """The rows that a case of the suite proves."""
    return getattr(case, "capabilities", ())


def rows(suite: Any) -> list[Row]:
    """The rows that a class's cases declare, in the cases' order: first its own, then those of each base class."""
    classes = [*suite.__mro__]

    def place(name: str) -> tuple[int, int]:
        owner = next(i for i, cls in enumerate(classes) if name in vars(cls))
        return owner, vars(classes[owner])[name].__code__.co_firstlineno

    names = [name for name, _ in inspect.getmembers(suite, inspect.isfunction)]
    return [row for name in sorted(names, key=place) for row in declared_by(getattr(suite, name))]


def table(rows: Sequence[Row], subjects: Sequence[Subject]) -> str:
    """The matrix as Markdown: a table, then the reasons of its gaps."""
    names = [s.name for s in subjects]
    columns = [s.name if names.count(s.name) == 1 else type(s).__name__ for s in subjects]
    reasons: list[str] = []

    def cells(row: Row) -> str:
        declared: dict[str, list[str]] = {YES: [], GAP: [], NONE: []}
        for column, subject in zip(columns, subjects, strict=True):
            declared[row.declared(subject)].append(f"`{column}`")
        yes, gap, none = (", ".join(declared[state]) for state in (YES, GAP, NONE))
        if gap:
            assert row.gap is not None
            if row.gap not in reasons:
                reasons.append(row.gap)
            gap += f" ({reasons.index(row.gap) + 1})"
        if len(declared[YES]) > len(declared[NONE]):
            yes = "all" if not gap and not none else "all others"
        elif none:
            none = "all others" if yes or gap else "all"
        return f"{yes} | {gap} | {none}"

    lines = [
        "| property | adapters that have it | gap | does not apply |",
        "|---|---|---|---|",
        *(f"| {row.words} | {cells(row)} |" for row in rows),
    ]
    if unknown := [gap for gap in reasons if gap not in GAPS]:
        raise ValueError(f"say what the gaps {', '.join(unknown)} mean, in agl.testing.subject.GAPS")
    notes = [f"{i + 1}. {GAPS[gap]}" for i, gap in enumerate(reasons)]
    return "\n".join(lines + (["", "Gaps:", "", *notes] if notes else []))


def between(text: str, name: str) -> str:
    """What a document holds between the markers of that name.

    Raises:
        ValueError: it has no such markers.
    """
    begin, end = _markers(name)
    if begin not in text or end not in text:
        raise ValueError(f"no place for the table: add the lines {begin} and {end}")
    return text.partition(begin)[2].partition(end)[0].strip("\n")


def written(text: str, name: str, table: str) -> str:
    """A document with a table between the markers of that name."""
    begin, end = _markers(name)
    between(text, name)
    return f"{text.partition(begin)[0]}{begin}\n{table}\n{end}{text.partition(end)[2]}"


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


class Recorder:
    """A pytest plugin that writes the table of a run of the suite.

    Args:
        file: a Markdown file with the markers; made if it does not exist.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.suite: Any = None
        self.outcomes: dict[tuple[str, int, str | None], str] = {}
        """(case, id of the subject, way) -> "passed", "skipped" or "failed"."""
        self.items: dict[str, tuple[str, int, str | None]] = {}
        self.subjects: list[Subject] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if isinstance(item, pytest.Function) and declared_by(item.function):
                subject = item.callspec.params["subject"]
                if not isinstance(subject, Subject):
                    # The one item that pytest makes, and skips, of a case that no subject has anything for.
                    continue
                if subject not in self.subjects:
                    self.subjects.append(subject)
                self.suite = item.cls
                self.items[item.nodeid] = (
                    item.originalname,
                    id(subject),
                    cast("str | None", item.callspec.params.get("way")),
                )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self.items and (report.when == "call" or report.outcome != "passed"):
            self.outcomes[self.items[report.nodeid]] = report.outcome

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        problems = list(self._problems()) if self.suite is not None else ["no case of the conformance suite ran"]
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if problems:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            said = "\n".join(f"  {problem}" for problem in problems)
            message = f"the capability matrix is not written:\n{said}"
        else:
            text = self.file.read_text() if self.file.exists() else "\n".join([*_markers("capabilities"), ""])
            subjects = [*self.subjects, *getattr(self.suite, "elsewhere", ())]
            text = written(text, "capabilities", table(rows(self.suite), subjects))
            self.file.write_text(text)
            message = f"the capability matrix of {len(self.subjects)} adapters is in {self.file}"
        if reporter is not None:
            reporter.write_line("")
            reporter.write_line(message)

    def _problems(self) -> Iterable[str]:
        """Where what ran is not what the subjects declare."""
        for row in rows(self.suite):
            for subject in self.subjects:
                ran = [
                    outcome
                    for (case, who, way), outcome in self.outcomes.items()
                    if (case, who) == (row.case, id(subject)) and (not row.ways or way in row.ways)
                ]
                cell = row.declared(subject)
                place = f"{subject.name}, {row.words!r}"
                if not ran and cell == NONE:
                    continue
                if not ran or "failed" in ran:
                    yield f"{place}: {'a case failed' if ran else 'no case ran'}"
                elif cell == YES and "passed" not in ran:
                    yield f"{place}: every case was skipped, and no gap says why"
                elif cell == NONE and "passed" in ran:
                    yield f"{place}: declared as not there, but a case passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("adapters").addoption(
        "--capabilities", type=Path, metavar="FILE.md", help="write what the conformance suite proves into this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("capabilities")) is not None:
        config.pluginmanager.register(Recorder(file))
