"""An AutoGen agent or team as an agent."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agl.adapters.autogen.fresh import fresh
from agl.adapters.base import question
from agl.agents.agent import Agent, RewardFunction, scored

_KINDS = {"autogen_agentchat": ("ChatAgent", "Team"), "ag2": ("Agent",)}


def handles(agent: object) -> bool:
    """Whether `agent` is an agent or a team of autogen-agentchat, or an agent of ag2 1.x."""
    return any(cls.__name__ in _KINDS.get(cls.__module__.partition(".")[0], ()) for cls in type(agent).__mro__)


def wrap(
    agent: Any,
    reward: RewardFunction | None = None,
    *,
    name: str | None = None,
    input: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Any] | None = None,
    error_reward: float | None = None,
) -> Agent:
    """Make an AutoGen agent or team trainable.

    Args:
        agent: an agent or a team, of which each rollout runs a fresh copy (model clients and tools are shared); or a
            function without arguments that builds a new one for each rollout; or a function task -> output that runs
            AutoGen itself (classic chats, agents of autogen-core). Functions may be async.
        reward: (task, output) -> float or dict of floats, sync or async.
        name: the rollout's name; the agent's or the team's own if None, or the function's.
        input: task -> what `run(task=...)` (ag2: `ask`) gets; the task's question if None.
        output: the `TaskResult` (ag2: `AgentReply`) -> what is scored; its last message's content if None. For a
            function task -> output: its result -> what is scored.
        error_reward: the reward of a run in which the agent raised; None = retried, then dropped.

    Raises:
        ConfigError: when a rollout starts, an agent that cannot be copied.
    """
    from agl.adapters.autogen.tracer import AutoGenTracer

    if inspect.isroutine(agent) and inspect.signature(agent).parameters:
        return _of_function(agent, reward, name, input, output, error_reward)
    before, after = input or question, output or content_of
    # An agent of ag2 keeps nothing between questions.
    build = (
        agent if inspect.isroutine(agent) else (lambda: agent) if _is_ag2(agent) else functools.partial(fresh, agent)
    )

    async def invoke(task: Any) -> Any:
        built = build()
        own = await built if inspect.isawaitable(built) else built
        return after(await (own.ask(before(task)) if _is_ag2(own) else own.run(task=before(task))))

    called = name or (agent.__name__ if inspect.isroutine(agent) else agent.name)
    return scored(called, invoke, reward, tracers=(AutoGenTracer(),), error_reward=error_reward)


def _of_function(
    function: Callable[[Any], Any],
    reward: RewardFunction | None,
    name: str | None,
    input: Callable[[Any], Any] | None,
    output: Callable[[Any], Any] | None,
    error_reward: float | None,
) -> Agent:
    """The same as for a bare client, with AutoGen traced."""
    from agl.adapters.autogen.tracer import AutoGenTracer
    from agl.adapters.openai import wrap as wrap_function

    agent = wrap_function(function, reward, name=name, input=input, output=output, error_reward=error_reward)
    return replace(agent, tracers=(AutoGenTracer(),))


def _is_ag2(agent: Any) -> bool:
    return not hasattr(agent, "on_messages") and hasattr(agent, "ask")


def content_of(result: Any) -> Any:
    """What a run said: its last message's text, or the object of a structured message."""
    if hasattr(result, "body"):
        return result.body
    return result.messages[-1].content if result.messages else None
