"""A user's compiled graph as an agent."""

from __future__ import annotations

from agl.adapters.langchain import runnable as langchain
from agl.adapters.langchain.runnable import is_graph, runnable

__all__ = ["handles", "runnable"]


def handles(agent: object) -> bool:
    """Whether `agent` is a compiled graph that `create_agent` did not make."""
    return is_graph(agent) and not langchain.handles(agent)
