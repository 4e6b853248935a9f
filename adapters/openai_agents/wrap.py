"""An agent of the OpenAI Agents SDK as an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agl.adapters.base import question
from agl.agents.agent import Agent, RewardFunction, scored


def handles(agent: object) -> bool:
    """Whether `agent` is an `agents.Agent`."""
    # "agents" is also what many users call a package of their own.
    return hasattr(agent, "handoffs") and any(
        cls.__module__ == "agents.agent" and cls.__qualname__ == "Agent" for cls in type(agent).__mro__
    )


def wrap(
    agent: Any,
    reward: RewardFunction | None = None,
    *,
    name: str | None = None,
    input: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Any] | None = None,
    error_reward: float | None = None,
) -> Agent:
    """Make an OpenAI Agents SDK agent trainable; it is run by `Runner.run`.

    Args:
        agent: `agents.Agent(...)`, the one that a run starts with.
        reward: (task, output) -> float or dict of floats, sync or async.
        name: the agent's name; its own if None.
        input: task -> the run's input, a text or a list of input items; the task's question if None.
        output: the `RunResult` -> what is scored; its final output if None.
        error_reward: the reward of a run in which the agent raised; None = retried, then dropped.
    """
    from agl.adapters.openai_agents.tracer import OpenAIAgentsTracer

    before = input or _input
    after = output or (lambda result: result.final_output)

    async def invoke(task: Any) -> Any:
        from agents import Runner

        return after(await Runner.run(agent, before(task)))

    tracers = (OpenAIAgentsTracer(),)
    return scored(name or agent.name, invoke, reward, tracers=tracers, error_reward=error_reward)


def _input(task: Any) -> Any:
    return task if isinstance(task, list) else question(task)
