"""What a reader of the code meets, counted in the syntax tree, which no formatting changes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paths import ROOT

MAIN = ("core", "adapters", "trainer")
GUESTS = ("guests",)
_LINKS = {ROOT / "core" / "adapters", ROOT / "core" / "trainer"}
_TWO_ATTRIBUTES = re.compile(r"\s+\w+: .*\. \w+: ")
_NO_SUBJECT = re.compile(r"(What|Of|Those|That|Who|Where)\b")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Figures:
    """The figures of some folders.

    Attributes:
        nodes: nodes of the syntax trees.
        lines: lines of code: neither empty, nor of a comment, nor of a docstring.
        conditionals: conditional expressions.
        tuple_assignments: assignments of several values to several names, `a, b = x, y`.
        double_comprehensions: comprehensions with two `for`.
        unformatted: marks that keep the formatter away.
        crowded_docstrings: docstring lines that describe two attributes.
        subjectless_docstrings: docstrings that begin with "What", "Of", "Those", "That", "Who" or "Where".
        long_functions: functions of more than 50 statements.
        classes: name of a class -> how many have it.
    """

    nodes: int = 0
    lines: int = 0
    conditionals: int = 0
    tuple_assignments: int = 0
    double_comprehensions: int = 0
    unformatted: int = 0
    crowded_docstrings: int = 0
    subjectless_docstrings: int = 0
    long_functions: int = 0
    classes: Counter[str] = field(default_factory=Counter)

    @property
    def ambiguous_classes(self) -> int:
        """Names that several classes have."""
        return sum(count > 1 for count in self.classes.values())

    def per_thousand_lines(self, count: int) -> float:
        """What a count is per 1,000 lines of code."""
        return 1_000 * count / self.lines


def figures(*folders: str) -> Figures:
    """Count in all modules below these folders of the tree."""
    found = Figures()
    for path in modules(*folders):
        count(path.read_text(), found)
    return found


def modules(*folders: str) -> Iterator[Path]:
    """The modules below these folders of the tree, each once: links of the tree into itself are not followed."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if _LINKS.isdisjoint(path.parents):
                yield path


def statements(path: Path, function: str) -> int:
    """The statements in the body of a module's function, whatever their depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            return _statements(node)
    raise LookupError(f"{path} has no function {function}")


def count(source: str, found: Figures) -> None:
    """Add a module's counts."""
    tree = ast.parse(source)
    documentation: set[int] = set()
    for node in ast.walk(tree):
        found.nodes += 1
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
            documentation.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
            found.crowded_docstrings += sum(bool(_TWO_ATTRIBUTES.match(line)) for line in text.splitlines())
            found.subjectless_docstrings += bool(_NO_SUBJECT.match(text))
        if isinstance(node, ast.IfExp):
            found.conditionals += 1
        elif isinstance(node, ast.Assign):
            found.tuple_assignments += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        elif isinstance(node, _COMPREHENSIONS):
            found.double_comprehensions += len(node.generators) > 1
        elif isinstance(node, ast.ClassDef):
            found.classes[node.name] += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.long_functions += _statements(node) > 50
    found.unformatted += source.count("# fmt: skip")
    for number, line in enumerate(source.splitlines(), 1):
        code = line.strip()
        found.lines += bool(code) and not code.startswith("#") and number not in documentation


def _statements(function: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
