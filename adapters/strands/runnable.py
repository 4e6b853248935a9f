"""A Strands agent or graph as an agent."""

from __future__ import annotations

from typing import Any

from agl.adapters.base import Runnable, question
from agl.adapters.strands.copying import fresh_copy

_UNNAMED = "Strands Agents"
"""Strands' default name of an agent."""


def handles(agent: object) -> bool:
    """Whether `agent` is a Strands agent or a multi-agent graph."""
    return any(
        (cls.__module__, cls.__name__)
        in (("strands.agent.agent", "Agent"), ("strands.multiagent.base", "MultiAgentBase"))
        for cls in type(agent).__mro__
    )


def agent_name(agent: Any) -> str | None:
    """The name that the user chose for an agent; None for Strands' default."""
    name = getattr(agent, "name", None)
    return name if isinstance(name, str) and name not in ("", _UNNAMED) else None


def runnable(agent: Any) -> Runnable:
    """How an agent or a graph is run: a copy of it, by `invoke_async`.

    Raises:
        ConfigError: an agent that cannot be copied: one with a session manager, a swarm.
    """
    fresh_copy(agent)  # an agent that cannot be copied is an error now, not in the first rollout

    async def invoke(value: Any) -> Any:
        return await fresh_copy(agent).invoke_async(value)

    return Runnable(agent_name(agent) or "agent", invoke, question, text_of)


def text_of(result: Any) -> Any:
    """A result's structured output, its last message's text, or for a graph those of its last node."""
    if getattr(result, "structured_output", None) is not None:
        return result.structured_output
    message = getattr(result, "message", None)
    if isinstance(message, dict):
        return "\n".join(block["text"] for block in message["content"] if "text" in block)
    order = getattr(result, "execution_order", None)
    if order:
        return text_of(result.results[order[-1].node_id].result)
    return result
