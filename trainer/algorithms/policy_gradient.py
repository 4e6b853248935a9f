"""Policy gradients on one machine: sample rollouts of each task, credit their calls, update the policies, again.

The algorithms by name are `PolicyGradient` with the settings of their papers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from agl.credit import PerCall
from agl.errors import ConfigError, NoTrainableDataError
from agl.mdp.sequence import TrainingRow
from agl.trainer.algorithms.groups import Overlong, grouped_options
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.settings import PolicyGradientSettings
from agl.trainer.algorithms.source import Sample, Source
from agl.trainer.algorithms.training import Training
from agl.trainer.objectives import Estimator, EstimatorFunction, LossAgg, PolicyLossFunction, PolicyLossKind
from agl.trainer.objectives.advantages import StepAdvantages, compute_advantages
from agl.trainer.run.run import Run
from agl.trainer.runners.protocol import RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient(PolicyGradientSettings, LocalTraining):
    """A policy-gradient algorithm with the embedded engine and learner; `agl.GRPO` and others are settings of it."""

    async def source(self, run: Run) -> Source:
        if self.max_staleness > 1 and run.agent.memory is not None:
            raise ConfigError(
                f"max_staleness={self.max_staleness} with an agent that has a memory, which grows step by step",
                hint="use max_staleness=1, with which a step's rollouts all read what the step before has left",
            )
        return Source.of_tasks(
            run,
            self,
            self.batch_size,
            self.group_size,
            max_staleness=self.max_staleness,
            by_spread=self.task_sampling == "learnability",
        )

    async def sample(self, training: Training, step: int) -> Sample:
        """With dynamic sampling, further tasks take the place of groups that are all alike."""
        batches = training.source.batches
        results = await training.groups(step)
        size = batches.size(step)
        n_tasks = size
        replacements = batches.further(step)
        resampled = 0
        for _ in range(self.max_gen_batches - 1 if self.dynamic_sampling else 0):
            groups = {r.rollout.group for r in results}
            lost_groups = groups - {r.rollout.group for r in results if r.attempt_trajectory is not None}
            useless = len(self._compared(training, results, step).flat_groups) + len(lost_groups)
            missing = size - (n_tasks - useless)
            more = [next(replacements) for _ in range(missing)]
            if not more:
                break
            results += await training.rollouts(more, step, first=n_tasks)
            n_tasks += len(more)
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


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(PolicyGradient):
    """Group relative policy optimisation: rollouts of a task are compared with each other.

    Source: DeepSeekMath, arXiv 2402.03300, section 4; clipping and loss reduction as in verl.
    """


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPO(PolicyGradient):
    """GRPO without its biases: no division by the group's deviation, and every token counts 1 / longest answer.

    Source: arXiv 2503.20783.
    """

    normalize_std: bool = False
    loss_agg: LossAgg = "seq-mean-token-sum-norm"


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO(PolicyGradient):
    """REINFORCE with the mean of the task's other rollouts as baseline.

    Source: arXiv 2402.14740.
    """

    adv_estimator: Estimator | EstimatorFunction = "rloo"


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class REINFORCEPlusPlus(PolicyGradient):
    """Returns whitened over the batch, without groups; with `adv_estimator="reinforce_plus_plus_baseline"`, less the
    mean of the task's rollouts first.

    Source: arXiv 2501.03262.
    """

    group_size: int = 1
    batch_size: int = 128
    adv_estimator: Estimator | EstimatorFunction = "reinforce_plus_plus"


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class REINFORCE(PolicyGradient):
    """Returns less a running mean of each agent's returns: for games, in which the agents are the roles.

    A role is compared with itself over all games, not with the other games of a task, in which its opponents acted
    differently. Use it with `credit=agl.credit.Competitive()`, or `PerAgent()` for roles with separate rewards.

    Source: role-conditioned advantage estimation, SPIRAL, arXiv 2506.24119.
    """

    group_size: int = 1
    batch_size: int = 128
    adv_estimator: Estimator | EstimatorFunction = "running_baseline"


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(PolicyGradient):
    """Proximal policy optimisation with a value head on the policy's last hidden states.

    Each call is an episode of its tokens that ends with the call's return by the credit rule.

    Source: arXiv 1707.06347, with generalised advantage estimation, arXiv 1506.02438.
    """

    group_size: int = 1
    batch_size: int = 128
    adv_estimator: Estimator | EstimatorFunction = "gae"
    update_epochs: int = 2
    minibatches: int = 2


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(PolicyGradient):
    """GRPO with the importance ratio of whole answers.

    Source: arXiv 2507.18071.
    """

    policy_loss: PolicyLossKind | PolicyLossFunction = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    loss_agg: LossAgg = "seq-mean-token-mean"
    minibatches: int = 4


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class DAPO(PolicyGradient):
    """GRPO that clips higher than lower, samples until every task has something to learn from, and, with `overlong=`,
    penalises answers near their limit.

    Source: arXiv 2503.14476.
    """

    clip_high: float = 0.28
    dynamic_sampling: bool = True
    overlong: Overlong | None = None
