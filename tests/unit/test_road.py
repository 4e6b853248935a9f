"""The code stays as short and as plain as it has become.

A bound is lowered when a change allows it. Who raises one says why in the commit.
"""

from __future__ import annotations

import functools

import pytest
from house import GUESTS, MAIN, Figures, count, figures, statements
from paths import ROOT

from agl.trainer.store.base import Store

counted = functools.cache(figures)


@pytest.mark.parametrize(
    ("folders", "nodes", "per_line"), [(MAIN, 542_000, 9.8), ((*MAIN, *GUESTS), 683_500, 9.8)], ids=["main", "all"]
)
def test_size(folders: tuple[str, ...], nodes: int, per_line: float) -> None:
    found = counted(*folders)
    assert found.nodes <= nodes
    assert found.nodes / found.lines <= per_line, "the code became denser, not smaller"


def test_plainness() -> None:
    found = counted(*MAIN)
    assert found.per_thousand_lines(found.conditionals) <= 33
    assert found.per_thousand_lines(found.tuple_assignments) <= 1.4
    assert found.per_thousand_lines(found.double_comprehensions) <= 2.9
    assert found.unformatted == 0
    assert found.crowded_docstrings <= 4
    assert found.subjectless_docstrings <= 280
    assert found.long_functions <= 10


def test_names_of_classes() -> None:
    assert counted(*MAIN).ambiguous_classes <= 49


def test_the_loop() -> None:
    assert statements(ROOT / "trainer" / "algorithms" / "loop.py", "train") <= 50


def test_the_stores_interface() -> None:
    methods = [name for name in dir(Store) if not name.startswith("_")]
    assert len(methods) <= 43


def test_the_counts_of_a_program_that_one_can_count_by_hand() -> None:
    found = Figures()
    count(
        '"""What it is."""\n\n'
        "# a comment\n"
        "a, b = 1, 2\n"
        "c = a if b else 0\n"
        "d = [x for y in z for x in y]  # fmt: skip\n"
        "class Run: ...\n"
        "class Run: ...\n",
        found,
    )
    assert (found.lines, found.tuple_assignments, found.conditionals, found.double_comprehensions) == (5, 1, 1, 1)
    assert (found.unformatted, found.subjectless_docstrings, found.ambiguous_classes) == (1, 1, 1)
