"""What is optimised: advantages, losses and their reduction, as pure functions with verl's names and numbers."""

from collections.abc import Callable
from typing import Any, Literal

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond this are cut, so that their exponential stays finite (as in verl)."""

LossAgg = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""See `agl.trainer.objectives.reduction.token_weights`."""

KLKind = Literal["k1", "k2", "k3"]
"""See `agl.trainer.objectives.kl.kl_penalty`."""

Estimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "running_baseline", "gae"]
"""How returns become advantages, by verl's names where it has one; see
`agl.trainer.objectives.advantages.compute_advantages`."""

EstimatorFunction = Callable[[Any, Any, Any], Any]
"""A user's estimator, on numpy arrays [C] over all calls of a step: (float64 returns, int64 number of the group that a
call is compared in, int64 number of its rollout) -> advantages."""

PolicyLossKind = Literal["vanilla", "gspo", "cispo", "sapo", "vespo", "geo_mean"]
"""By verl's names where it has one; see `agl.trainer.objectives.losses`."""

PolicyLossFunction = Callable[[Any, Any, Any, Any], Any]
"""A user's loss, on torch tensors [N] over the trained tokens of whole answers: (float32 log-probs, float32 log-probs
when they were sampled, float32 advantages, int64 number of each token's answer) -> the loss of each token."""

LossKind = Literal["vanilla", "gspo", "cispo", "sapo", "vespo", "geo_mean", "nll", "dpo"]
"""Those, and those that need no sampling of the policy in training."""

RolloutIS = Literal["token", "sequence", "geometric"]
"""See `agl.trainer.objectives.importance.importance_weights`."""
