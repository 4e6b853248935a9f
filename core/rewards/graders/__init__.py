"""Graders: what scores an agent's answer; see `agl.rewards` for the names."""

from agl.rewards.graders import combine as _operators  # noqa: F401  `*` and `+` of every grader
