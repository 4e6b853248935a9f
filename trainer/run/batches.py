"""The order in which tasks are trained: a function of the seed and the step, so that a resumed run needs no state; or
by how much the rewards of each differ, which a checkpoint holds."""

from __future__ import annotations

import math
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

    An epoch has each task once. Batches are full, so that one may hold the end of an epoch and the beginning of the
    next, but no task of both; only the last batch of the last epoch may be smaller.

    Attributes:
        tasks: the dataset.
        batch_size: tasks per step.
        seed: of the permutations.
        epochs: after which the batches end; None = never.
        spreads: index of a task -> the standard deviation of its rewards when it was last sampled, by which tasks are
            drawn then; None draws them evenly.
    """

    tasks: Sequence[Any]
    batch_size: int
    seed: int
    epochs: int | None = None
    spreads: dict[int, float] | None = None

    def size(self, step: int) -> int:
        """How many tasks one step (from 0) has."""
        if self.epochs is None:
            return self.batch_size
        remaining = len(self.tasks) * self.epochs - step * self.batch_size
        return min(self.batch_size, max(0, remaining))

    def steps(self) -> int:
        """Steps of all epochs."""
        assert self.epochs is not None, "batches without end"
        return math.ceil(len(self.tasks) * self.epochs / self.batch_size)

    def indices(self, step: int) -> list[int]:
        """Indices of the tasks of one step (from 0).

        With `spreads`, as they are now: without replacement, in proportion to them. For rewards of 0 and 1 the spread
        of a task is sqrt(p (1 - p)) of its success rate p, "learnability" (arXiv 2502.12272). Tasks that were never
        sampled count as usual ones.
        """
        if self.spreads is None:
            return self._in_epochs(step)
        usual = float(np.mean([*self.spreads.values()])) if self.spreads else 0.0
        usual = usual or 1.0
        n = len(self.tasks)
        weights = np.array([self.spreads.get(i, usual) for i in range(n)]) + RETRIED * usual
        # Gumbel's noise on log-weights, largest first, draws in proportion to them without replacement.
        order = np.argsort(-(np.log(weights) + np.random.default_rng([self.seed, step]).gumbel(size=n)))
        return np.resize(order, self.size(step)).tolist()

    def _in_epochs(self, step: int) -> list[int]:
        n = len(self.tasks)
        # What an epoch begins with depends on the epoch before, unless that ended together with a batch. The order is
        # made from the last place at which both ended.
        period = math.lcm(n, self.batch_size)
        first = step * self.batch_size % period
        epoch = (step * self.batch_size - first) // n
        order = np.empty(0, dtype=np.int64)
        while order.size < first + self.size(step):
            permutation = np.random.default_rng([self.seed, epoch]).permutation(n)
            begun = order.size % self.batch_size
            of_begun_batch = order[order.size - begun :]
            others = permutation[~np.isin(permutation, of_begun_batch)]
            fills_batch = others[: self.batch_size - begun]
            follows = permutation[~np.isin(permutation, fills_batch)]
            order = np.concatenate([order, fills_batch, follows])
            epoch += 1
        return order[first : first + self.size(step)].tolist()

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
