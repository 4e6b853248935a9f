"""An Agent Framework agent as an agent."""

from __future__ import annotations

from typing import Any

from agl.adapters.base import Runnable, question
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


def runnable(agent: Any) -> Runnable:
    """How an agent is run: by its `run`, without a session of the user's.

    Raises:
        ConfigError: a workflow, which cannot run twice at once and keeps its messages.
    """
    if any(_is_workflow(cls) for cls in type(agent).__mro__):
        raise ConfigError(
            f"a {type(agent).__name__} cannot be shared by rollouts: it runs once at a time and keeps its messages",
            hint="build the workflow inside a function, and make the function trainable with @agl.rollout",
        )

    async def invoke(value: Any) -> Any:
        return await agent.run(value)

    return Runnable(getattr(agent, "name", None) or "agent", invoke, question, text_of)


def text_of(response: Any) -> Any:
    """A response's structured output, else its text."""
    value = getattr(response, "value", None)
    return value if value is not None else response.text
