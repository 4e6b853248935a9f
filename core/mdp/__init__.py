"""The transition schema: calls, transitions, trajectories and training rows, and how they are built from each other."""

from agl.mdp.sequence import TrainingRow
from agl.mdp.types import (
    Call,
    FinishReason,
    FloatArray,
    IntArray,
    Reward,
    Trajectory,
    Transition,
    float_array,
    int_array,
)

__all__ = [
    "Call",
    "FinishReason",
    "FloatArray",
    "IntArray",
    "Reward",
    "TrainingRow",
    "Trajectory",
    "Transition",
    "float_array",
    "int_array",
]
