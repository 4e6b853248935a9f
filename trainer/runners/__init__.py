"""Runners execute rollouts: they lease one from a run's coordinator, run the agent on it, and report the result."""

from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.protocol import Coordinator, Lease, Report, RolloutResult, Runner

__all__ = ["Coordinator", "Lease", "LocalRunner", "Report", "RolloutResult", "RunCoordinator", "Runner"]
