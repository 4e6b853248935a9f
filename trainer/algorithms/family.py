"""The algorithms by name: each is `PolicyGradient` with the settings that its paper gives it."""

from __future__ import annotations

from dataclasses import dataclass

from agl.trainer.algorithms.groups import grouped_options
from agl.trainer.algorithms.policy_gradient import PolicyGradient
from agl.trainer.algorithms.shaping import Overlong
from agl.trainer.objectives import Estimator, LossAgg, PolicyLossKind


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

    adv_estimator: Estimator = "rloo"


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class REINFORCEPlusPlus(PolicyGradient):
    """Returns whitened over the batch, without groups; with `adv_estimator="reinforce_plus_plus_baseline"`, less the
    mean of the task's rollouts first.

    Source: arXiv 2501.03262.
    """

    group_size: int = 1
    batch_size: int = 128
    adv_estimator: Estimator = "reinforce_plus_plus"


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
    adv_estimator: Estimator = "running_baseline"


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(PolicyGradient):
    """Proximal policy optimisation with a value head on the policy's last hidden states.

    Each call is an episode of its tokens that ends with the call's return by the credit rule.

    Source: arXiv 1707.06347, with generalised advantage estimation, arXiv 1506.02438.
    """

    group_size: int = 1
    batch_size: int = 128
    adv_estimator: Estimator = "gae"
    update_epochs: int = 2
    minibatches: int = 2


@grouped_options
@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(PolicyGradient):
    """GRPO with the importance ratio of whole answers.

    Source: arXiv 2507.18071.
    """

    policy_loss: PolicyLossKind = "gspo"
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
