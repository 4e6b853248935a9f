"""A copy of a Strands agent or graph for each rollout, because an agent keeps its messages and runs once at a time."""

from __future__ import annotations

import copy
import threading
from typing import Any

from agl.errors import ConfigError


def fresh_copy(agent: Any) -> Any:
    """A copy of an agent or a graph that shares nothing with it that a run changes.

    Raises:
        ConfigError: a part of it cannot be copied or must not be shared.
    """
    if getattr(agent, "_session_manager", None) or getattr(agent, "session_manager", None):
        raise _uncopyable(agent, "it has a session manager, and all rollouts would write to one session")
    try:
        return _copy(agent, {})
    except (TypeError, AttributeError, ValueError) as error:
        raise _uncopyable(agent, str(error)) from error


def _uncopyable(agent: Any, why: str) -> ConfigError:
    return ConfigError(
        f"cannot make a copy of this {type(agent).__name__} for each rollout: {why}",
        hint="build it inside a function, and make the function trainable with @agl.rollout",
    )


def _copy(agent: Any, memo: dict[int, Any]) -> Any:
    if id(agent) in memo:
        return memo[id(agent)]
    if not hasattr(agent, "tool_registry"):
        return _copy_graph(agent, memo)
    new = memo[id(agent)] = object.__new__(type(agent))
    registry = agent.tool_registry
    tools = [*registry.registry.values(), *registry.dynamic_tools.values()]
    for tool in tools:
        memo[id(tool)] = _copy_tool(tool, memo)
    # A discarded copy must not close tools that the original still uses.
    memo[id(registry._tool_providers)] = []
    for shared in (agent.model, agent._aux_model, agent.callback_handler, agent.tracer, agent._sandbox):
        memo[id(shared)] = shared
    if (helper := getattr(agent.conversation_manager, "summarization_agent", None)) is not None:
        memo[id(helper)] = _copy(helper, memo)
    if type(agent.callback_handler).__name__ == "PrintingCallbackHandler":
        from strands.handlers import null_callback_handler

        memo[id(agent.callback_handler)] = null_callback_handler
    memo[id(agent._cancel_signal)] = threading.Event()
    memo[id(agent._concurrency)] = type(agent._concurrency)(agent._concurrency.mode)
    memo[id(agent.tool_caller)] = type(agent.tool_caller)(new)
    for name, value in vars(agent).items():
        setattr(new, name, copy.deepcopy(value, memo))
    return new


def _copy_tool(tool: Any, memo: dict[int, Any]) -> Any:
    if not (type(tool).__name__ == "_AgentAsTool" and hasattr(tool, "_agent")):
        return tool
    new = copy.copy(tool)
    new._agent, new._lock = _copy(tool._agent, memo), threading.Lock()
    return new


def _copy_graph(graph: Any, memo: dict[int, Any]) -> Any:
    if type(graph).__name__ != "Graph":
        # A swarm's handoff tools are closures over the swarm that made them.
        raise TypeError(f"a {type(graph).__name__} cannot be copied")
    for node in graph.nodes.values():
        memo[id(node.executor)] = _copy(node.executor, memo)
    memo[id(graph.tracer)] = graph.tracer
    return copy.deepcopy(graph, memo)
