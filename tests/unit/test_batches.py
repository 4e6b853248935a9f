"""The order in which tasks are trained."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agl.trainer.run.batches import Batches


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5))
def test_it_depends_on_seed_and_step_alone_and_leaves_no_task_out(n: int, batch_size: int, seed: int) -> None:
    batches = Batches(range(n), batch_size, seed)
    order = [index for step in range(3 * n) for index in batches.indices(step)]
    assert all(sorted(order[i : i + n]) == [*range(n)] for i in range(0, len(order), n))
    # A resumed run makes its batches anew.
    assert Batches(range(n), batch_size, seed).indices(3) == batches.indices(3)


@given(n=st.integers(1, 20), batch_size=st.integers(1, 20), epochs=st.integers(1, 5), seed=st.integers(0, 5))
@example(n=5, batch_size=4, epochs=3, seed=0)
@example(n=17, batch_size=16, epochs=3, seed=0)
def test_an_epoch_has_each_task_once_and_only_the_last_batch_may_be_smaller(
    n: int, batch_size: int, epochs: int, seed: int
) -> None:
    batches = Batches(range(n), batch_size, seed, epochs)
    of_steps = [batches.indices(step) for step in range(batches.steps())]
    sizes = [len(indices) for indices in of_steps]
    assert sizes == [batches.size(step) for step in range(batches.steps())]
    assert set(sizes[:-1]) <= {batch_size}
    assert 1 <= sizes[-1] <= batch_size
    order = [*chain(*of_steps)]
    assert len(order) == n * epochs
    assert all(sorted(order[i : i + n]) == [*range(n)] for i in range(0, len(order), n))
    if batch_size <= n:
        assert all(len(set(indices)) == len(indices) for indices in of_steps), "a batch holds a task twice"


@given(n=st.integers(2, 20), data=st.data(), step=st.integers(0, 100))
def test_a_batch_of_a_run_without_end_holds_no_task_twice(n: int, data: st.DataObject, step: int) -> None:
    batch_size = data.draw(st.integers(1, n))
    indices = Batches(range(n), batch_size, 0).indices(step)
    assert len({*indices}) == len(indices) == batch_size


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
    drawn = Batches(range(n), batch_size, 0, spreads=known).indices(step)
    assert len(drawn) == batch_size
    assert len(set(drawn)) == min(n, batch_size)
    assert Batches(range(n), batch_size, 0, spreads=dict(known)).indices(step) == drawn


def test_tasks_drawn_by_spread_are_as_many_as_the_epochs_have() -> None:
    batches = Batches(range(5), 4, 0, epochs=3, spreads={})
    assert [len(batches.indices(step)) for step in range(batches.steps())] == [4, 4, 4, 3]


def test_tasks_are_drawn_in_proportion_to_their_spread() -> None:
    batches = Batches(range(4), 1, 0, spreads={})
    batches.learn([(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, 0.0), (2, 0.0), (2, 1.0)])
    drawn = Counter(batches.indices(step)[0] for step in range(4000))
    # Success rates of 1/2, 1 and 1/4; the last task was never sampled.
    spreads = [0.5, 0.0, np.sqrt(3 / 16)]
    usual = sum(spreads) / 3
    weights = [x + 0.1 * usual for x in (*spreads, usual)]
    for index, weight in enumerate(weights):
        assert drawn[index] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_without_anything_learned_every_task_is_as_likely() -> None:
    batches = Batches(range(4), 1, 0, spreads={})
    assert min(Counter(batches.indices(step)[0] for step in range(2000)).values()) > 400
    batches.learn((index, 0.0) for index in range(4) for _ in range(2))
    assert min(Counter(batches.indices(step)[0] for step in range(2000)).values()) > 400
