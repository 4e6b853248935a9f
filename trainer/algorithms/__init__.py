"""Algorithms: what decides which rollouts are run and how a policy changes by them."""

from agl.trainer.algorithms.base import Algorithm
from agl.trainer.algorithms.baseline import Baseline
from agl.trainer.algorithms.grpo import GRPO
from agl.trainer.algorithms.verl import VERL

__all__ = ["GRPO", "VERL", "Algorithm", "Baseline"]
