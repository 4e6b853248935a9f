"""A fresh copy of an agent or a team for each rollout, because AutoGen's agents hold their conversation."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

from agl.errors import ConfigError

_HINT = "give a function without arguments that builds it: agl.adapters.autogen.wrap(build_agent, reward=score)"


def fresh_copy(agent: Any) -> Any:
    """A copy with a separate conversation. Model clients, tools, memories and MCP sessions are shared.

    Raises:
        ConfigError: a part of the agent cannot be copied, or a team runs on a runtime of the user's.
    """
    memo: dict[int, Any] = {}
    teams = []
    for part in _parts(agent):
        if _is_shared(part):
            memo[id(part)] = part
        elif _is_a(part, "autogen_agentchat.", "BaseGroupChat"):
            teams.append(part)
            _new_runtime(part, memo)
    try:
        copied = copy.deepcopy(agent, memo)
    except Exception as error:
        raise ConfigError(
            f"cannot make a fresh copy of {type(agent).__name__} {agent.name!r} for each rollout: {error}", hint=_HINT
        ) from error
    for team in teams:
        memo[id(team)]._initialized = memo[id(team)]._is_running = False
    return copied


def _new_runtime(team: Any, memo: dict[int, Any]) -> None:
    """Give the copy a new message queue and runtime; those of the original are bound to an event loop."""
    from autogen_core import SingleThreadedAgentRuntime

    if not team._embedded_runtime:
        raise ConfigError(f"team {team.name!r} runs on a runtime that every rollout would share", hint=_HINT)
    memo[id(team._runtime)] = SingleThreadedAgentRuntime(ignore_unhandled_exceptions=False)
    memo[id(team._output_message_queue)] = asyncio.Queue()


def _is_shared(part: Any) -> bool:
    if _is_a(part, "autogen_core.", "ChatCompletionClient") or _is_a(part, "autogen_core.", "Memory"):
        return True
    if _is_a(part, "autogen_core.", "BaseTool"):
        return not _is_a(part, "autogen_agentchat.", "TaskRunnerTool")
    return _is_a(part, "autogen_core.", "Workbench") and not _is_a(part, "autogen_core.", "StaticWorkbench")


def _is_a(part: Any, package: str, name: str) -> bool:
    return any(cls.__name__ == name and cls.__module__.startswith(package) for cls in type(part).__mro__)


def _parts(agent: Any) -> Iterator[Any]:
    """The agent and every part of it, without the parts of shared objects."""
    seen: set[int] = set()
    queue = [agent]
    while queue:
        part = queue.pop()
        if id(part) in seen or isinstance(part, (str, bytes, int, float, type, type(None))):
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, dict):
            queue.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset)):
            queue.extend(part)
        elif hasattr(part, "__dict__") and not callable(part) and not _is_shared(part):
            queue.extend(vars(part).values())
