"""Rejection fine-tuning: sample, keep what succeeded, imitate it, again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from agl.errors import ConfigError
from agl.mdp.conditions import Where, condition, reward
from agl.trainer.algorithms.groups import grouped_options
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.source import Sample, Source
from agl.trainer.algorithms.training import Training
from agl.trainer.algorithms.worth import candidates, worth_of_chosen
from agl.trainer.objectives.advantages import StepAdvantages
from agl.trainer.run.config import require_positive
from agl.trainer.run.run import Run
from agl.trainer.traces.choice import check_per_task, choose


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class RFT(LocalTraining):
    """Rejection fine-tuning, also called expert iteration: in each round the policy samples every task, and imitates
    the rollouts that are good enough; the next round continues from these weights.

    Sources: STaR, arXiv 2203.14465 (here each round continues from the last one's weights); ReST-EM, arXiv 2312.06585.

    Attributes:
        rounds: rounds of sampling and imitation.
        samples: rollouts per task and round.
        tasks: tasks of a round; None = all of the dataset.
        where: learn only from rollouts whose rewards meet this condition, such as "reward>=1". In Python also
            `agl.reward() >= 1`, or a function of an attempt.
        per_task: largest number of rollouts of a task to learn from, the best and then the oldest; None for all.
        update_epochs: passes over what was chosen in a round.
        minibatches: optimiser steps per pass.
    """

    timed: ClassVar[bool] = False

    rounds: int = 3
    samples: int = 4
    tasks: int | None = None
    where: Where = reward() >= 1
    per_task: int | None = None
    update_epochs: int = 2
    minibatches: int = 8
    val_every: int = 1
    checkpoint_every: int | None = 1

    def __post_init__(self) -> None:
        require_positive(rounds=self.rounds, samples=self.samples, tasks=self.tasks, minibatches=self.minibatches)
        check_per_task(self.per_task)
        condition(self.where, option="where")
        if self.steps is not None or self.epochs is not None:
            raise ConfigError(
                f"RFT with steps={self.steps}, epochs={self.epochs}",
                hint="rounds= says how long it trains, update_epochs= how often it passes over what a round chose",
            )
        LocalTraining.__post_init__(self)

    def _loss_settings(self) -> dict[str, Any]:
        return {"policy_loss": "nll", "update_epochs": self.update_epochs, "minibatches": self.minibatches}

    async def source(self, run: Run) -> Source:
        tasks = self.tasks and min(self.tasks, len(run.train))
        return Source.of_tasks(run, self, tasks, self.samples, steps=self.rounds)

    async def worth(self, training: Training, sample: Sample, step: int) -> StepAdvantages:
        """Each call that is imitated is worth 1.

        Raises:
            NoTrainableDataError: no rollout is kept; says what their rewards were.
        """
        chosen = choose(candidates(sample.results), where=self.where, per_task=self.per_task).require()
        return worth_of_chosen(sample.results, chosen, f"not chosen ({chosen.where}), or the same as another")
