"""Runners execute rollouts: they lease one, run the agent on it, and report what came of it."""

from agl.trainer.runners.local import LocalRunner, RolloutResult

__all__ = ["LocalRunner", "RolloutResult"]
