"""Runners execute rollouts: they lease one from a run's desk, run the agent on it, and report what came of it."""

from agl.trainer.runners.base import Desk, Lease, Report, RolloutResult, Runner
from agl.trainer.runners.desk import RunDesk
from agl.trainer.runners.local import LocalRunner

__all__ = ["Desk", "Lease", "LocalRunner", "Report", "RolloutResult", "RunDesk", "Runner"]
