"""No two files import each other, directly or through others, however late the import is executed."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp
from paths import ROOT


def test_no_circle_of_files_not_even_of_imports_inside_functions() -> None:
    guests = [file.parent.name for file in (ROOT / "guests").glob("*/pyproject.toml")]
    graph = grimp.build_graph("agl", *(f"agl_{guest}" for guest in guests), exclude_type_checking_imports=False)
    assert len(graph.modules) > 400
    TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()
