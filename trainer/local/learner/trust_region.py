"""A bound on how far one optimiser step may move the policy.

Adam's first steps move every weight by about the learning rate, whatever the gradient: a sharp policy, such as one that
has just imitated, can lose in one of them what it knew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from agl.mdp.sequence import TrainingRow
from agl.trainer.objectives.kl import kl_penalty

MEASURED_TOKENS = 1024
"""Tokens of the rows that the step is measured on, prompts included: a few per cent of an update of a real model."""

HALVINGS = 6
"""How often a step is halved before it is taken back whole."""


class TrustRegion:
    """Shortens AdamW's steps until they change the policy by at most `max_kl`: a backtracking line search as in TRPO
    (arXiv 1502.05477, appendix C), without a copy of the weights. The moments stay as they are.

    Args:
        optimizer: it has just stepped whenever `hold` is called, and its gradients are still there.
        max_kl: KL(policy before the step || policy after it) in nats, estimated by the mean over sampled tokens of how
            much less likely each became: "k1". Unlike "k3", it does not grow with rare tokens that became likelier,
            which is what learning is.
    """

    def __init__(self, optimizer: torch.optim.AdamW, max_kl: float) -> None:
        self._optimizer = optimizer
        self._max_kl = max_kl

    def hold(
        self,
        rows: Seq[TrainingRow],
        before: Mapping[int, Tensor],
        logprobs: Callable[[Seq[TrainingRow]], Tensor],
    ) -> tuple[float, float]:
        """Measure the step on some of its rows, and shorten it if it went too far.

        Args:
            rows: of the step.
            before: float32 [N] by row: log-probs of its trained tokens before the step.
            logprobs: the same with today's weights, of several rows, one after another; on the CPU.

        Returns:
            The KL of the step as it would have been, and the share of it that was taken: 1 for all of it.
        """
        chosen = _spread(rows)
        old_N = torch.cat([before[i] for i in chosen]).cpu()

        def measure() -> float:
            return float(kl_penalty(old_N, logprobs([rows[i] for i in chosen]), "k1").mean())

        first = kl = measure()
        share = 1.0
        for _ in range(HALVINGS):
            if kl <= self._max_kl:  # never true of one that is not a number
                return first, share
            share /= 2
            self._take_back(share)
            kl = measure()
        if kl <= self._max_kl:
            return first, share
        self._take_back(share)
        return first, 0.0

    def _take_back(self, share: float) -> None:
        """Move the weights back by this share of AdamW's last step, which its moments still hold; exact to rounding.
        What weight decay took stays."""
        with torch.no_grad():
            for group in self._optimizer.param_groups:
                first, second = group["betas"]
                for weights in group["params"]:
                    if weights.grad is None:
                        continue
                    state = self._optimizer.state[weights]
                    n = float(state["step"])
                    scale = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - second**n)).add_(group["eps"])
                    weights.addcdiv_(state["exp_avg"], scale, value=share * group["lr"] / (1 - first**n))


def _spread(rows: Seq[TrainingRow]) -> list[int]:
    """Rows at even distances that hold about `MEASURED_TOKENS` together, at least one."""
    mean = sum(map(len, rows)) / len(rows)
    n = min(len(rows), max(1, int(MEASURED_TOKENS / mean)))
    return np.linspace(0, len(rows) - 1, n).astype(int).tolist()
