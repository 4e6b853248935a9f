"""What a training step works with, and the functions that differ between algorithms."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agl.mdp.sequence import TrainingRow
from agl.trainer.algorithms.ahead import Ahead
from agl.trainer.algorithms.settings import TrainingSettings
from agl.trainer.algorithms.source import Rows, Sample, Source
from agl.trainer.algorithms.worth import make_rows
from agl.trainer.gateway.access import SamplingRules
from agl.trainer.local.prepared import model_directory
from agl.trainer.objectives.advantages import StepAdvantages
from agl.trainer.policies.policies import Policies
from agl.trainer.policies.teacher import Teacher
from agl.trainer.run.run import Run
from agl.trainer.run.workplace import Workplace
from agl.trainer.runners.protocol import RolloutResult


@dataclass(slots=True, eq=False)
class Training:
    """What a step works with.

    Attributes:
        teachers: by the name of the policy that each judges.
        baselines: those that the last step left, by agent.
        ahead: the rollouts of steps to come, with `max_staleness` above 1.
    """

    run: Run
    algorithm: StepFunctions
    source: Source
    policies: Policies
    workplace: Workplace
    teachers: dict[str, Teacher] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)
    ahead: Ahead | None = None

    async def groups(self, step: int) -> list[RolloutResult]:
        """The rollouts that a step learns from: of its own tasks, or of tasks near it that have ended first."""
        if self.ahead is not None:
            return await self.ahead.take(step)
        return await self.rollouts(self.source.batches.indices(step), step)

    def beyond(self, step: int) -> dict[str, Any]:
        """What a run that resumes after `step` steps needs to know of them, besides weights."""
        return {} if self.ahead is None else {"ahead": self.ahead.state(step)}

    async def rollouts(
        self, indices: Seq[int], step: int, first: int = 0, *, announce: bool = True
    ) -> list[RolloutResult]:
        """Rollouts of the tasks with these indices; `first`: place of the first task, when the step has had others.
        `announce`: as for `Workplace.rollouts`."""
        return await self.workplace.rollouts(
            [(i, self.run.train[i]) for i in indices],
            mode="train",
            step=step,
            group_size=self.source.group_size,
            metadata=self.algorithm.metadata(self.run),
            first=first,
            announce=announce,
        )

    async def start(self) -> None:
        """Start the gateway and the workers."""
        algorithm = self.algorithm
        policies = self.policies
        await self.workplace.start(
            algorithm.rules,
            policies.names[0],
            register=policies.serve,
            rewarded=algorithm.rewarded,
            try_first=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFunctions(TrainingSettings):
    """The settings of an algorithm that trains on this machine, and the functions of its steps."""

    rewarded: ClassVar[bool] = True
    """Whether a rollout without a reward has failed."""
    why_flat: ClassVar[str] = "all rollouts of each task had the same return"
    """Why a step with rollouts has nothing to learn from, for people."""

    @abstractmethod
    async def source(self, run: Run) -> Source:
        """What the run learns from; nothing is loaded yet."""

    async def begin(self, training: Training) -> None:
        """Called once before the first step, when the policies are loaded and nothing was sampled yet."""

    async def sample(self, training: Training, step: int) -> Sample:
        """What step `step` (from 0) learns from."""
        source = training.source
        if source.sampled:
            return Sample(results=await training.groups(step))
        indices = source.batches.indices(step)
        return Sample(recorded=[trajectory for i in indices for trajectory in source.batches.tasks[i]])

    async def worth(self, training: Training, sample: Sample, step: int) -> StepAdvantages:
        """What each call of a sample is worth."""
        return training.source.worth(sample.recorded)

    async def rows(self, training: Training, worth: StepAdvantages, step: int) -> Rows:
        """The step's training rows. Raises as `make_rows`."""
        # Off the event loop: long rollouts take seconds.
        return await asyncio.to_thread(make_rows, worth, training.policies, step, training.source.max_staleness)

    def learns(self, rows: Seq[TrainingRow]) -> bool:
        """Whether an update on these rows would change the policy."""
        return any(row.n_actions and np.any(row.advantages) for row in rows)

    @contextlib.asynccontextmanager
    async def loaded(self, run: Run, source: Source) -> AsyncIterator[Training]:
        """The run's policies, loaded for the block, with a workplace that may be started."""
        spec = self.policy_spec(run.seed, source.steps)
        config = run.config
        try:
            policies = await Policies.start(
                spec,
                await asyncio.to_thread(self.models, run),
                config.policies,
                self.renderer,
                on_progress=run.progress.loading,
            )
        finally:
            run.progress.stop()
        training = Training(run, self, source, policies, Workplace(run))
        policies.on_death(training.workplace.fail)
        for _, policy in policies:
            if policy.notice:
                run.progress.note(policy.notice)
        try:
            yield training
        finally:
            try:
                await training.workplace.stop()
            finally:
                await asyncio.gather(
                    *(teacher.close() for teacher in set(training.teachers.values())), policies.close()
                )
                run.progress.stop()

    def rules(self, mode: str) -> SamplingRules:
        """How the policies sample, by the purpose of a rollout."""
        if mode == "train":
            return SamplingRules(self.temperature, 1.0, 0, self.max_response_tokens)
        return SamplingRules(temperature=self.val_temperature, max_tokens=self.max_response_tokens)

    def models(self, run: Run) -> dict[str, str]:
        """What each policy of the run is loaded from (`model_directory`); a directory's path is whole."""
        models: dict[str, str] = {}
        for name in run.config.selection.policies:
            policy = run.config.policies.get(name)
            model = model_directory((policy.model if policy else None) or self.model, self.chat_template)
            models[name] = str(Path(model).resolve()) if Path(model).exists() else model
        return models

    def metadata(self, run: Run) -> dict[str, Any]:
        """Of the run's rollouts. The models by policy: `explain` needs their tokenizers to turn ids into text."""
        models = self.models(run)
        return {"model": next(iter(models.values())), **({"models": models} if len(models) > 1 else {})}
