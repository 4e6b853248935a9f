"""Which combinations of several parameters to run: every pair of values, not every combination of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations


def pairs(case: Sequence[Hashable]) -> set[tuple[int, Hashable, int, Hashable]]:
    """The pairs of a case's values, each with its place."""
    return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(case), 2)}


def pairwise(cases: Sequence[Sequence[Hashable]], given: Iterable[int] = ()) -> set[int]:
    """Indices of a few cases in which every pair of values occurs that occurs in any of them.

    Greedy, and the same for the same cases: the case with the most new pairs is taken, and of equal ones that whose
    values were taken least.

    Args:
        cases: one value per parameter. given: indices of those that run anyway; they are in the result.
    """
    taken = set(given)
    covered = {pair for i in taken for pair in pairs(cases[i])}
    uses = Counter((place, value) for i in taken for place, value in enumerate(cases[i]))
    left = {i: pairs(case) - covered for i, case in enumerate(cases) if i not in taken}
    while left := {i: new for i, new in left.items() if new}:
        best = min(left, key=lambda i: (-len(left[i]), sum(uses[place, v] for place, v in enumerate(cases[i])), i))
        covered_now = left.pop(best)
        taken.add(best)
        uses.update(enumerate(cases[best]))
        left = {i: new - covered_now for i, new in left.items()}
    return taken
