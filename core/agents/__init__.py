"""What can be run: agents, their resources, hooks around their attempts, and `agl.wrap`."""

from agl.agents.agent import (
    Agent,
    FunctionAgent,
    LitAgent,
    Outcome,
    RewardFunction,
    RolloutInfo,
    Tracer,
    as_agent,
    rollout,
    scored,
)

__all__ = [
    "Agent",
    "FunctionAgent",
    "LitAgent",
    "Outcome",
    "RewardFunction",
    "RolloutInfo",
    "Tracer",
    "as_agent",
    "rollout",
    "scored",
]
