"""Coding agents: each is pointed at the attempt by its own configuration, and not changed.

`agl run` starts one as its user does; `agl.harness` makes an agent of one, which is trained behind walls.
"""

from agl_harnesses.harness import Attempt, Harness
from agl_harnesses.session import Session, find, installation, known

__all__ = ["Attempt", "Harness", "Session", "find", "installation", "known"]
