"""GRPO's formula on one return per rollout, from the two functions that `compute_advantages` makes it of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from agl.mdp.types import FloatArray
from agl.trainer.objectives.advantages import group_statistics, relative


def grpo_advantages(
    returns_R: npt.NDArray[np.float64] | Sequence[float], groups_R: Sequence[Hashable], **options: float
) -> FloatArray:
    """float32 [R]. `options`: of `relative`."""
    return relative(returns_R, *group_statistics(returns_R, groups_R), **options)  # type: ignore[arg-type]
