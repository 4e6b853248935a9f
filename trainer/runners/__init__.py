"""Runners execute rollouts: they lease one from a run's coordinator, run the agent on it, and report the result."""
