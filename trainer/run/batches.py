"""The order in which tasks are trained: a function of the seed and the step, so that a resumed run needs no state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Batches:
    """A dataset in batches; each epoch is a new permutation.

    Attributes:
        tasks: the dataset. batch_size: tasks per step. seed: of the permutations.
    """

    tasks: Sequence[Any]
    batch_size: int
    seed: int

    def indices(self, step: int) -> list[int]:
        """Indices of the tasks of one step (from 0); a small dataset is gone through several times."""
        n = len(self.tasks)
        indices = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, place = divmod(position, n)
            indices.append(int(np.random.default_rng([self.seed, epoch]).permutation(n)[place]))
        return indices

    def further(self, step: int) -> Iterator[int]:
        """Tasks to sample in place of some of a step's, endlessly: those that are not in it first, in an order fixed by
        the seed and the step."""
        excluded = set(self.indices(step))
        rng = np.random.default_rng([self.seed, step, 1])
        while True:
            order = rng.permutation(len(self.tasks)).tolist()
            yield from (i for i in order if i not in excluded)
            excluded = set()

    def steps_per_epoch(self) -> int:
        """Steps in which every task is seen once, rounded up."""
        return -(-len(self.tasks) // self.batch_size)
