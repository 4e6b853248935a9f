"""A function that calls bare OpenAI clients, as an agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agl.agents import Agent, RewardFunction, scored


def handles(agent: object) -> bool:
    """Whether `agent` is a plain function task -> output."""
    return inspect.isfunction(agent) or inspect.ismethod(agent)


def wrap(
    agent: Callable[[Any], Any],
    reward: RewardFunction | None = None,
    *,
    name: str | None = None,
    input: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Any] | None = None,
    error_reward: float | None = None,
) -> Agent:
    """Make a function task -> output, sync or async, trainable.

    Args:
        agent: it calls its model through `openai.OpenAI` or `openai.AsyncOpenAI`.
        reward: (task, output) -> float or dict of floats.
        name: the agent's name; the function's if None.
        input: task -> what the function gets. output: its result -> what is scored.
        error_reward: the reward of a run in which the function raised; None = retried, then dropped.
    """
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
    return scored(name or agent.__name__, invoke, reward, tracers=(OpenAITracer(),), error_reward=error_reward)
