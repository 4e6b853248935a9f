"""The order in which tasks are trained: a function of the seed and the step, so that a resumed run needs no state; or
by how much the rewards of each differ, which a checkpoint holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

TaskSampling = Literal["uniform", "learnability"]
"""See `agl.GRPO`."""

RETRIED = 0.1
"""How often a task whose rollouts all had the same reward is drawn again, to the usual one."""


@dataclass(frozen=True, slots=True)
class Batches:
    """A dataset in batches; each epoch is a new permutation.

    Attributes:
        tasks: the dataset. batch_size: tasks per step. seed: of the permutations.
        spreads: index of a task -> the standard deviation of its rewards when it was last sampled, by which tasks are
            drawn then; None draws them evenly.
    """

    tasks: Sequence[Any]
    batch_size: int
    seed: int
    spreads: dict[int, float] | None = None

    def indices(self, step: int) -> list[int]:
        """Indices of the tasks of one step (from 0); a small dataset is gone through several times.

        With `spreads`, as they are now: without replacement, in proportion to them. For rewards of 0 and 1 the spread
        of a task is sqrt(p (1 - p)) of its success rate p, "learnability" (arXiv 2502.12272). Tasks that were never
        sampled count as usual ones.
        """
        n = len(self.tasks)
        if self.spreads is not None:
            usual = float(np.mean([*self.spreads.values()])) if self.spreads else 0.0
            usual = usual or 1.0
            weights = np.array([self.spreads.get(i, usual) for i in range(n)]) + RETRIED * usual
            # Gumbel's noise on log-weights, largest first, draws in proportion to them without replacement.
            order = np.argsort(-(np.log(weights) + np.random.default_rng([self.seed, step]).gumbel(size=n)))
            return np.resize(order, self.batch_size).tolist()
        indices = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, place = divmod(position, n)
            indices.append(int(np.random.default_rng([self.seed, epoch]).permutation(n)[place]))
        return indices

    def learn(self, rewards: Iterable[tuple[int, float]]) -> None:
        """Keep the spreads of the tasks of a step: (index of the task, reward) of each of its rollouts."""
        if self.spreads is None:
            return
        of_task: defaultdict[int, list[float]] = defaultdict(list)
        for index, reward in rewards:
            of_task[index].append(reward)
        self.spreads.update((index, float(np.std(values))) for index, values in of_task.items())

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
