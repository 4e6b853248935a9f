"""The transition schema: calls, transitions and trajectories, and how they are built from what a rollout left."""

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
    "Trajectory",
    "Transition",
    "float_array",
    "int_array",
]
