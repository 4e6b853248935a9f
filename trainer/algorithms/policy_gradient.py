"""Policy gradients on one machine: sample rollouts of each task, credit their calls, update the policies, again."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from agl.credit import PerCall
from agl.errors import NoTrainableDataError
from agl.mdp.sequence import TrainingRow
from agl.trainer.algorithms.settings import PolicyGradientSettings
from agl.trainer.algorithms.trained_calls import recorded_baselines
from agl.trainer.algorithms.training import LocalTraining
from agl.trainer.algorithms.worth import SampledSteps
from agl.trainer.objectives.advantages import StepAdvantages, compute_advantages
from agl.trainer.run.run import Run
from agl.trainer.runners.protocol import RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient(PolicyGradientSettings, LocalTraining):
    """A policy-gradient algorithm with the embedded engine and learner; `agl.GRPO` and others are settings of it."""

    async def make_steps(self, run: Run) -> PolicyGradientSteps:
        return PolicyGradientSteps(self, run)


class PolicyGradientSteps(SampledSteps):
    """The steps of a policy-gradient algorithm.

    Args:
        settings: of the algorithm. run: the run, which has training tasks.
    """

    settings: PolicyGradient

    def __init__(self, settings: PolicyGradient, run: Run) -> None:
        super().__init__(
            settings,
            run,
            batch_size=settings.batch_size,
            group_size=settings.group_size,
            max_staleness=settings.max_staleness,
        )
        self._baselines: Mapping[str, float] | None = None

    def learns(self, rows: Seq[TrainingRow]) -> bool:
        # A value head and penalties learn from rollouts that are all alike, too.
        flat_learns = self.settings.kl_coef or self.settings.entropy_coef or self.settings.adv_estimator == "gae"
        return any(row.n_actions for row in rows) if flat_learns else super().learns(rows)

    async def sample(self, step: int) -> tuple[list[RolloutResult], int]:
        """With dynamic sampling, further tasks take the place of groups that are all alike."""
        settings = self.settings
        indices = self.batches.indices(step)
        results = await self.rollouts(indices, step)
        replacements = self.batches.further(step)
        resampled = 0
        for _ in range(settings.max_gen_batches - 1 if settings.dynamic_sampling else 0):
            groups = {r.rollout.group for r in results}
            lost_groups = groups - {r.rollout.group for r in results if r.attempt_trajectory is not None}
            useless = len(self._compared(results, step).flat_groups) + len(lost_groups)
            missing = settings.batch_size - (len(indices) - useless)
            more = [next(replacements) for _ in range(missing)]
            if not more:
                break
            results += await self.rollouts(more, step, first=len(indices))
            indices += more
            resampled += len(more)
        return results, resampled

    def advantages(self, results: Seq[RolloutResult], step: int) -> StepAdvantages:
        advantages = self._compared(results, step)
        self._baselines = advantages.baselines
        return advantages.without_flat() if self.settings.dynamic_sampling else advantages

    def _compared(self, results: Seq[RolloutResult], step: int) -> StepAdvantages:
        settings, credit = self.settings, self.run.credit
        trajectories = [r.attempt_trajectory.trajectory for r in results if r.attempt_trajectory is not None]
        own_rewards = any(x.rewards for t in trajectories for x in t.transitions)
        if self._baselines is None:
            # The first step, or the first one after a resume.
            self._baselines = recorded_baselines(self.run.history)
        advantages = compute_advantages(
            trajectories,
            credit,
            estimator=settings.adv_estimator,
            normalize_std=settings.normalize_std,
            shaping=None if settings.overlong is None else settings.overlong.of(settings.max_response_tokens),
            baselines=self._baselines,
            baseline_decay=settings.baseline_decay,
        )
        if trajectories and not own_rewards and isinstance(credit, PerCall) and not credit.shared:
            raise NoTrainableDataError(
                f"credit {credit!r} counts only the calls' own rewards, and no call of step {step + 1} earned one",
                hint="emit rewards where calls earn them (agl.emit_reward in a tool, agl.air), or use Uniform()",
                step=step + 1,
            )
        return advantages
