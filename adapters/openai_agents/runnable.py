"""An agent of the OpenAI Agents SDK as an agent."""

from __future__ import annotations

from typing import Any

from agl.adapters.base import Runnable, question_or_parts


def handles(agent: object) -> bool:
    """Whether `agent` is an `agents.Agent`."""
    # Many users have a package of the name "agents", too.
    return hasattr(agent, "handoffs") and any(
        cls.__module__ == "agents.agent" and cls.__qualname__ == "Agent" for cls in type(agent).__mro__
    )


def runnable(agent: Any) -> Runnable:
    """How an agent is run: by `Runner.run`."""

    async def invoke(value: Any) -> Any:
        from agents import Runner

        return await Runner.run(agent, value)

    return Runnable(agent.name, invoke, question_or_parts, lambda result: result.final_output)
