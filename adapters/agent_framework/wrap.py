"""An Agent Framework agent as an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agl.adapters.base import question
from agl.agents.agent import Agent, RewardFunction, scored
from agl.errors import ConfigError

_WORKFLOWS = ("Workflow", "WorkflowAgent", "FunctionalWorkflow")


def handles(agent: object) -> bool:
    """Whether `agent` is an agent or a workflow of this framework."""
    return any(
        (cls.__module__ == "agent_framework._agents" and cls.__name__ == "BaseAgent") or _is_workflow(cls)
        for cls in type(agent).__mro__
    )


def _is_workflow(cls: type) -> bool:
    return cls.__module__.startswith("agent_framework._workflows.") and cls.__name__ in _WORKFLOWS


def wrap(
    agent: Any,
    reward: RewardFunction | None = None,
    *,
    name: str | None = None,
    input: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Any] | None = None,
    error_reward: float | None = None,
) -> Agent:
    """Make an Agent Framework agent trainable. Each run has a session of its own.

    Args:
        agent: an `agent_framework.Agent` or any other agent of the framework.
        reward: (task, output) -> float or dict of floats, sync or async.
        name: the agent's name; `Agent(name=...)`'s if None, else "agent".
        input: task -> the messages; the task's question if None.
        output: its response -> what is scored; the structured output, else the text if None.
        error_reward: the reward of a run in which the agent raised; None = retried, then dropped.

    Raises:
        ConfigError: a workflow; one cannot run twice at once, and remembers what was said.
    """
    from agl.adapters.agent_framework.tracer import AgentFrameworkTracer

    if any(_is_workflow(cls) for cls in type(agent).__mro__):
        raise ConfigError(
            f"a {type(agent).__name__} cannot be shared by rollouts: it runs once at a time and keeps what was said",
            hint="build the workflow inside a function, and make the function trainable with @agl.rollout",
        )
    before, after = input or question, output or text_of

    async def invoke(task: Any) -> Any:
        return after(await agent.run(before(task)))

    who = name or getattr(agent, "name", None) or "agent"
    return scored(who, invoke, reward, tracers=(AgentFrameworkTracer(),), error_reward=error_reward)


def text_of(response: Any) -> Any:
    """What a run said: its structured output, else its text."""
    value = getattr(response, "value", None)
    return value if value is not None else response.text
