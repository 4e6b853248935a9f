"""Loggers: what a run sends to experiment trackers, and how a slow or broken tracker is kept from slowing the run."""
