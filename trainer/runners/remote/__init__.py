"""Rollouts on other machines: `coordinator` and `runner` are the run's side, `client` and `worker` the other side."""
