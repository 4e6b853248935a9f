"""The order in which tasks are trained."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.trainer.run.batches import Batches


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5))
def test_it_depends_on_seed_and_step_alone_and_leaves_no_task_out(n: int, batch_size: int, seed: int) -> None:
    batches = Batches(range(n), batch_size, seed)
    order = [index for step in range(3 * n) for index in batches.indices(step)]
    assert all(sorted(order[i : i + n]) == [*range(n)] for i in range(0, len(order), n))
    # A resumed run makes its batches anew.
    assert Batches(range(n), batch_size, seed).indices(3) == batches.indices(3)


def test_epochs_and_seeds_differ() -> None:
    one, other = Batches(range(50), 50, 0), Batches(range(50), 50, 1)
    assert len({tuple(b.indices(step)) for b in (one, other) for step in range(4)}) == 8


@given(
    n=st.integers(1, 20),
    batch_size=st.integers(1, 30),
    spreads=st.dictionaries(st.integers(0, 19), st.floats(0, 1)),
    step=st.integers(0, 5),
)
def test_tasks_drawn_by_spread_are_different_ones(
    n: int, batch_size: int, spreads: dict[int, float], step: int
) -> None:
    known = {index: spread for index, spread in spreads.items() if index < n}
    drawn = Batches(range(n), batch_size, 0, known).indices(step)
    assert len(drawn) == batch_size
    assert len(set(drawn)) == min(n, batch_size)
    assert Batches(range(n), batch_size, 0, dict(known)).indices(step) == drawn


def test_tasks_are_drawn_in_proportion_to_their_spread() -> None:
    batches = Batches(range(4), 1, 0, {})
    batches.learn([(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, 0.0), (2, 0.0), (2, 1.0)])
    drawn = Counter(batches.indices(step)[0] for step in range(4000))
    # Success rates of 1/2, 1 and 1/4; the last task was never sampled.
    spreads = [0.5, 0.0, np.sqrt(3 / 16)]
    usual = sum(spreads) / 3
    weights = [x + 0.1 * usual for x in (*spreads, usual)]
    for index, weight in enumerate(weights):
        assert drawn[index] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_without_anything_learned_every_task_is_as_likely() -> None:
    batches = Batches(range(4), 1, 0, {})
    assert min(Counter(batches.indices(step)[0] for step in range(2000)).values()) > 400
    batches.learn((index, 0.0) for index in range(4) for _ in range(2))
    assert min(Counter(batches.indices(step)[0] for step in range(2000)).values()) > 400
