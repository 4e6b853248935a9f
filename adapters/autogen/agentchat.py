"""Hooks of autogen-agentchat and autogen-core (>= 0.7, < 0.8).

Replaced, because the framework offers no hook: `on_messages` and `on_messages_stream` of every `BaseChatAgent` (teams,
`run`, `AgentTool` and a user's call all go through them), `run_json` and `run_json_stream` of every `BaseTool`,
`call_tool` of every workbench that does not run such tools (MCP), `BaseAgent.on_message` for agents of autogen-core and
for team managers that call a model themselves, and `send_message` and `publish_message` of the runtime, whose handlers
run in the context in which it was started: a message's id leads to its sender's rollout.
"""

from __future__ import annotations

import functools
import importlib.util
import uuid
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from agl import tracing
from agl.adapters.aside import traced
from agl.adapters.failed_calls import record_failed_call
from agl.adapters.patching import Patches
from agl.adapters.scopes import agent_turn, around_async, handoff, tool_end, tool_run
from agl.tracing import context
from agl.tracing.context import Scope, within


def install(patches: Patches) -> None:
    """Hook both packages, or autogen-core alone where it is used without agentchat."""
    from autogen_core import BaseAgent, SingleThreadedAgentRuntime
    from autogen_core.tools import BaseTool, StaticWorkbench, Workbench

    patches.method(BaseAgent, "on_message", _on_message)
    patches.method(SingleThreadedAgentRuntime, "send_message", _sends)
    patches.method(SingleThreadedAgentRuntime, "publish_message", _sends)
    patches.tree(BaseTool, {"run_json": around_async(_tool), "run_json_stream": _run_json_stream})
    patches.tree(
        Workbench, {"call_tool": around_async(_workbench_tool)}, but=lambda cls: issubclass(cls, StaticWorkbench)
    )
    if importlib.util.find_spec("autogen_agentchat") is not None:
        from autogen_agentchat.agents import BaseChatAgent

        patches.tree(BaseChatAgent, {"on_messages": around_async(_turn), "on_messages_stream": _on_messages_stream})


# -- agents -----------------------------------------------------------------------------------------------------------


def _turn(agent: Any, *_: Any, **__: Any) -> Any:
    return within(agent_turn(agent.name, of=agent))


def _on_messages_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_messages_stream(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tracing.current() is None:
            return original(self, *args, **kwargs)
        return traced(
            lambda: agent_turn(self.name, of=self),
            lambda: original(self, *args, **kwargs),
            lambda scope, error: tracing.end(scope, error=error),
            _EventSpans(self.name).seen,
        )

    return on_messages_stream


class _EventSpans:
    """Makes the spans for which an agent's events are the only source: handoffs, and tool calls that reach no tool (an
    unknown name, or arguments that are no JSON)."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.requested: dict[str, Any] = {}
        self.results: dict[str, str] = {}

    def seen(self, event: Any) -> None:
        event = getattr(event, "chat_message", event)
        # A nested team's events pass through the outer agent's stream too.
        if getattr(event, "source", None) != self.agent:
            return
        kind = getattr(event, "type", None)
        if kind == "ToolCallRequestEvent":
            self.requested.update({call.id: call for call in event.content})
        elif kind == "ToolCallExecutionEvent":
            for result in event.content:
                self.results[result.call_id] = result.content
                call = self.requested.get(result.call_id)
                if result.is_error and call is not None:
                    record_failed_call(call.name, call.id, call.arguments, result.content)
        elif kind == "HandoffMessage":
            # A handoff has the text of its tool's result; one that the agent decides itself has no tool call.
            ids = [call_id for call_id, text in self.results.items() if text == event.content]
            handoff(self.agent, event.target, ids[0] if ids else None)


_senders: WeakValueDictionary[str, Scope] = WeakValueDictionary()
"""Message id -> the scope that it was sent in, while that is in use."""


def _sends(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def send(self: Any, *args: Any, message_id: str | None = None, **kwargs: Any) -> Any:
        here = tracing.current()
        if here is not None:
            message_id = message_id or str(uuid.uuid4())
            _senders[message_id] = here
        return await original(self, *args, message_id=message_id, **kwargs)

    return send


def _on_message(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def on_message(self: Any, message: Any, ctx: Any) -> Any:
        here, sender = tracing.current(), _senders.get(ctx.message_id)
        if sender is not None and (here is None or here.rollout is not sender.rollout):
            context.restore(sender)
        name = None if tracing.current() is None else _core_name(self, message, ctx)
        with within(agent_turn(name) if name else None):
            return await original(self, message, ctx)

    return on_message


def _core_name(agent: Any, message: Any, ctx: Any) -> str | None:
    """The name under which an agent of autogen-core speaks; None for agentchat's internal ones that call no model."""
    if not type(agent).__module__.startswith("autogen_agentchat."):
        return agent.id.type
    asks = ctx.is_rpc or type(message).__name__ in ("GroupChatAgentResponse", "GroupChatTeamResponse")
    return agent._name if asks and hasattr(agent, "_model_client") else None


# -- tools ------------------------------------------------------------------------------------------------------------


def _tool(tool: Any, args: Any, cancellation_token: Any, call_id: str | None = None, **_: Any) -> Any:
    scope = tool_run(tool.name, args, call_id, tool=tool)
    return within(scope, lambda scope, value: tool_end(scope, _result(tool, value)))


def _run_json_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_json_stream(
        self: Any, args: Any, cancellation_token: Any, call_id: str | None = None, **kwargs: Any
    ) -> Any:
        if tracing.current() is None:
            return original(self, args, cancellation_token, call_id=call_id, **kwargs)
        last: list[Any] = []

        def end(scope: Scope, error: BaseException | None) -> None:
            if error is not None or not last:
                tracing.end(scope, error=error)
            else:
                tool_end(scope, _result(self, last[0]))

        def seen(event: Any) -> None:
            last[:] = [event]

        return traced(
            lambda: tool_run(self.name, args, call_id, tool=self),
            lambda: original(self, args, cancellation_token, call_id=call_id, **kwargs),
            end,
            seen,
        )

    return run_json_stream


def _result(tool: Any, value: Any) -> Any:
    """What a tool returned; as text where the tool itself puts it into words, such as an agent's as a tool."""
    from autogen_core.tools import BaseTool

    if type(tool).return_value_as_string is BaseTool.return_value_as_string:
        return value
    try:
        return tool.return_value_as_string(value)
    except Exception:  # AutoGen reports it
        return value


def _workbench_tool(
    workbench: Any,
    name: str,
    arguments: Any = None,
    cancellation_token: Any = None,
    call_id: str | None = None,
    **_: Any,
) -> Any:
    scope = tool_run(name, arguments or {}, call_id)
    return within(scope, lambda scope, result: tool_end(scope, result.to_text(), failed=result.is_error))
