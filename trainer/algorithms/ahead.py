"""Rollouts that run while the policies learn, several updates ahead: sampling never waits for an update.

Invariant: a step's rollouts were begun by weights that are at most `max_staleness` updates older than those that learn
from them; within that, a step takes the groups that have ended, and leaves slow ones to a later step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from agl.trainer.algorithms.source import Source
from agl.trainer.run.run import Run
from agl.trainer.runners.protocol import RolloutResult


class Sampled(Protocol):
    """A started `agl.trainer.algorithms.training.Training`, as far as its rollouts need it."""

    run: Run
    source: Source

    async def rollouts(
        self, indices: Sequence[int], step: int, first: int = 0, *, announce: bool = True
    ) -> list[RolloutResult]: ...


@dataclass(slots=True, eq=False)
class _Group:
    """The rollouts of the task with an index, that have to count in step `due` at the latest."""

    due: int
    index: int
    rollouts: asyncio.Task[list[RolloutResult]]


class Ahead:
    """The groups of a run, by number: in the order of its batches, from 0.

    Half of `max_staleness` goes into early starts, the rest is how many steps a slow group may be late.

    Args:
        training: what the rollouts are of.
        state: of the checkpoint that the run resumes from, made by `state`; else empty.

    Attributes:
        seconds: from when the step before had its rollouts to when the last one had them.
    """

    def __init__(self, training: Sampled, state: Mapping[str, Any]) -> None:
        self._training = training
        self._groups: dict[int, _Group] = {}
        self._taken: dict[int, list[tuple[int, int, int]]] = {}
        self._next: int = state.get("next", 0)
        self._open: list[tuple[int, int, int]] = [(n, due, index) for n, due, index in state.get("open", ())]
        self._since = time.monotonic()
        self.seconds = 0.0

    @staticmethod
    def first_step(state: Mapping[str, Any], batch_size: int, step: int) -> int:
        """The earliest step among the rollouts that a run which resumes at `step` may still need."""
        return min([step, *(number // batch_size for number, *_ in state.get("open", ()))])

    async def take(self, step: int) -> list[RolloutResult]:
        """The results of the groups that step `step` (from 0) learns from. Starts those that may run meanwhile.

        Raises:
            AglError: as `Workplace.rollouts`.
        """
        source = self._training.source
        run = self._training.run
        batches = source.batches
        bound = source.max_staleness or 0
        run.progress.began("train", step, batches.size(step) * source.group_size)
        for number, due, index in self._open:
            self._start(number, due, index)
        self._open = []
        first = self._next // batches.batch_size
        end = min(step + 1 + bound // 2, source.steps)
        for number, index in enumerate((i for at in range(first, end) for i in batches.indices(at)), self._next):
            # The weights that sample now may be those of the step before, whose update has not ended.
            self._start(number, step - 1 + bound, index)
            if number == 0:
                # What is wrong with the agent shows in the first rollout, before others are begun.
                await asyncio.wait([self._groups[0].rollouts])
        self._next = max(self._next, end * batches.batch_size)
        while (chosen := self._chosen(step, bound)) is None:
            open_ = [group.rollouts for group in self._groups.values() if not group.rollouts.done()]
            await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
        self._since, self.seconds = time.monotonic(), time.monotonic() - self._since
        self._taken[step] = [(n, self._groups[n].due, self._groups[n].index) for n in chosen]
        return [result for number in chosen for result in self._groups.pop(number).rollouts.result()]

    def state(self, step: int) -> dict[str, Any]:
        """What a run that resumes after `step` steps has to know: the groups that none of them has taken."""
        for taken in [taken for taken in self._taken if taken < step]:
            del self._taken[taken]
        untaken = [*self._open, *((n, group.due, group.index) for n, group in self._groups.items())]
        return {"open": sorted(chain(untaken, *self._taken.values())), "next": self._next}

    async def stop(self) -> None:
        """Give up the groups that no step has taken."""
        tasks = [group.rollouts for group in self._groups.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, number: int, due: int, index: int) -> None:
        step, place = divmod(number, self._training.source.batches.batch_size)
        rollouts = self._training.rollouts([index], step, first=place, announce=False)
        self._groups[number] = _Group(due, index, asyncio.create_task(rollouts))

    def _chosen(self, step: int, bound: int) -> list[int] | None:
        """The groups to take in a step, those due first; None while too few have ended."""
        size = self._training.source.batches.size
        in_order = sorted(self._groups, key=lambda number: (self._groups[number].due, number))
        ended = [number for number in in_order if self._groups[number].rollouts.done()]
        for number in ended:
            self._groups[number].rollouts.result()  # raises what has ended it
        for last in range(step, step + bound):
            due = {number for number in in_order if self._groups[number].due <= last}
            # What the further steps up to `last` cannot take has to be taken now.
            if len(due.intersection(ended)) < len(due) - sum(size(later) for later in range(step + 1, last + 1)):
                return None
        return ended[: size(step)] if len(ended) >= size(step) else None
