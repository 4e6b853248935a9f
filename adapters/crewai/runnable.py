"""A crewai agent or crew as an agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl.adapters.base import Runnable, question
from agl.errors import ConfigError


def handles(agent: object) -> bool:
    """Whether `agent` is an agent or a crew of crewai."""
    return any(
        (cls.__module__, cls.__name__)
        in (("crewai.agents.agent_builder.base_agent", "BaseAgent"), ("crewai.crew", "Crew"))
        for cls in type(agent).__mro__
    )


def _is_crew(agent: Any) -> bool:
    return hasattr(agent, "tasks")


def agent_name(agent: Any) -> str:
    """An agent's role, as it was before a crew put its inputs into it: one name for all rollouts."""
    return str(getattr(agent, "_original_role", None) or agent.role).strip()


def runnable(agent: Any) -> Runnable:
    """How an agent or a crew is run: a copy of it, by `kickoff_async`.

    Raises:
        ConfigError: it has a memory, which all rollouts would share.
    """
    for part in (agent, *(agent.agents if _is_crew(agent) else ())):
        if getattr(part, "memory", None):
            raise ConfigError(
                f"a {type(part).__name__} with a memory cannot be shared by rollouts: each would remember the others",
                hint="leave out memory=, or build it inside a function, and make the function trainable with "
                "@agl.rollout",
            )

    async def invoke(value: Any) -> Any:
        from crewai.events.utils.console_formatter import set_suppress_console_output  # pyright: ignore

        copy = agent.copy()
        if _is_crew(copy):
            # Nothing here reads a stream.
            copy.stream = False
        # An agent alone prints each step, even if it is not verbose.
        token: Any = set_suppress_console_output(True)
        try:
            return await copy.kickoff_async(value)
        finally:
            token.var.reset(token)

    if not _is_crew(agent):
        return Runnable(agent_name(agent), invoke, question, output_of)
    # "crew" is crewai's default.
    name = agent.name if agent.name not in (None, "", "crew") else "agent"
    return Runnable(name, invoke, inputs_of, output_of)


def inputs_of(task: Any) -> dict[str, Any]:
    """A crew's inputs: the fields of the task, or its text as `question`."""
    return dict(task) if isinstance(task, Mapping) else {"question": question(task)}


def output_of(result: Any) -> Any:
    """The structured output, if there is one, else the text."""
    return next((v for v in (result.pydantic, getattr(result, "json_dict", None)) if v is not None), result.raw)
