"""The metrics of an update: means over its tokens and steps, and the error that names the calls of a bad loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agl.errors import TrainingError
from agl.mdp.sequence import TrainingRow
from agl.trainer.local.precision import wide


class Totals:
    """Sums over the tokens and steps of an update; one transfer from the device at the end.

    Attributes:
        forwarded: tokens of its forward passes.
    """

    def __init__(self) -> None:
        self.forwarded = 0
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._largest: list[Tensor] = []
        self._steps: list[tuple[float, float]] = []
        self._kls: list[float] = []
        self._shares: list[float] = []

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add values of tokens or of pairs; the mean over all that were added under a name is its metric."""
        for name, value in values.items():
            total = wide(value.detach()).sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._counts[name] += value.numel()
        if "abs_log_ratio" in values:
            self._largest.append(values["abs_log_ratio"].max())

    def add_step(self, loss: float, norm: float) -> None:
        self._steps.append((loss, norm))

    def add_held(self, kl: float, share: float) -> None:
        """The KL of an optimiser step, and the share of it that was taken."""
        self._kls.append(kl)
        self._shares.append(share)

    def metrics(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Of all processes that share the update. `gather`: what each of them has -> all of it, in each of them."""
        own = dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True)) if self._sums else {}
        largest = [float(torch.stack(self._largest).max())] if self._largest else []
        sums, counts, greatest, forwarded = zip(*gather((own, self._counts, largest, self.forwarded)), strict=True)
        total = {name: sum(part.get(name, 0.0) for part in sums) for part in sums for name in part}
        n = sum(counts, Counter[str]())
        most = [value for part in greatest for value in part]
        loss, norm = np.mean(self._steps, axis=0)
        return {
            "loss": float(loss),
            "grad_norm": float(norm),
            **{name: value / n[name] for name, value in total.items()},
            **({"max_abs_log_ratio": max(most)} if most else {}),
            "forwarded_tokens": float(sum(forwarded)),
            "optimizer_steps": float(len(self._steps)),
            **({"step_kl": max(self._kls), "step_taken": min(self._shares)} if self._kls else {}),
        }


def not_finite(losses: Seq[tuple[list[TrainingRow], Tensor]], loss: float, norm: float) -> TrainingError:
    """Name the calls whose loss is not finite, or all of the step's when only the gradient is not."""
    bad_calls: list[tuple[str, str]] = []
    all_calls: list[tuple[str, str]] = []
    for members, values in losses:
        finite = torch.isfinite(values).cpu().numpy()
        start = 0
        for row in members:
            calls = row.calls[row.action_mask]
            bad = calls[~finite[start : start + calls.size]]
            start += calls.size
            bad_calls += [(row.rollout_id, row.call_ids[k]) for k in np.unique(bad)]
            all_calls += [(row.rollout_id, row.call_ids[k]) for k in np.unique(calls)]
    suspects = bad_calls or all_calls
    return TrainingError(
        f"the update is not finite: loss {loss}, gradient norm {norm}",
        hint="the optimiser step was not taken; lower the learning rate, or go back to an earlier checkpoint if the "
        "weights themselves are broken",
        rollouts=_first([rollout for rollout, _ in suspects]),
        calls=_first([call for _, call in suspects]),
    )


def _first(names: Seq[str], most: int = 8) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:most]) + (f" and {len(unique) - most} more" if len(unique) > most else "")
