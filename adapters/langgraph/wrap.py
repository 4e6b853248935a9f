"""A compiled graph of the user's own as an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agl.adapters.langchain.wrap import handles as is_langchains
from agl.adapters.langchain.wrap import is_graph, messages, name_of, text_of
from agl.agents.agent import Agent, RewardFunction, scored


def handles(agent: object) -> bool:
    """Whether `agent` is a compiled graph that `create_agent` did not make."""
    return is_graph(agent) and not is_langchains(agent)


def wrap(
    agent: Any,
    reward: RewardFunction | None = None,
    *,
    name: str | None = None,
    input: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Any] | None = None,
    error_reward: float | None = None,
) -> Agent:
    """Make a compiled graph trainable; its nodes are agents, and may call bare `openai` clients too.

    Args:
        agent: `StateGraph(...).compile(name=...)`, or a function of `@entrypoint`.
        reward: (task, output) -> float or dict of floats, sync or async.
        name: the name of the whole; the graph's if None, else "agent".
        input: task -> the graph's input; the task's question as a user message if None.
        output: its final state -> what is scored; the last message's text, else the state if None.
        error_reward: the reward of a run in which the graph raised; None = retried, then dropped.
    """
    from agl.adapters.langgraph.tracer import LangGraphTracer
    from agl.adapters.openai.tracer import OpenAITracer

    before = input or messages
    after = output or text_of

    async def invoke(task: Any) -> Any:
        return after(await agent.ainvoke(before(task)))

    tracers = (LangGraphTracer(), OpenAITracer())
    return scored(name or name_of(agent), invoke, reward, tracers=tracers, error_reward=error_reward)
