"""Graders score an agent's answer; `agl.rewards` has their names.

Helper processes import this package, some without any other package installed, so it imports nothing.
"""
