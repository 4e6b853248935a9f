"""Runs a program that knows nothing of agl as a rollout: `agl run`."""
