"""Graders: what scores an agent's answer; see `agl.rewards` for the names."""

from agl.trainer.graders import combine as _operators  # noqa: F401  `*` and `+` of every grader
