"""`pairwise` covers every pair with few cases."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairs, pairwise

CASES = st.lists(st.tuples(*[st.integers(0, 4)] * 3), unique=True, max_size=60)


@given(CASES, st.data())
def test_every_pair_is_covered(cases: list[tuple[int, ...]], data: st.DataObject) -> None:
    anyway = data.draw(st.sets(st.sampled_from(range(len(cases))))) if cases else set()
    taken = pairwise(cases, anyway)
    assert anyway <= taken <= set(range(len(cases)))
    assert {p for i in taken for p in pairs(cases[i])} == {p for case in cases for p in pairs(case)}


def test_of_many_combinations_few_are_left() -> None:
    cases = [*product(range(5), range(5), range(5))]
    assert len(pairwise(cases)) <= 35
    assert pairwise(cases) == pairwise(cases)
