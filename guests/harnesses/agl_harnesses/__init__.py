"""Coding agents under `agl run`: each is pointed at the attempt by its own configuration, and not changed."""

from agl_harnesses.harness import Attempt, Harness
from agl_harnesses.session import Session, find, installation, known

__all__ = ["Attempt", "Harness", "Session", "find", "installation", "known"]
