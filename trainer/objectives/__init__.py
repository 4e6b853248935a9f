"""What is optimised: advantages, losses and their reduction, as pure functions with verl's names and numbers."""

from typing import Literal

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond this are cut, so that their exponential stays finite (as in verl)."""

LossAgg = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""See `agl.trainer.objectives.reduction.token_weights`."""

KLKind = Literal["k1", "k2", "k3"]
"""See `agl.trainer.objectives.kl.kl_penalty`."""

Estimator = Literal[
    "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "running_baseline", "gae"
]  # fmt: skip
"""How returns become advantages, by verl's names where it has one; see
`agl.trainer.objectives.advantages.compute_advantages`."""

PolicyLossKind = Literal["vanilla", "gspo"]
"""See `agl.trainer.objectives.losses`."""

LossKind = Literal["vanilla", "gspo", "nll", "dpo"]
"""Those, and those that need no sampling of the policy in training."""

RolloutIS = Literal["token", "sequence"]
"""See `agl.trainer.objectives.importance.truncated_importance`."""
