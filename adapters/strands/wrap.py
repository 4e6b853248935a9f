"""A Strands agent or graph as an agent."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from agl.adapters.base import question
from agl.agents.agent import Agent, RewardFunction, scored
from agl.errors import ConfigError

_UNNAMED = "Strands Agents"
"""What Strands calls an agent that was given no name."""


def handles(agent: object) -> bool:
    """Whether `agent` is a Strands agent or a multi-agent graph."""
    return any(
        (cls.__module__, cls.__name__)
        in (("strands.agent.agent", "Agent"), ("strands.multiagent.base", "MultiAgentBase"))
        for cls in type(agent).__mro__
    )


def agent_name(agent: Any) -> str | None:
    """The name that the user gave an agent."""
    name = getattr(agent, "name", None)
    return name if isinstance(name, str) and name not in ("", _UNNAMED) else None


def wrap(
    agent: Any,
    reward: RewardFunction | None = None,
    *,
    name: str | None = None,
    input: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Any] | None = None,
    error_reward: float | None = None,
) -> Agent:
    """Make a Strands agent trainable. Each run gets a copy with the history and the state that the agent has now: a
    Strands agent remembers what was said, and refuses to run twice at once. Model and tools are shared. Strands' own
    printing of what an agent says is left out of the copies.

    Args:
        agent: a `strands.Agent`, or a graph of such agents.
        reward: (task, output) -> float or dict of floats, sync or async.
        name: the agent's name; `Agent(name=...)`'s if None, else "agent".
        input: task -> the agent's prompt; the task's question if None.
        output: its result -> what is scored; the structured output, else the last message's text if None.
        error_reward: the reward of a run in which the agent raised; None = retried, then dropped.

    Raises:
        ConfigError: an agent that cannot be copied: one with a session manager, a swarm.
    """
    from agl.adapters.strands.tracer import StrandsTracer

    fresh(agent)  # what cannot be copied is told now, not in the first rollout
    before, after = input or question, output or text_of

    async def invoke(task: Any) -> Any:
        return after(await fresh(agent).invoke_async(before(task)))

    tracers = (StrandsTracer(),)
    return scored(name or agent_name(agent) or "agent", invoke, reward, tracers=tracers, error_reward=error_reward)


def text_of(result: Any) -> Any:
    """What a run said: its structured output, its last message's text, or of a graph what its last node said."""
    if getattr(result, "structured_output", None) is not None:
        return result.structured_output
    message = getattr(result, "message", None)
    if isinstance(message, dict):
        return "\n".join(block["text"] for block in message["content"] if "text" in block)
    order = getattr(result, "execution_order", None)
    if order:
        return text_of(result.results[order[-1].node_id].result)
    return result


def fresh(agent: Any) -> Any:
    """A copy of an agent or a graph that shares nothing with it that a run changes.

    Raises:
        ConfigError: it holds something that cannot be copied or must not be shared.
    """
    if getattr(agent, "_session_manager", None) or getattr(agent, "session_manager", None):
        raise _uncopyable(agent, "it has a session manager, and all rollouts would write to one session")
    try:
        return _copied(agent, {})
    except (TypeError, AttributeError, ValueError) as error:
        raise _uncopyable(agent, str(error)) from error


def _uncopyable(agent: Any, why: str) -> ConfigError:
    return ConfigError(
        f"cannot make a copy of this {type(agent).__name__} for each rollout: {why}",
        hint="build it inside a function, and make the function trainable with @agl.rollout",
    )


def _copied(agent: Any, memo: dict[int, Any]) -> Any:
    if id(agent) in memo:
        return memo[id(agent)]
    if not hasattr(agent, "tool_registry"):
        return _copied_graph(agent, memo)
    new = memo[id(agent)] = object.__new__(type(agent))
    registry = agent.tool_registry
    tools = [*registry.registry.values(), *registry.dynamic_tools.values()]
    for tool in tools:
        memo[id(tool)] = _copied_tool(tool, memo)
    # A copy that is thrown away must not close what the original still uses.
    memo[id(registry._tool_providers)] = []
    for shared in (agent.model, agent._aux_model, agent.callback_handler, agent.tracer, agent._sandbox):
        memo[id(shared)] = shared
    if type(agent.callback_handler).__name__ == "PrintingCallbackHandler":
        from strands.handlers import null_callback_handler

        memo[id(agent.callback_handler)] = null_callback_handler
    memo[id(agent._cancel_signal)] = threading.Event()
    memo[id(agent._concurrency)] = type(agent._concurrency)(agent._concurrency.mode)
    memo[id(agent.tool_caller)] = type(agent.tool_caller)(new)
    for name, value in vars(agent).items():
        setattr(new, name, copy.deepcopy(value, memo))
    return new


def _copied_tool(tool: Any, memo: dict[int, Any]) -> Any:
    if not (type(tool).__name__ == "_AgentAsTool" and hasattr(tool, "_agent")):
        return tool
    new = copy.copy(tool)
    new._agent, new._lock = _copied(tool._agent, memo), threading.Lock()
    return new


def _copied_graph(graph: Any, memo: dict[int, Any]) -> Any:
    if type(graph).__name__ != "Graph":
        # A swarm's handoff tools are closures over the swarm that made them.
        raise TypeError(f"a {type(graph).__name__} cannot be copied")
    for node in graph.nodes.values():
        memo[id(node.executor)] = _copied(node.executor, memo)
    memo[id(graph.tracer)] = graph.tracer
    return copy.deepcopy(graph, memo)
