"""Hooks of classic AutoGen, the distribution `autogen` or `ag2` below 1.0 (>= 0.9.10, < 1), and `pyautogen` 0.2.

Replaced in every `ConversableAgent`, because its loggers report only after the call: `generate_reply` and
`a_generate_reply` (an agent's turn, in chats, group chats and speaker selection alike), `execute_function` and
`a_execute_function` (tools; they belong to the agent that executes them, not to the one that issued the call).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from agl.adapters.patching import Patches
from agl.adapters.scopes import agent_turn, around, around_async, tool_end, tool_run
from agl.tracing.context import Scope, within


def install(patches: Patches) -> None:
    """Hook `autogen.ConversableAgent` and its subclasses."""
    if importlib.util.find_spec("autogen.agentchat") is None:
        return
    from autogen import ConversableAgent  # pyright: ignore

    patches.tree(
        ConversableAgent,
        {
            "generate_reply": around(_turn),
            "a_generate_reply": around_async(_turn),
            "execute_function": around(_tool),
            "a_execute_function": around_async(_tool),
        },
    )


def _turn(agent: Any, *_: Any, **__: Any) -> Any:
    return within(agent_turn(agent.name, of=agent))


def _tool(agent: Any, func_call: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    call_id = _call_id(agent, func_call, args, kwargs)
    scope = tool_run(func_call.get("name", ""), func_call.get("arguments", ""), call_id)

    def finish(scope: Scope, result: tuple[bool, dict[str, Any]]) -> None:
        succeeded, message = result
        tool_end(scope, str(message.get("content", "")), failed=not succeeded)

    return within(scope, finish)


def _call_id(agent: Any, func_call: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The id of the call that a tool answers; pyautogen 0.2 does not pass it, but runs the object in its message."""
    call_id = kwargs.get("call_id", args[0] if args else None)
    if isinstance(call_id, str):
        return call_id
    for messages in getattr(agent, "_oai_messages", {}).values():
        for call in messages[-1].get("tool_calls") or () if messages else ():
            if call.get("function") is func_call:
                return call.get("id")
    return None
