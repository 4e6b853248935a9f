"""A function that calls bare SDK clients, as an agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agl.agents.agent import Agent, RewardFunction, scored


def is_function(agent: object) -> bool:
    """Whether `agent` is a plain function task -> output."""
    return inspect.isfunction(agent) or inspect.ismethod(agent)


def wrap_function(
    agent: Callable[[Any], Any],
    reward: RewardFunction | None = None,
    *,
    name: str | None = None,
    input: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Any] | None = None,
    error_reward: float | None = None,
) -> Agent:
    """Make a function task -> output, sync or async, trainable, whichever of the SDKs it calls.

    Args:
        agent: it calls its model through the clients of `openai` or `anthropic`.
        reward: (task, output) -> float or dict of floats.
        name: the agent's name; the function's if None.
        input: task -> what the function gets. output: its result -> what is scored.
        error_reward: the reward of a run in which the function raised; None = retried, then dropped.
    """
    from agl.adapters.anthropic.tracer import AnthropicTracer
    from agl.adapters.openai.tracer import OpenAITracer

    before = input or (lambda task: task)
    after = output or (lambda result: result)
    invoke: Callable[[Any], Any]
    if inspect.iscoroutinefunction(agent):

        async def invoke_async(task: Any) -> Any:
            return after(await agent(before(task)))

        invoke = invoke_async
    else:

        def invoke_sync(task: Any) -> Any:
            return after(agent(before(task)))

        invoke = invoke_sync
    # Which SDK a function calls is not told by its type, and a tracer of one that is not installed does nothing.
    tracers = (OpenAITracer(), AnthropicTracer())
    return scored(name or agent.__name__, invoke, reward, tracers=tracers, error_reward=error_reward)
