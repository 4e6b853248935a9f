"""A smolagents agent as an agent."""

from __future__ import annotations

from typing import Any

from agl.adapters.base import Runnable, question
from agl.adapters.smolagents.copying import fresh_copy


def handles(agent: object) -> bool:
    """Whether `agent` is a smolagents agent."""
    return any((cls.__module__, cls.__name__) == ("smolagents.agents", "MultiStepAgent") for cls in type(agent).__mro__)


def runnable(agent: Any) -> Runnable:
    """How an agent is run: a copy of it, by `run`.

    Raises:
        ConfigError: an agent that cannot be copied: one whose code is executed in another process.
    """
    fresh_copy(agent)  # an agent that cannot be copied is an error now, not in the first rollout

    def invoke(value: Any) -> Any:
        return fresh_copy(agent).run(value)

    return Runnable(agent.name or "agent", invoke, question, answer_of)


def answer_of(result: Any) -> Any:
    """The final answer, also of an agent with `return_full_result=True`."""
    cls = type(result)
    return result.output if (cls.__module__, cls.__name__) == ("smolagents.agents", "RunResult") else result
