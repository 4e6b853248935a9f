"""Runners execute rollouts: they lease one from a run's desk, run the agent on it, and report what came of it."""

from agl.trainer.runners.coordinator import RunDesk
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.protocol import Desk, Lease, Report, RolloutResult, Runner

__all__ = ["Desk", "Lease", "LocalRunner", "Report", "RolloutResult", "RunDesk", "Runner"]
