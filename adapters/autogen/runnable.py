"""An AutoGen agent or team as an agent."""

from __future__ import annotations

import inspect
from typing import Any

from agl.adapters.autogen.copying import fresh_copy
from agl.adapters.base import Runnable, question
from agl.adapters.functions import function_runnable

_KINDS = {"autogen_agentchat.": ("ChatAgent", "Team"), "ag2.": ("Agent",), "autogen.beta.": ("Agent",)}


def handles(agent: object) -> bool:
    """Whether `agent` is an agent or a team of autogen-agentchat, or an agent of ag2 1.x or `autogen.beta`."""
    return any(
        cls.__name__ in names and cls.__module__.startswith(package)
        for cls in type(agent).__mro__
        for package, names in _KINDS.items()
    )


def runnable(agent: Any) -> Runnable:
    """How an agent or a team is run: a fresh copy of it, by `run` (ag2: `ask`).

    A function with arguments is task -> output and runs AutoGen itself; one without builds an agent for each rollout.

    Raises:
        ConfigError: when a rollout starts, an agent that cannot be copied.
    """
    is_function = inspect.isroutine(agent)
    if is_function and inspect.signature(agent).parameters:
        return function_runnable(agent)

    async def invoke(value: Any) -> Any:
        rollouts_agent = await _rollouts_agent(agent)
        return await (rollouts_agent.ask(value) if _is_ag2(rollouts_agent) else rollouts_agent.run(task=value))

    return Runnable(agent.__name__ if is_function else agent.name, invoke, question, content_of)


async def _rollouts_agent(agent: Any) -> Any:
    """The agent of one rollout. ag2's keep nothing between questions, so that they are shared."""
    if inspect.isroutine(agent):
        result = agent()
        return await result if inspect.isawaitable(result) else result
    return agent if _is_ag2(agent) else fresh_copy(agent)


def _is_ag2(agent: Any) -> bool:
    return not hasattr(agent, "on_messages") and hasattr(agent, "ask")


def content_of(result: Any) -> Any:
    """The text of a result's last message, or the object of a structured message."""
    if hasattr(result, "body"):
        return result.body
    return result.messages[-1].content if result.messages else None
