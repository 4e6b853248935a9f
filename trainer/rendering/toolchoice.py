"""The opening of a tool call as the chat template writes it, so that a required call can be begun in the prompt.

The opening is taken from a rendered placeholder call: the text between the generation prompt and the tool's name (any
tool), or its arguments (one tool).
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from agl.errors import ConfigError
from agl.trainer.rendering.normalise import Tools

NAME = "placeholder_tool"
KEY = "placeholder_key"
VALUE = "placeholder value"


class Render(Protocol):
    """The full text of a conversation."""

    def __call__(self, messages: list[dict[str, Any]], tools: Tools, generation: bool) -> str: ...


def placeholder_call(name: str, call_id: str, value: str = VALUE) -> dict[str, Any]:
    """A tool call whose rendering shows where name and arguments go."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {KEY: value}}}


def rendered_call(render: Render, tools: Tools, name: str) -> str | None:
    """The text after the generation prompt when the assistant calls `name`; None if the template writes no call there.

    The call is followed by its result, since some templates write the last answer differently from earlier ones.
    """
    user = {"role": "user", "content": "placeholder"}
    assistant = {"role": "assistant", "content": "", "tool_calls": [placeholder_call(name, "call00001")]}
    result = {"role": "tool", "content": "placeholder", "tool_call_id": "call00001", "name": name}
    prompt = render([user], tools, True)
    whole = render([user, assistant, result], tools, False)
    call = whole[len(prompt) :] if whole.startswith(prompt) else ""
    return call if name in call and KEY in call.partition(name)[2] else None


def opener(render: Render, tools: Tools, force: str | bool) -> str:
    """The text that begins a forced call.

    Args:
        render: of the model.
        tools: of the request.
        force: a tool's name, or True for any of them.

    Raises:
        ConfigError: no such tool, or the template cannot write a tool call right after its generation prompt.
    """
    names = [str(t.get("function", t).get("name")) for t in tools or ()]
    if force is not True and force not in names:
        raise ConfigError(f"tool_choice names {force!r}, which is none of the request's tools", hint=f"tools: {names}")
    if not names:
        raise ConfigError("tool_choice asks for a tool call, but the request has no tools", hint="pass tools=[...]")
    name = names[0] if len(names) == 1 else NAME if force is True else str(force)
    call = rendered_call(render, tools, name)
    if call is None:
        raise ConfigError(
            "tool_choice cannot be enforced: the chat template writes no tool call right after its generation prompt",
            hint='use tool_choice="auto" with this model',
        )
    before, _, after = call.partition(name)
    if name is NAME:
        return before
    between = after[: after.index(KEY)]
    between = re.sub(r"(\{\s*\"|<[^<>]*)$", "", between)
    if between.endswith("<arg_key>"):
        between = between.removesuffix("<arg_key>")
    return (before + name + between).rstrip(" ")
