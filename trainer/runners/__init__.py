"""Runners execute rollouts: they lease one from a run's desk, run the agent on it, and report what came of it."""

from agl.trainer.runners.coordinator import RunCoordinator
from agl.trainer.runners.local import LocalRunner
from agl.trainer.runners.protocol import Coordinator, Lease, Report, RolloutResult, Runner

__all__ = ["Coordinator", "Lease", "LocalRunner", "Report", "RolloutResult", "RunCoordinator", "Runner"]
