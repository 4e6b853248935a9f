"""Hooks of classic AutoGen, the distribution `autogen` or `ag2` below 1.0 (>= 0.9.10, < 1), and `pyautogen` 0.2.

Replaced in every `ConversableAgent`, because its loggers report only after the call: `generate_reply` and
`a_generate_reply` (an agent's turn, in chats, group chats and speaker selection alike), `execute_function` and
`a_execute_function` (tools; they belong to the agent that executes them, not to the one that issued the call).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl import tracing
from agl.adapters.patching import Patches
from agl.adapters.scopes import agent_turn, tool_end, tool_run, within


def install(patches: Patches) -> None:
    """Hook `autogen.ConversableAgent` and its subclasses."""
    if importlib.util.find_spec("autogen.agentchat") is None:
        return
    from autogen import ConversableAgent  # pyright: ignore

    patches.tree(
        ConversableAgent,
        {
            "generate_reply": _generate_reply,
            "a_generate_reply": _a_generate_reply,
            "execute_function": _execute_function,
            "a_execute_function": _a_execute_function,
        },
    )


def _generate_reply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_reply(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = agent_turn(self.name)
        try:
            reply = original(self, *args, **kwargs)
        except BaseException as error:
            if scope is not None:
                tracing.end(scope, error=error)
            raise
        if scope is not None:
            tracing.end(scope)
        return reply

    return generate_reply


def _a_generate_reply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def a_generate_reply(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await within(agent_turn(self.name), original(self, *args, **kwargs))

    return a_generate_reply


def _execute_function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_function(self: Any, func_call: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        call_id = _call_id(self, func_call, args, kwargs)
        scope = tool_run(func_call.get("name", ""), func_call.get("arguments", ""), call_id)
        try:
            result = original(self, func_call, *args, **kwargs)
        except BaseException as error:
            if scope is not None:
                tracing.end(scope, error=error)
            raise
        if scope is not None:
            _end(scope, result)
        return result

    return execute_function


def _a_execute_function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def a_execute_function(self: Any, func_call: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        call_id = _call_id(self, func_call, args, kwargs)
        scope = tool_run(func_call.get("name", ""), func_call.get("arguments", ""), call_id)
        run = original(self, func_call, *args, **kwargs)
        return await within(scope, run, lambda result: _end(scope, result))

    return a_execute_function


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


def _end(scope: Any, result: tuple[bool, dict[str, Any]]) -> None:
    succeeded, message = result
    tool_end(scope, str(message.get("content", "")), failed=not succeeded)
