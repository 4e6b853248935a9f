"""How a run's sampling and learning share its time: in turn, one step ahead, or with sampling that never waits.

Invariant: rollouts of the next step change no weights, and where they are all of one version, they end before newer
weights are served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from agl.trainer.algorithms.ahead import Ahead
from agl.trainer.algorithms.source import Sample
from agl.trainer.algorithms.trained_calls import note_useless
from agl.trainer.algorithms.training import Training
from agl.trainer.http.aio import finish
from agl.trainer.objectives.advantages import StepAdvantages
from agl.trainer.run.failures import failures_line, require_sound
from agl.trainer.run.results import require_some

AHEAD_SECONDS = 30.0
"""How long a run that is stopped waits at most for rollouts that run one step ahead."""


async def sampled(training: Training, step: int) -> tuple[Sample, StepAdvantages]:
    """The step's rollouts, and what their calls are worth. Changes no weights, so it may run ahead.

    Raises:
        AglError: all rollouts failed.
        UserCodeError: one fault of the user's code ended too many attempts.
    """
    run = training.run
    policies = training.policies
    algorithm = training.algorithm
    began = time.monotonic()
    earlier = policies.prompt_tokens
    sample = await algorithm.sample(training, step)
    tokens = policies.prompt_tokens - earlier
    seconds = time.monotonic() - began if training.ahead is None else training.ahead.seconds
    sample = replace(sample, seconds=seconds, prompt_tokens=tokens)
    if line := failures_line(sample.results):
        run.progress.note(f"step {step + 1}: {line}")
    require_some(sample.results, f"step {step + 1}")
    require_sound(sample.results, f"step {step + 1}")
    worth = await algorithm.worth(training, sample, step)
    training.baselines = worth.baselines
    if sample.results:
        note_useless(run, sample, worth, step)
    return sample, worth


class InTurn:
    """A step is sampled, then learned. Requests are held from the update until its weights are served, so that no
    answer is sampled from two versions."""

    def __init__(self, training: Training) -> None:
        self._training = training

    async def rollouts(self, step: int) -> tuple[Sample, StepAdvantages]:
        """The rollouts of a step, and what their calls are worth. Raises as `sampled`."""
        return await sampled(self._training, step)

    def begin_next(self, step: int) -> None:
        """Begin the rollouts of `step` while the step before is learned, where sampling and learning overlap."""

    async def before_update(self, held: AsyncExitStack) -> None:
        """Hold, in `held`, the requests that must not see the update."""
        await held.enter_async_context(self._training.workplace.hold())

    async def before_publishing(self, held: AsyncExitStack) -> None:
        """Wait until newer weights may be served; hold, in `held`, the requests that must not see them change."""

    async def settle(self) -> None:
        """Called when the run is stopped and its last step is saved: end what no checkpoint could repeat."""

    async def stop(self) -> None:
        """Give up what was begun and no step has taken."""


class OneAhead(InTurn):
    """The rollouts of the next step are sampled while a step is learned, all of them by the weights before the update.

    A resumed run, which finds them in the store, equals one that was never stopped.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._next: asyncio.Task[tuple[Sample, StepAdvantages]] | None = None

    async def rollouts(self, step: int) -> tuple[Sample, StepAdvantages]:
        if self._next is None:
            return await super().rollouts(step)
        return await self._next

    def begin_next(self, step: int) -> None:
        last = step == self._training.source.steps
        self._next = None if last else asyncio.create_task(sampled(self._training, step))

    async def before_update(self, held: AsyncExitStack) -> None:
        if self._next is None:
            await super().before_update(held)

    async def before_publishing(self, held: AsyncExitStack) -> None:
        if self._next is not None:
            await asyncio.wait([self._next])
            await held.enter_async_context(self._training.workplace.hold())

    async def settle(self) -> None:
        """Wait for the rollouts that run ahead of an update that a checkpoint has: the weights that sample them, which
        are those before it, are nowhere else. A resumed run finds them in the store."""
        if self._next is not None:
            await finish(self._end(self._next))

    async def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)

    async def _end(self, rollouts: asyncio.Task[Any]) -> None:
        note = self._training.run.progress.note
        if not rollouts.done():
            note("stopping: the rollouts of the next step end first, as their weights are not saved")
        _, pending = await asyncio.wait([rollouts], timeout=AHEAD_SECONDS)
        if pending:
            note("those that have not ended are run again, by newer weights, when the run is resumed")


class InFlight(OneAhead):
    """Sampling never waits: weights change under rollouts and answers, and a step takes the groups that have ended.

    Args:
        training: the started run.
        state: the groups that a checkpoint has recorded (`Ahead.state`).
    """

    def __init__(self, training: Training, state: Mapping[str, Any]) -> None:
        super().__init__(training)
        self._groups = training.ahead = Ahead(training, state)

    async def before_publishing(self, held: AsyncExitStack) -> None:
        # The engine in the learner's process changes its weights between two tokens; vLLM's needs a pause.
        if self._next is not None and self._training.algorithm.engine != "torch":
            await held.enter_async_context(self._training.workplace.hold())

    async def settle(self) -> None:
        """Nothing: a resumed run begins groups anew, by weights that it has."""

    async def stop(self) -> None:
        await super().stop()
        await self._groups.stop()


def overlap_of(training: Training, state: Mapping[str, Any], done: int) -> InTurn:
    """How sampling and learning share the time of a run.

    Args:
        training: the started run.
        state: what a checkpoint has recorded of groups in flight; else empty.
        done: the completed steps that the run begins from.
    """
    staleness = training.source.max_staleness or 0
    if staleness == 0:
        return InTurn(training)
    if staleness == 1:
        return OneAhead(training)
    return InFlight(training, state or {"next": done * training.source.batches.batch_size})
