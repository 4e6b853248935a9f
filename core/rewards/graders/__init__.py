"""Graders: what scores an agent's answer; see `agl.rewards` for the names."""
