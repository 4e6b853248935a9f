"""Rollouts that run ahead of the updates: every group counts once, none later than its bound, at any speed."""

from __future__ import annotations

import asyncio
import random
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.trainer.algorithms.ahead import Ahead
from agl.trainer.run.batches import Batches

SIZE = 3


class Rollouts:
    """Groups that take as many turns of the event loop as the seed says.

    Attributes:
        begun: number of a group -> the step in which it was begun.
    """

    def __init__(self, seed: int, steps: int, bound: int, tasks: int = 100, epochs: int | None = None) -> None:
        self.begun: dict[int, int] = {}
        self.step = 0
        self._random = random.Random(seed)
        batches = Batches(list(range(tasks)), SIZE, 0, epochs)
        self.source = SimpleNamespace(batches=batches, steps=steps, group_size=1, max_staleness=bound)
        self.run = SimpleNamespace(progress=SimpleNamespace(began=lambda *_: None))

    async def rollouts(self, indices: list[int], step: int, first: int, *, announce: bool) -> list[Any]:
        assert indices == [self.source.batches.indices(step)[first]]
        assert not announce
        number = step * SIZE + first
        assert number not in self.begun
        self.begun[number] = self.step
        for _ in range(self._random.choice([1, 1, 1, 2, 5, 40])):
            await asyncio.sleep(0)
        return [number]


async def taken(rollouts: Rollouts, ahead: Ahead, first: int, last: int) -> list[list[int]]:
    """The groups of steps `first` to `last - 1`, of which the next is taken while each is learned."""
    steps = []
    for step in range(first, last):
        # The weights that sample are those of the step before, until its update has ended.
        rollouts.step = max(0, step - 1)
        steps.append(await ahead.take(step))
    return steps


@given(seed=st.integers(0, 10_000), steps=st.integers(1, 12), bound=st.integers(2, 6))
def test_every_group_counts_once_and_none_too_late(seed: int, steps: int, bound: int) -> None:
    rollouts = Rollouts(seed, steps, bound)
    of_steps = asyncio.run(taken(rollouts, Ahead(rollouts, {}), 0, steps))  # pyright: ignore[reportArgumentType]
    assert all(len(groups) == SIZE for groups in of_steps)
    assert sorted(chain(*of_steps)) == list(range(steps * SIZE))
    late = [step - rollouts.begun[number] for step, groups in enumerate(of_steps) for number in groups]
    assert max(late) <= bound


@given(seed=st.integers(0, 10_000), tasks=st.integers(3, 10), epochs=st.integers(1, 4), bound=st.integers(2, 6))
def test_the_last_step_of_epochs_has_the_groups_that_are_left(seed: int, tasks: int, epochs: int, bound: int) -> None:
    steps = Batches(list(range(tasks)), SIZE, 0, epochs).steps()
    rollouts = Rollouts(seed, steps, bound, tasks, epochs)
    of_steps = asyncio.run(taken(rollouts, Ahead(rollouts, {}), 0, steps))  # pyright: ignore[reportArgumentType]
    assert [len(groups) for groups in of_steps] == [rollouts.source.batches.size(step) for step in range(steps)]
    assert sorted(chain(*of_steps)) == list(range(tasks * epochs))


@given(seed=st.integers(0, 10_000), steps=st.integers(2, 12), bound=st.integers(2, 6), data=st.data())
def test_a_resumed_run_takes_what_the_stopped_one_has_not(seed: int, steps: int, bound: int, data: Any) -> None:
    done = data.draw(st.integers(1, steps - 1))
    further = data.draw(st.integers(done, min(steps, done + 1)))

    async def stopped() -> tuple[list[list[int]], dict[str, Any]]:
        rollouts = Rollouts(seed, steps, bound)
        ahead = Ahead(rollouts, {})  # pyright: ignore[reportArgumentType]
        of_steps = await taken(rollouts, ahead, 0, further)
        state = ahead.state(done)  # the step after may have been taken already, and is not learned
        await ahead.stop()
        return of_steps[:done], state

    async def resumed(state: dict[str, Any]) -> list[list[int]]:
        rollouts = Rollouts(seed + 1, steps, bound)
        return await taken(rollouts, Ahead(rollouts, state), done, steps)  # pyright: ignore[reportArgumentType]

    before, state = asyncio.run(stopped())
    after = asyncio.run(resumed(state))
    assert all(len(groups) == SIZE for groups in after)
    assert sorted(chain(*before, *after)) == list(range(steps * SIZE))
    assert Ahead.first_step(state, SIZE, done) * SIZE <= min(chain(*after))


def test_a_slow_group_counts_in_a_later_step() -> None:
    rollouts = Rollouts(0, steps=8, bound=4)
    quick = Rollouts.rollouts

    async def with_a_slow_one(indices: list[int], step: int, first: int, *, announce: bool) -> list[Any]:
        result = await quick(rollouts, indices, step, first, announce=announce)
        for _ in range(10_000 if result == [1] else 0):
            await asyncio.sleep(0)
        return result

    rollouts.rollouts = with_a_slow_one  # pyright: ignore[reportAttributeAccessIssue]
    of_steps = asyncio.run(taken(rollouts, Ahead(rollouts, {}), 0, 8))  # pyright: ignore[reportArgumentType]
    assert [step for step, groups in enumerate(of_steps) if 1 in groups] == [3], "begun for step 0, due in step 3"
    assert 3 in of_steps[0], "a group of the next step took its place"


def test_a_group_that_fails_ends_the_run_at_once() -> None:
    rollouts = Rollouts(0, steps=8, bound=2)

    async def failing(indices: list[int], step: int, first: int, *, announce: bool) -> list[Any]:
        if (step, first) == (1, 2):
            raise RuntimeError("the agent's module is gone")
        await asyncio.sleep(3600)
        return []

    async def first_step() -> None:
        ahead = Ahead(rollouts, {"next": SIZE})  # pyright: ignore[reportArgumentType]
        rollouts.rollouts = failing  # pyright: ignore[reportAttributeAccessIssue]
        try:
            await ahead.take(1)
        finally:
            await ahead.stop()

    with pytest.raises(RuntimeError, match="module is gone"):
        asyncio.run(first_step())
