"""The order in which tasks are trained."""

from __future__ import annotations

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
