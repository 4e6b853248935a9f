"""Policy gradients on one machine: sample rollouts of each task, credit their calls, update the policies, again."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from agl.credit import PerCall
from agl.errors import NoTrainableDataError
from agl.mdp.sequence import TrainingRow
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.settings import PolicyGradientSettings
from agl.trainer.algorithms.source import Sample, Source
from agl.trainer.algorithms.training import Training
from agl.trainer.objectives.advantages import StepAdvantages, compute_advantages
from agl.trainer.run.run import Run
from agl.trainer.runners.protocol import RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient(PolicyGradientSettings, LocalTraining):
    """A policy-gradient algorithm with the embedded engine and learner; `agl.GRPO` and others are settings of it."""

    async def source(self, run: Run) -> Source:
        return Source.of_tasks(run, self, self.batch_size, self.group_size, max_staleness=self.max_staleness)

    async def sample(self, training: Training, step: int) -> Sample:
        """With dynamic sampling, further tasks take the place of groups that are all alike."""
        batches = training.source.batches
        indices = batches.indices(step)
        results = await training.rollouts(indices, step)
        replacements = batches.further(step)
        resampled = 0
        for _ in range(self.max_gen_batches - 1 if self.dynamic_sampling else 0):
            groups = {r.rollout.group for r in results}
            lost_groups = groups - {r.rollout.group for r in results if r.attempt_trajectory is not None}
            useless = len(self._compared(training, results, step).flat_groups) + len(lost_groups)
            missing = self.batch_size - (len(indices) - useless)
            more = [next(replacements) for _ in range(missing)]
            if not more:
                break
            results += await training.rollouts(more, step, first=len(indices))
            indices += more
            resampled += len(more)
        return Sample(results=results, resampled=resampled)

    async def worth(self, training: Training, sample: Sample, step: int) -> StepAdvantages:
        worth = self._compared(training, sample.results, step)
        return worth.without_flat() if self.dynamic_sampling else worth

    def learns(self, rows: Seq[TrainingRow]) -> bool:
        # A value head and penalties learn from rollouts that are all alike, too.
        if self.kl_coef or self.entropy_coef or self.adv_estimator == "gae":
            return any(row.n_actions for row in rows)
        return LocalTraining.learns(self, rows)

    def _compared(self, training: Training, results: Seq[RolloutResult], step: int) -> StepAdvantages:
        credit = training.run.config.credit
        trajectories = [r.attempt_trajectory.trajectory for r in results if r.attempt_trajectory is not None]
        own_rewards = any(x.rewards for t in trajectories for x in t.transitions)
        if trajectories and not own_rewards and isinstance(credit, PerCall) and not credit.shared:
            raise NoTrainableDataError(
                f"credit {credit!r} counts only the calls' own rewards, and no call of step {step + 1} earned one",
                hint="emit rewards where calls earn them (agl.emit_reward in a tool, agl.air), or use Uniform()",
                step=step + 1,
            )
        return compute_advantages(
            trajectories,
            credit,
            estimator=self.adv_estimator,
            normalize_std=self.normalize_std,
            shaping=None if self.overlong is None else self.overlong.of(self.max_response_tokens),
            baselines=training.baselines,
            baseline_decay=self.baseline_decay,
        )
