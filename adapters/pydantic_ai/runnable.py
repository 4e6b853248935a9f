"""A Pydantic AI agent as an agent."""

from __future__ import annotations

from typing import Any

from agl.adapters.base import Runnable, question_or_parts


def handles(agent: object) -> bool:
    """Whether `agent` is a Pydantic AI agent, or one that wraps another."""
    return any(
        (cls.__module__, cls.__name__) == ("pydantic_ai.agent.abstract", "AbstractAgent") for cls in type(agent).__mro__
    )


def runnable(agent: Any) -> Runnable:
    """How an agent is run: by `run`. An agent keeps nothing between its runs."""

    async def invoke(value: Any) -> Any:
        # It would take the name of our variable.
        return await agent.run(value, infer_name=False)

    return Runnable(agent.name or "agent", invoke, question_or_parts, lambda result: result.output)
